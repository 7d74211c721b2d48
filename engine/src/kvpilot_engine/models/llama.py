"""Llama 2 and 3, and what is built like them: SmolLM, TinyLlama. In GGUF also Mistral."""

from __future__ import annotations

from dataclasses import replace

from kvpilot_engine.models.architecture import Architecture
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.gguf_header import GGUFHeader
from kvpilot_engine.models.hf_config import HFConfig


def _parse_hf(config: HFConfig) -> DecoderConfig:
    bias = config.flag("attention_bias")
    return replace(config.parse_plain(), qkv_bias=bias, output_bias=bias)


def _parse_gguf(header: GGUFHeader) -> DecoderConfig:
    config = header.parse_plain()
    if any(layer.rope.rotary_dim != config.head_dim for layer in config.layers):
        raise header.error("partial rotary embedding is not supported in GGUF files of llama")
    return config.with_windows((header.parse_window(),) * config.num_layers)


LLAMA = Architecture(
    title="Llama 2 and 3, SmolLM",
    hf_classes=("LlamaForCausalLM",),
    parse_hf=_parse_hf,
    gguf_architecture="llama",
    parse_gguf=_parse_gguf,
    gguf_interleaves_rotary=True,
)
