"""What a GGUF file says about its model, read with types: metadata under the architecture's prefix, and its tensors.

Not for what a model does differently from Llama: that is said in its own file, as changes to parse_plain's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.models.decoder_config import (
    DecoderConfig,
    FrequencyRopeScaling,
    LayerConfig,
    LinearRopeScaling,
    RopeConfig,
    RopeScaling,
    check_heads,
)

FREQUENCY_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    metadata: Mapping[str, Any]
    """All but the elements of string arrays."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of every tensor, outermost dimension first."""
    read_tensor: Callable[[str], npt.NDArray[np.float32]]
    origin: str

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str) -> Any:
        """The value under the architecture's prefix, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"metadata {self.architecture}.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{self.architecture}.{key} differs from layer to layer, or is no number: not supported")
        if not 0 < value < math.inf:
            raise self.error(f"{self.architecture}.{key} is {value}; it must be a positive number")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def error(self, message: str) -> SettingsError:
        return SettingsError([f"{self.origin}: {message}"])

    def parse_plain(self) -> DecoderConfig:
        """The decoder as Llama's, without windows: what all architectures have in common."""
        if self.get("expert_count"):
            experts = self.get("expert_count")
            raise self.error(f"mixture-of-experts models are not supported (expert_count is {experts})")
        embedding = self.shapes.get("token_embd.weight")
        if embedding is None:
            raise self.error("tensor token_embd.weight is missing")
        hidden_size, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        head_dim = self.integer("attention.key_length", hidden_size // heads)
        if self.integer("attention.value_length", head_dim) != head_dim:
            raise self.error(f"values of {self.get('attention.value_length')} and keys of {head_dim} elements differ")
        rotary_dim = self.integer("rope.dimension_count", head_dim)
        rope = RopeConfig(
            theta=self.number("rope.freq_base", 10000.0),
            rotary_dim=rotary_dim,
            scaling=self._parse_scaling(rotary_dim),
        )
        num_layers = self.integer("block_count")
        if num_layers > len(self.shapes):
            raise self.error(f"{self.architecture}.block_count is {num_layers}, with {len(self.shapes)} tensors")
        config = DecoderConfig(
            architecture=self.architecture,
            vocab_size=embedding[0],
            hidden_size=hidden_size,
            intermediate_size=self.integer("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=self.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            layers=(LayerConfig(rope=rope),) * num_layers,
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=self.integer("context_length"),
            attention_scale=head_dim**-0.5,
            qkv_bias="blk.0.attn_q.bias" in self.shapes,
            output_bias="blk.0.attn_output.bias" in self.shapes,
            tie_word_embeddings="output.weight" not in self.shapes,
        )
        return check_heads(config, self.origin)

    def parse_window(self) -> int | None:
        """The length of sliding windows; None when there are none, or they hide nothing."""
        window = self.get("attention.sliding_window") and self.integer("attention.sliding_window")
        return window if window and window < self.integer("context_length") else None

    def _parse_scaling(self, rotary_dim: int) -> RopeScaling | None:
        if FREQUENCY_FACTORS in self.shapes:
            return FrequencyRopeScaling(factors=self.read_factors(FREQUENCY_FACTORS, rotary_dim))
        kind = self.get("rope.scaling.type") or "none"
        if kind == "linear":
            return LinearRopeScaling(factor=self.number("rope.scaling.factor"))
        if kind in ("none", "longrope") and self.get("rope.scale_linear") is None:
            # the lists of longrope are tensors, which phi3.py reads
            return None
        named = kind if kind != "none" else "by rope.scale_linear"
        raise self.error(f"rope scaling {named} is not supported (supported: linear, longrope, {FREQUENCY_FACTORS})")

    def read_factors(self, name: str, rotary_dim: int) -> tuple[float, ...]:
        """One for each rotated pair."""
        if name not in self.shapes:
            raise self.error(f"tensor {name} is missing")
        factors = tuple(map(float, self.read_tensor(name)))
        if len(factors) != rotary_dim // 2:
            raise self.error(f"tensor {name} has {len(factors)} elements; it must have {rotary_dim // 2}")
        return factors
