"""The storage of the KV cache: one pair of tensors per layer. Its layout is known here, in layers and in kernels only.

Uninitialised on purpose: the kernel gives a page when it is first written, so a pool laid out for the highest cap costs
only what has been used. Block 0 is the null block: zeroed, read for padding, never written.
"""

from __future__ import annotations

from kvpilot_engine.layers.attention import LayerKV, empty_layer_kv
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.torch_decoder import attention_shape

KV_ELEMENT_BYTES = 4


class KVCacheTensors:
    """num_blocks usable blocks with ids 1..num_blocks, and the null block."""

    def __init__(self, config: DecoderConfig, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = attention_shape(config)
        self.layers: tuple[LayerKV, ...] = tuple(
            empty_layer_kv(num_blocks + 1, shape, block_size) for _ in range(config.num_layers)
        )


def kv_bytes_per_block(config: DecoderConfig, block_size: int) -> int:
    return config.kv_bytes_per_token(KV_ELEMENT_BYTES) * block_size
