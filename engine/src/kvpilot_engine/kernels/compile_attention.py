"""Compiles attention and what writes its cache, or loads it from the cache. The signatures are those of the calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import from_dtype, types

from kvpilot_engine.kernels.kv_write import rotate_and_store
from kvpilot_engine.kernels.paged_attention import choose_attention, plan_items

_ROWS = types.Array(types.float32, 2, "C")
_ROW = types.Array(types.float32, 1, "C")
_INDEXES = types.Array(types.int64, 1, "C")
_TABLES = types.Array(types.int64, 2, "C")
_LAYOUT: Any = types.Tuple((types.int64,) * 4)  # type: ignore[no-untyped-call]
_FLOAT = types.float64


def compile_attention(kind: npt.DTypeLike) -> None:
    """For a cache of uint16 (half precision, kept as its bits), int16 (bfloat16 in tiles) or float32."""
    storage = types.Array(from_dtype(np.dtype(kind)), 3, "C")
    runs = types.Array(types.int64, 3, "C")
    heads = (_ROWS, storage, storage, _TABLES, _TABLES, _LAYOUT)
    signatures: list[tuple[Any, tuple[Any, ...]]] = [
        (plan_items, (_INDEXES, _INDEXES, types.int64, _TABLES)),
        (rotate_and_store, (_ROWS, _INDEXES, _INDEXES, _ROWS, _ROWS, _ROW, _ROW, _FLOAT, storage, storage, _LAYOUT)),
        (choose_attention(kind), (*heads, _FLOAT, _FLOAT, types.int64, _ROWS, runs, _INDEXES, _ROWS)),
    ]
    for kernel, signature in signatures:
        kernel.compile(signature)
