"""What a Llama-like checkpoint says about itself, parsed once from config.json or from GGUF metadata.

Not for weights. What we would compute wrongly (another architecture, rope scaling, quantization, activation) is
a SettingsError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.layers.attention import AttentionShape
from kvpilot_engine.layers.rotary import Llama3RopeScaling

HF_ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = ("llama",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    rope_scaling: Llama3RopeScaling | None = None

    @property
    def attention_shape(self) -> AttentionShape:
        return AttentionShape(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights as we keep them (a tied head is kept once)."""
        query, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (query + 2 * keys) + query * self.hidden_size
        if self.attention_bias:
            attention += query + 2 * keys + self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


def parse_hf_config(config: Mapping[str, Any], *, origin: str) -> LlamaConfig:
    """Read a Hugging Face config.json; `origin` names the file in messages."""
    architectures = tuple(config.get("architectures") or ())
    if not set(architectures) & set(HF_ARCHITECTURES):
        named = ", ".join(map(str, architectures)) or "none"
        raise SettingsError(
            [f"{origin}: architecture {named} is not supported (supported: {', '.join(HF_ARCHITECTURES)})"]
        )
    problems = []
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        problems.append(f"{origin}: quantization {method} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"{origin}: activation {config['hidden_act']} is not supported (supported: silu)")
    if config.get("mlp_bias"):
        problems.append(f"{origin}: mlp_bias is not supported")
    missing = [key for key in _HF_REQUIRED if key not in config]
    if missing:
        problems.append(f"{origin}: {', '.join(missing)} missing")
    # transformers 5 keeps theta and scaling together in rope_parameters
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        problems.append(f"{origin}: rope scaling {kind} is not supported (supported: llama3)")
    if problems:
        raise SettingsError(problems)
    num_heads = int(config["num_attention_heads"])
    return _checked(
        LlamaConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // num_heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
            attention_bias=bool(config.get("attention_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope_scaling=_parse_llama3_scaling(rope, origin) if kind == "llama3" else None,
        ),
        origin,
    )


_HF_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _parse_llama3_scaling(rope: Mapping[str, Any], origin: str) -> Llama3RopeScaling:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in rope]
    if missing:
        raise SettingsError([f"{origin}: rope scaling llama3 lacks {', '.join(missing)}"])
    return Llama3RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def parse_gguf_config(
    metadata: Mapping[str, Any], *, vocab_size: int, has_output_head: bool, has_attention_bias: bool, origin: str
) -> LlamaConfig:
    """Read GGUF metadata; what the tensor list alone tells (vocabulary, head, biases) is passed in."""
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise SettingsError(
            [f"{origin}: architecture {architecture} is not supported (supported: {', '.join(GGUF_ARCHITECTURES)})"]
        )
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise SettingsError([f"{origin}: rope scaling {scaling} is not supported in GGUF files"])
    missing = [key for key in _GGUF_REQUIRED if key not in metadata]
    if missing:
        raise SettingsError([f"{origin}: metadata {', '.join(missing)} missing"])
    if metadata.get("llama.expert_count"):
        raise SettingsError([f"{origin}: mixture-of-experts models are not supported"])
    hidden_size, num_heads = int(metadata["llama.embedding_length"]), int(metadata["llama.attention.head_count"])
    head_dim = int(metadata.get("llama.attention.key_length", hidden_size // num_heads))
    if int(metadata.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise SettingsError([f"{origin}: partial rotary embedding is not supported"])
    return _checked(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=int(metadata["llama.feed_forward_length"]),
            num_layers=int(metadata["llama.block_count"]),
            num_heads=num_heads,
            num_kv_heads=int(metadata.get("llama.attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            rms_norm_eps=float(metadata["llama.attention.layer_norm_rms_epsilon"]),
            rope_theta=float(metadata.get("llama.rope.freq_base", 10000.0)),
            max_position_embeddings=int(metadata["llama.context_length"]),
            attention_bias=has_attention_bias,
            tie_word_embeddings=not has_output_head,
        ),
        origin,
    )


_GGUF_REQUIRED = (
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.block_count",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.context_length",
)


def _checked(config: LlamaConfig, origin: str) -> LlamaConfig:
    if config.num_heads % config.num_kv_heads:
        raise SettingsError(
            [f"{origin}: {config.num_heads} query heads are not a multiple of {config.num_kv_heads} key heads"]
        )
    if config.head_dim % 2:
        raise SettingsError([f"{origin}: head size {config.head_dim} is odd; rotary embedding needs an even one"])
    return config
