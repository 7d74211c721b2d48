"""A Hugging Face config.json, read with types and with the defaults of its architecture.

Not for what a model does differently from Llama: that is said in its own file, as changes to parse_plain's result.
Everything that we would compute wrongly is a SettingsError that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.models.decoder_config import (
    Activation,
    DecoderConfig,
    LayerConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    check_heads,
)

SLIDING, FULL = "sliding_attention", "full_attention"
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
_MIXTURE_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


class HFConfig:
    """Values by key; where the file says nothing the architecture's default holds, else it is an error to ask."""

    def __init__(self, values: Mapping[str, Any], *, origin: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.origin = origin
        self._values = {**_COMMON_DEFAULTS, **(defaults or {}), **values}

    def get(self, key: str) -> Any:
        """The value, or None when it is missing or null."""
        return self._values.get(key)

    def integer(self, key: str) -> int:
        return self.as_integer(key, self.get(key))

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        return self.as_number(key, self.get(key))

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        return bool(self.get(key))

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; empty when it is missing or null."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(f"{key} is {value!r}; it must be an object")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty when it is missing or null."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{key} is {value!r}; it must be a list of strings")
        return tuple(value)

    def error(self, message: str) -> SettingsError:
        return SettingsError([f"{self.origin}: {message}"])

    def as_number(self, name: str, value: Any) -> float:
        if value is None:
            raise self.error(f"{name} is missing")
        # bool is an int in Python
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{name} is {value!r}; it must be a positive number")
        return float(value)

    def as_integer(self, name: str, value: Any) -> int:
        number = self.as_number(name, value)
        if number != int(number):
            raise self.error(f"{name} is {value!r}; it must be a whole number")
        return int(number)

    def parse_plain(self) -> DecoderConfig:
        """The decoder as Llama's, without windows: what all architectures have in common."""
        heads = self.integer("num_attention_heads")
        hidden_size = self.integer("hidden_size")
        head_dim = self.optional_integer("head_dim") or self.as_integer("head_dim", hidden_size // heads)
        rope = self.parse_rope(self.rope_parameters(), head_dim)
        config = DecoderConfig(
            architecture=(self.strings("architectures") or ("unknown",))[0],
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=self.optional_integer("num_key_value_heads") or heads,
            head_dim=head_dim,
            layers=(LayerConfig(rope=rope),) * self.integer("num_hidden_layers"),
            rms_norm_eps=self.number("rms_norm_eps"),
            max_position_embeddings=self.integer("max_position_embeddings"),
            attention_scale=head_dim**-0.5,
            activation=self._parse_activation(),
            tie_word_embeddings=self.flag("tie_word_embeddings"),
        )
        return check_heads(config, self.origin)

    def rope_parameters(self) -> dict[str, Any]:
        """rope_scaling of older files and rope_parameters of newer ones, theta included."""
        theta = {"rope_theta": self.get("rope_theta")}
        return theta | dict(self.mapping("rope_scaling")) | dict(self.mapping("rope_parameters"))

    def parse_rope(self, parameters: Mapping[str, Any], head_dim: int) -> RopeConfig:
        if not isinstance(parameters, dict):
            raise self.error(f"rope_parameters of a layer type are {parameters!r}; they must be an object")
        share = parameters.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        rotary_dim = head_dim if share is None else int(head_dim * self.as_number("partial_rotary_factor", share))
        return RopeConfig(
            theta=self.as_number("rope_theta", parameters.get("rope_theta")),
            rotary_dim=rotary_dim,
            scaling=self._parse_scaling(parameters, rotary_dim),
        )

    def parse_windows(self, default_types: tuple[str, ...]) -> tuple[int | None, ...]:
        """The window of each layer; the file's own list of layer types goes before the given one."""
        window = self.optional_integer("sliding_window")
        # a window as long as the longest sequence hides nothing
        if window is not None and window >= self.integer("max_position_embeddings"):
            window = None
        return tuple(window if kind == SLIDING else None for kind in self.layer_types(default_types))

    def layer_types(self, default_types: tuple[str, ...]) -> tuple[str, ...]:
        types = self.strings("layer_types") or default_types
        if len(types) != self.integer("num_hidden_layers"):
            raise self.error(f"layer_types has {len(types)} entries for {self.integer('num_hidden_layers')} layers")
        unknown = sorted(set(types) - {SLIDING, FULL})
        if unknown:
            raise self.error(f"layer type {unknown[0]} is not supported (supported: {FULL}, {SLIDING})")
        return types

    def _parse_activation(self) -> Activation:
        name = self.get("hidden_activation") or self.get("hidden_act")
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise self.error(f"activation {name} is not supported (supported: {', '.join(_ACTIVATIONS)})")
        return _ACTIVATIONS[name]

    def _parse_scaling(self, rope: Mapping[str, Any], rotary_dim: int) -> RopeScaling | None:
        kind = rope.get("rope_type", rope.get("type", "default"))

        def number(key: str) -> float:
            return self.as_number(f"rope scaling {kind}: {key}", rope.get(key))

        match kind:
            case "default":
                return None
            case "linear":
                return LinearRopeScaling(factor=number("factor"))
            case "llama3":
                return Llama3RopeScaling(
                    factor=number("factor"),
                    low_freq_factor=number("low_freq_factor"),
                    high_freq_factor=number("high_freq_factor"),
                    original_max_position_embeddings=int(number("original_max_position_embeddings")),
                )
            case "longrope" | "su":
                return self._parse_long_scaling(rope, rotary_dim)
        supported = "linear, llama3, longrope"
        raise self.error(f"rope scaling {kind} is not supported (supported: {supported})")

    def _parse_long_scaling(self, rope: Mapping[str, Any], rotary_dim: int) -> LongRopeScaling:
        key = "original_max_position_embeddings"
        original = self.as_integer(key, rope.get(key, self.get(key)))
        factor = rope.get("factor")
        if factor is None:
            factor = self.integer("max_position_embeddings") / original
        attention_factor = rope.get("attention_factor")
        return LongRopeScaling(
            short_factors=self._parse_factors("short_factor", rope, rotary_dim),
            long_factors=self._parse_factors("long_factor", rope, rotary_dim),
            original_max_position_embeddings=original,
            attention_factor=(
                long_attention_factor(self.as_number("factor", factor), original)
                if attention_factor is None
                else self.as_number("attention_factor", attention_factor)
            ),
        )

    def _parse_factors(self, key: str, rope: Mapping[str, Any], rotary_dim: int) -> tuple[float, ...]:
        factors = rope.get(key) or []
        if not isinstance(factors, list):
            raise self.error(f"rope scaling longrope: {key} is {factors!r}; it must be a list")
        if len(factors) != rotary_dim // 2:
            raise self.error(f"rope scaling longrope: {key} has {len(factors)} entries; it must have {rotary_dim // 2}")
        return tuple(self.as_number(key, factor) for factor in factors)

    def refuse_what_no_architecture_has(self) -> None:
        """SettingsError for features that none of ours has, and for keys that all need."""
        problems = []
        if quantization := self.mapping("quantization_config"):
            problems.append(
                f"{self.origin}: quantization {quantization.get('quant_method', 'unknown')} is not supported; take the "
                "model in GGUF, or without quantization"
            )
        problems += [
            f"{self.origin}: mixture-of-experts models are not supported ({key} is {self.get(key)})"
            for key in _MIXTURE_KEYS
            if self.get(key)
        ]
        if self.get("mlp_bias"):
            problems.append(f"{self.origin}: mlp_bias is not supported")
        if self.get("use_bidirectional_attention"):
            problems.append(f"{self.origin}: use_bidirectional_attention is not supported")
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [key for key in required if self.get(key) is None]
        if missing:
            problems.append(f"{self.origin}: {', '.join(missing)} missing")
        if problems:
            raise SettingsError(problems)


def long_attention_factor(factor: float, original_length: int) -> float:
    """Phi-3's multiplier of cosines and sines for a context that is `factor` times the original one."""
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original_length))
