"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and lists of rotary factors for long contexts."""

from __future__ import annotations

from dataclasses import replace

from kvpilot_engine.models.architecture import GGUF_NAMES, HF_NAMES, Architecture
from kvpilot_engine.models.decoder_config import DecoderConfig, LongRopeScaling
from kvpilot_engine.models.gguf_header import GGUFHeader
from kvpilot_engine.models.hf_config import SLIDING, HFConfig, long_attention_factor

_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_FUSED_QKV, _FUSED_GATE_UP = ("q", "k", "v"), ("gate", "up")


def _parse_hf(config: HFConfig) -> DecoderConfig:
    plain = config.parse_plain()
    return plain.with_windows(config.parse_windows((SLIDING,) * plain.num_layers))


def _parse_gguf(header: GGUFHeader) -> DecoderConfig:
    config = header.parse_plain()
    window = header.parse_window()
    if _LONG in header.shapes:
        scaling = _parse_factors(header, config)
        layers = (replace(layer, rope=replace(layer.rope, scaling=scaling)) for layer in config.layers)
        config = replace(config, layers=tuple(layers))
    return config.with_windows((window,) * config.num_layers)


def _parse_factors(header: GGUFHeader, config: DecoderConfig) -> LongRopeScaling:
    original = header.integer("rope.scaling.original_context_length")
    rotary_dim = config.layers[0].rope.rotary_dim
    return LongRopeScaling(
        short_factors=header.read_factors(_SHORT, rotary_dim),
        long_factors=header.read_factors(_LONG, rotary_dim),
        original_max_position_embeddings=original,
        attention_factor=header.number(
            "rope.scaling.attn_factor", long_attention_factor(config.max_position_embeddings / original, original)
        ),
    )


PHI3 = Architecture(
    title="Phi-3, Phi-3.5, Phi-4 (text)",
    hf_classes=("Phi3ForCausalLM",),
    parse_hf=_parse_hf,
    hf_defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    hf_names=(
        replace(
            HF_NAMES,
            inside={
                **HF_NAMES.inside,
                **dict.fromkeys(_FUSED_QKV, "self_attn.qkv_proj"),
                **dict.fromkeys(_FUSED_GATE_UP, "mlp.gate_up_proj"),
            },
        ),
    ),
    gguf_architecture="phi3",
    parse_gguf=_parse_gguf,
    gguf_names=replace(
        GGUF_NAMES,
        inside={
            **GGUF_NAMES.inside,
            **dict.fromkeys(_FUSED_QKV, "attn_qkv"),
            **dict.fromkeys(_FUSED_GATE_UP, "ffn_up"),
        },
    ),
)
