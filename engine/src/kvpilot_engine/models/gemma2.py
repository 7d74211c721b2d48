"""Gemma 2: norms before and after, soft caps on scores and logits, every other layer with a window.

Embeddings are multiplied by the root of their size; checkpoints of Hugging Face hold norm weights without their one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpilot_engine.models.architecture import HF_NAMES, Architecture
from kvpilot_engine.models.decoder_config import Activation, DecoderConfig
from kvpilot_engine.models.gguf_header import GGUFHeader
from kvpilot_engine.models.hf_config import FULL, SLIDING, HFConfig

GEMMA_HF_NAMES = replace(
    HF_NAMES,
    inside={
        **HF_NAMES.inside,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)
GEMMA_HF_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_LAYERS_OF_27B = 46


def parse_hf_gemma(config: HFConfig) -> DecoderConfig:
    """What Gemma 2 and 3 share; without windows."""
    plain = config.parse_plain()
    if config.flag("attention_bias"):
        raise config.error("attention_bias is not supported")
    return replace(
        plain,
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
        post_norms=True,
        embedding_scale=plain.hidden_size**0.5,
        attention_softcap=config.optional_number("attn_logit_softcapping"),
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )


def parse_gguf_gemma(header: GGUFHeader, *, wide_head_layers: int) -> DecoderConfig:
    """What Gemma 2 and 3 share; without windows.

    GGUF does not keep query_pre_attn_scalar. It is the head size in all published models but the one of
    `wide_head_layers` layers, which divides the hidden size by the number of heads.
    """
    plain = header.parse_plain()
    per_head = plain.hidden_size / plain.num_heads if plain.num_layers == wide_head_layers else plain.head_dim
    return replace(
        plain,
        activation=Activation.GELU_TANH,
        attention_scale=per_head**-0.5,
        post_norms=True,
        embedding_scale=plain.hidden_size**0.5,
        attention_softcap=header.optional_number("attn_logit_softcapping"),
        logit_softcap=header.optional_number("final_logit_softcapping"),
    )


def _parse_hf(config: HFConfig) -> DecoderConfig:
    gemma = parse_hf_gemma(config)
    kinds = tuple(FULL if index % 2 else SLIDING for index in range(gemma.num_layers))
    return gemma.with_windows(config.parse_windows(kinds))


def _parse_gguf(header: GGUFHeader) -> DecoderConfig:
    gemma = parse_gguf_gemma(header, wide_head_layers=_LAYERS_OF_27B)
    window = header.parse_window()
    return gemma.with_windows(tuple(None if index % 2 else window for index in range(gemma.num_layers)))


GEMMA2 = Architecture(
    title="Gemma 2",
    hf_classes=("Gemma2ForCausalLM",),
    parse_hf=_parse_hf,
    hf_defaults={
        **GEMMA_HF_DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    hf_names=(GEMMA_HF_NAMES,),
    hf_norm_offset=1.0,
    gguf_architecture="gemma2",
    parse_gguf=_parse_gguf,
)
