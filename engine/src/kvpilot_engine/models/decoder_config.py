"""What a decoder-only checkpoint is made of, whatever its architecture is called. Parsed once, by one file an
architecture; the float32 reference and the compiled path both run from it. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from kvpilot_engine.errors import SettingsError


class Activation(StrEnum):
    """The gate's function in the MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3's long-context scaling: low frequencies are divided, middle ones blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """All frequencies divided by the factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Phi-3's: each frequency divided by its own factor, and cosines and sines multiplied by attention_factor.

    The long list is used when a longer length than the original one is served, for all positions alike.
    """

    short_factors: tuple[float, ...]
    """[rotary_dim / 2], as long_factors."""
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyRopeScaling:
    """Each frequency divided by its own factor: how GGUF keeps Llama 3's scaling."""

    factors: tuple[float, ...]
    """[rotary_dim / 2]"""


RopeScaling = Llama3RopeScaling | LinearRopeScaling | LongRopeScaling | FrequencyRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer, half rotation over the first rotary_dim elements of a head."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig
    window: int | None = None
    """A query sees this many tokens, itself included; None: all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder. A layer is

    x += post_norm(attention(norm(x)));  x += post_norm(down(activation(gate) * up)) of norm(x)

    where post norms, biases, norms of queries and keys, windows and soft caps are there only when said so.
    """

    architecture: str
    """As the checkpoint names it, for people."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    attention_scale: float
    """Multiplies query · key; usually head_dim ** -0.5."""
    activation: Activation = Activation.SILU
    qkv_bias: bool = False
    output_bias: bool = False
    """The attention's output projection has a bias."""
    qk_norm: bool = False
    """Each head's query and key is RMS-normalized before the rotation."""
    post_norms: bool = False
    """Attention and MLP outputs are RMS-normalized before they are added."""
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    logit_softcap: float | None = None
    """The same for the logits."""
    tie_word_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def window(self) -> int | None:
        """Tokens that some layer still reads: what lies further back is free. None when a layer reads all."""
        windows = [layer.window for layer in self.layers]
        limited = [window for window in windows if window is not None]
        return max(limited) if len(limited) == len(windows) else None

    def with_windows(self, windows: tuple[int | None, ...]) -> DecoderConfig:
        """The same decoder with these windows, one a layer."""
        layers = (replace(layer, window=window) for layer, window in zip(self.layers, windows, strict=True))
        return replace(self, layers=tuple(layers))

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.kv_size * element_bytes


def check_heads(config: DecoderConfig, origin: str) -> DecoderConfig:
    """The same configuration, or a SettingsError when its heads can't be computed; `origin` names the file."""
    problems = []
    if config.num_heads % config.num_kv_heads:
        problems.append(
            f"{origin}: {config.num_heads} query heads are not a multiple of {config.num_kv_heads} key heads"
        )
    problems += [
        f"{origin}: {dim} rotated elements in a head of {config.head_dim}; an even number up to that is needed"
        for dim in sorted({layer.rope.rotary_dim for layer in config.layers})
        if dim % 2 or not 0 < dim <= config.head_dim
    ]
    if problems:
        raise SettingsError(problems)
    return config
