"""Qwen 3 (dense): Llama with a norm on each head's query and key."""

from __future__ import annotations

from dataclasses import replace

from kvpilot_engine.models.architecture import Architecture
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.gguf_header import GGUFHeader
from kvpilot_engine.models.hf_config import HFConfig
from kvpilot_engine.models.qwen2 import QWEN2, parse_hf_windows


def _parse_hf(config: HFConfig) -> DecoderConfig:
    bias = config.flag("attention_bias")
    return replace(parse_hf_windows(config), qk_norm=True, qkv_bias=bias, output_bias=bias)


def _parse_gguf(header: GGUFHeader) -> DecoderConfig:
    return replace(header.parse_plain(), qk_norm=True)


QWEN3 = Architecture(
    title="Qwen 3 (dense)",
    hf_classes=("Qwen3ForCausalLM",),
    parse_hf=_parse_hf,
    hf_defaults={**QWEN2.hf_defaults, "head_dim": 128},
    gguf_architecture="qwen3",
    parse_gguf=_parse_gguf,
)
