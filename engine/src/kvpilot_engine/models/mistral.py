"""Mistral: Llama whose layers all look back over one sliding window (none since version 0.2)."""

from __future__ import annotations

from kvpilot_engine.models.architecture import Architecture
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.hf_config import SLIDING, HFConfig


def _parse_hf(config: HFConfig) -> DecoderConfig:
    plain = config.parse_plain()
    return plain.with_windows(config.parse_windows((SLIDING,) * plain.num_layers))


MISTRAL = Architecture(
    title="Mistral",
    hf_classes=("MistralForCausalLM",),
    parse_hf=_parse_hf,
    hf_defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)
