"""Gemma 3, text: five layers with a window and a rotation of their own to each one that sees everything.

Of the multimodal checkpoints the text part is read, and images are not.
"""

from __future__ import annotations

from dataclasses import replace

from kvpilot_engine.models.architecture import Architecture, TensorNames
from kvpilot_engine.models.decoder_config import DecoderConfig, LayerConfig, RopeConfig
from kvpilot_engine.models.gemma2 import GEMMA_HF_DEFAULTS, GEMMA_HF_NAMES, parse_gguf_gemma, parse_hf_gemma
from kvpilot_engine.models.gguf_header import GGUFHeader
from kvpilot_engine.models.hf_config import FULL, SLIDING, HFConfig

_PATTERN = 6
"""Every so many layers the last one sees everything."""
_LOCAL_THETA = 10000.0
_LAYERS_OF_27B = 62


def _parse_hf(config: HFConfig) -> DecoderConfig:
    gemma = parse_hf_gemma(config)
    pattern = config.optional_integer("sliding_window_pattern") or config.integer("_sliding_window_pattern")
    kinds = config.layer_types(tuple(SLIDING if _is_local(i, pattern) else FULL for i in range(gemma.num_layers)))
    by_kind = config.mapping("rope_parameters")
    full = by_kind.get(FULL) or config.rope_parameters()
    sliding = by_kind.get(SLIDING) or {"rope_theta": config.get("rope_local_base_freq")}
    ropes = {FULL: config.parse_rope(full, gemma.head_dim), SLIDING: config.parse_rope(sliding, gemma.head_dim)}
    layers = tuple(replace(layer, rope=ropes[kind]) for layer, kind in zip(gemma.layers, kinds, strict=True))
    return replace(gemma, qk_norm=True, layers=layers).with_windows(config.parse_windows(kinds))


def _parse_gguf(header: GGUFHeader) -> DecoderConfig:
    gemma = parse_gguf_gemma(header, wide_head_layers=_LAYERS_OF_27B)
    local_rope = RopeConfig(
        theta=header.number("rope.freq_base_swa", _LOCAL_THETA), rotary_dim=gemma.layers[0].rope.rotary_dim
    )
    local = _read_pattern(header, gemma.num_layers)
    window = header.parse_window()
    layers = (LayerConfig(rope=local_rope, window=window) if is_local else gemma.layers[0] for is_local in local)
    return replace(gemma, qk_norm=True, layers=tuple(layers))


def _read_pattern(header: GGUFHeader, num_layers: int) -> list[bool]:
    """Which layers are local: a list in the file, or a period."""
    pattern = header.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = header.integer("attention.sliding_window_pattern", _PATTERN)
        return [_is_local(index, period) for index in range(num_layers)]
    if len(pattern) != num_layers:
        raise header.error(f"attention.sliding_window_pattern has {len(pattern)} entries for {num_layers} layers")
    return [bool(is_local) for is_local in pattern]


def _is_local(index: int, period: int) -> bool:
    return (index + 1) % period != 0


def _below(prefix: str) -> TensorNames:
    outside = {**GEMMA_HF_NAMES.outside, "embedding": f"{prefix}.embed_tokens", "norm": f"{prefix}.norm"}
    return replace(GEMMA_HF_NAMES, outside=outside, layer_prefix=f"{prefix}.layers.{{}}.")


GEMMA3 = Architecture(
    title="Gemma 3 (text)",
    hf_classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    parse_hf=_parse_hf,
    hf_defaults={
        **GEMMA_HF_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": _LOCAL_THETA,
        "_sliding_window_pattern": _PATTERN,
    },
    hf_names=(
        GEMMA_HF_NAMES,
        _below("language_model.model"),
        _below("model.language_model"),
    ),
    hf_norm_offset=1.0,
    gguf_architecture="gemma3",
    parse_gguf=_parse_gguf,
)
