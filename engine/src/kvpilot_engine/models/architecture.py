"""What one architecture tells the readers: how its configuration is parsed and what its tensors are called.

Each architecture's file makes one of these and the registry lists them; the readers know no architecture by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.gguf_header import GGUFHeader
from kvpilot_engine.models.hf_config import HFConfig
from kvpilot_engine.models.tensor_shapes import tensor_shapes


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows of a tensor of the checkpoint: all of them, or one part of a fused one."""

    name: str
    start: int
    num_rows: int
    of: int
    """Rows of the whole tensor."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Canonical module names → the checkpoint's. Modules that share a name lie in it one after the other, as listed."""

    outside: Mapping[str, str]
    """embedding, norm, head."""
    layer_prefix: str
    """With {} for the layer's number."""
    inside: Mapping[str, str]
    """The modules of a layer."""

    def locate(self, config: DecoderConfig) -> dict[str, TensorRows]:
        """Canonical tensor name → where it is, for every tensor of the decoder."""
        num_rows = {name: shape[0] for name, shape in tensor_shapes(config).items()}
        return {name: self._rows_of(name, num_rows) for name in num_rows}

    def _rows_of(self, name: str, num_rows: Mapping[str, int]) -> TensorRows:
        head, kind = name.rsplit(".", 1)
        if not head.startswith("layers."):
            return TensorRows(f"{self.outside[head]}.{kind}", 0, num_rows[name], num_rows[name])
        _, index, module = head.split(".")
        target = self.inside[module]
        fused = [m for m, t in self.inside.items() if t == target]
        sizes = [num_rows[f"layers.{index}.{m}.{kind}"] for m in fused]
        start = sum(sizes[: fused.index(module)])
        return TensorRows(f"{self.layer_prefix.format(index)}{target}.{kind}", start, num_rows[name], sum(sizes))


HF_NAMES = TensorNames(
    outside={"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    layer_prefix="model.layers.{}.",
    inside={
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
)
GGUF_NAMES = TensorNames(
    outside={"embedding": "token_embd", "norm": "output_norm", "head": "output"},
    layer_prefix="blk.{}.",
    inside={
        "attention_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "o": "attn_output",
        "attention_post_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "mlp_post_norm": "post_ffw_norm",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    title: str
    """For people."""
    hf_classes: tuple[str, ...]
    """What config.json calls it under `architectures`."""
    parse_hf: Callable[[HFConfig], DecoderConfig]
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What its configuration class assumes where config.json says nothing."""
    hf_names: tuple[TensorNames, ...] = (HF_NAMES,)
    """Several when published files differ: those hold whose embedding is there."""
    hf_norm_offset: float = 0.0
    """Added to norm weights of safetensors; GGUF holds the sum already."""
    gguf_architecture: str | None = None
    """general.architecture; None: GGUF files of this model go by another architecture's name."""
    parse_gguf: Callable[[GGUFHeader], DecoderConfig] | None = None
    gguf_names: TensorNames = GGUF_NAMES
    gguf_interleaves_rotary: bool = False
    """Rows of q and k are stored with each head's halves interleaved."""
