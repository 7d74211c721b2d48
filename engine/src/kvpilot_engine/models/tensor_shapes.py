"""Which tensors a decoder has, by canonical name (see weight_source.py), and how large each one is."""

from __future__ import annotations

import math

from kvpilot_engine.models.decoder_config import DecoderConfig

Shape = tuple[int, ...]


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every canonical tensor of the decoder and its shape."""
    shapes: dict[str, Shape] = {
        "embedding.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.hidden_size)
    layer = _layer_shapes(config)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def count_parameters(config: DecoderConfig) -> int:
    """Elements of all weights (a tied head is kept once)."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def _layer_shapes(config: DecoderConfig) -> dict[str, Shape]:
    hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
    shapes: dict[str, Shape] = {
        "attention_norm.weight": (hidden,),
        "q.weight": (query, hidden),
        "k.weight": (kv, hidden),
        "v.weight": (kv, hidden),
        "o.weight": (hidden, query),
        "mlp_norm.weight": (hidden,),
        "gate.weight": (config.intermediate_size, hidden),
        "up.weight": (config.intermediate_size, hidden),
        "down.weight": (hidden, config.intermediate_size),
    }
    if config.qkv_bias:
        shapes |= {"q.bias": (query,), "k.bias": (kv,), "v.bias": (kv,)}
    if config.output_bias:
        shapes["o.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    if config.post_norms:
        shapes |= {"attention_post_norm.weight": (hidden,), "mlp_post_norm.weight": (hidden,)}
    return shapes
