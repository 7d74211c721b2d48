"""Qwen 2 and 2.5: Llama with biases on queries, keys and values; the upper layers may have a window."""

from __future__ import annotations

from dataclasses import replace

from kvpilot_engine.models.architecture import Architecture
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.gguf_header import GGUFHeader
from kvpilot_engine.models.hf_config import FULL, SLIDING, HFConfig


def parse_hf_windows(config: HFConfig) -> DecoderConfig:
    """The plain decoder, with windows from max_window_layers on where use_sliding_window says so."""
    plain = config.parse_plain()
    if not config.flag("use_sliding_window"):
        return plain
    first = config.optional_integer("max_window_layers") or 0
    kinds = tuple(SLIDING if index >= first else FULL for index in range(plain.num_layers))
    return plain.with_windows(config.parse_windows(kinds))


def _parse_hf(config: HFConfig) -> DecoderConfig:
    return replace(parse_hf_windows(config), qkv_bias=True)


def _parse_gguf(header: GGUFHeader) -> DecoderConfig:
    return header.parse_plain()


QWEN2 = Architecture(
    title="Qwen 2, Qwen 2.5",
    hf_classes=("Qwen2ForCausalLM",),
    parse_hf=_parse_hf,
    hf_defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    gguf_architecture="qwen2",
    parse_gguf=_parse_gguf,
)
