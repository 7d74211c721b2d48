"""The compiled path's KV cache: one array of keys and one of values a layer, laid out as kernels/paged_attention says.

The system gives a page when it is first written, so a pool laid out for the highest cap costs only what has been used.
Block 0 is the null block: zeros, and read where a sequence has given up what left its window.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.kernels.paged_attention import HeadLayout
from kvpilot_engine.models.decoder_config import DecoderConfig

BLOCK_SIZE_STEP = 8
TILED_BLOCK_STEP = 16
HEAD_DIM_STEP = 16
MAX_HEAD_DIM = 256


class KVDtype(StrEnum):
    """How keys and values are kept; sums are float32 always."""

    FLOAT16 = "float16"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """In tiles, as AMX multiplies it; only where the processor does."""

    @property
    def element_bytes(self) -> int:
        return self.kind.itemsize

    @property
    def kind(self) -> np.dtype[Any]:
        """Of the arrays: half precision is kept as its bits, since numba has no such type, and kernels tell bfloat16's
        bits from them by the sign."""
        kinds = {KVDtype.FLOAT16: np.uint16, KVDtype.FLOAT32: np.float32, KVDtype.BFLOAT16: np.int16}
        return np.dtype(kinds[self])


def choose_kv_dtype(name: str, block_size: int, *, has_tiles: bool) -> KVDtype:
    """`auto` is bfloat16 where the processor multiplies it, else float16. SettingsError where bfloat16 can't be."""
    fits = block_size % TILED_BLOCK_STEP == 0
    if name == "auto":
        return KVDtype.BFLOAT16 if has_tiles and fits else KVDtype.FLOAT16
    dtype = KVDtype(name)
    if dtype is KVDtype.BFLOAT16 and not has_tiles:
        raise SettingsError(["kv_cache_dtype is bfloat16: on cpu that needs a processor with AMX (amx-bf16)"])
    if dtype is KVDtype.BFLOAT16 and not fits:
        raise SettingsError([f"block_size is {block_size}; with kv_cache_dtype bfloat16 it must be a multiple of 16"])
    return dtype


@dataclass(frozen=True, slots=True)
class PagedLayerKV:
    """One array each, of KVDtype.kind."""

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]


class PagedKVStorage:
    """num_blocks usable blocks with ids 1..num_blocks, and the null block."""

    def __init__(self, config: DecoderConfig, *, num_blocks: int, block_size: int, dtype: KVDtype) -> None:
        check_block_layout(config, block_size)
        self.num_blocks = num_blocks
        self.layout = HeadLayout(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            in_tiles=dtype is KVDtype.BFLOAT16,
        )
        kind = dtype.kind
        shape = self.layout.storage_shape(num_blocks + 1)
        self.layers = tuple(PagedLayerKV(_allocate(shape, kind), _allocate(shape, kind)) for _ in config.layers)

    @property
    def block_size(self) -> int:
        return self.layout.block_size


def check_block_layout(config: DecoderConfig, block_size: int) -> None:
    """Refuse what the kernels have no layout for."""
    problems = []
    if block_size % BLOCK_SIZE_STEP:
        problems.append(f"block_size is {block_size}; on cpu it must be a multiple of {BLOCK_SIZE_STEP}")
    if config.head_dim % HEAD_DIM_STEP or config.head_dim > MAX_HEAD_DIM:
        problems.append(
            f"the model's head_dim is {config.head_dim}; on cpu it must be a multiple of {HEAD_DIM_STEP} and at most "
            f"{MAX_HEAD_DIM}; --dtype float32 computes any"
        )
    if problems:
        raise SettingsError(problems)


def _allocate(shape: tuple[int, ...], kind: Any) -> npt.NDArray[Any]:
    """Zeroed memory of the system, on huge pages where it gives them: a step reads blocks from all over the pool."""
    size = math.prod(shape) * np.dtype(kind).itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"can't map {size} bytes for the KV cache: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: slower, and right
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind).reshape(shape)
