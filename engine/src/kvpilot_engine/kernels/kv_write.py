"""From the joined q, k and v of a step's rows to rotated queries in place and keys and values in the paged cache.

A row is [query heads, key heads, value heads] x head_dim float32. Per head of queries and keys: RMS norm where the
model has one, then the rotation of the first rotary_dim elements (first half with second half). Storage as in
paged_attention. Each row is done by itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.attention_tiles import is_tiled, store_key, store_value
from kvpilot_engine.kernels.jit import kernel, parallel_kernel, parallel_range
from kvpilot_engine.kernels.rms_norm import rms_norm_row
from kvpilot_engine.kernels.simd import LANES

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Storage = npt.NDArray[np.uint16] | npt.NDArray[np.float32] | npt.NDArray[np.int16]

ROWS_FOR_THREADS = 8
"""Fewer rows are done by the calling thread: waking the others takes longer."""


@kernel
def _rotate_head(head: Floats, cos: Floats, sin: Floats) -> None:
    half = cos.shape[0]
    for element in range(half):
        first, second = head[element], head[half + element]
        head[element] = first * cos[element] - second * sin[element]
        head[half + element] = second * cos[element] + first * sin[element]


@kernel
def _write_row(
    row: Floats,
    position: int,
    slot: int,
    cos: Floats,
    sin: Floats,
    q_norm: Floats,
    k_norm: Floats,
    eps: float,
    keys: Storage,
    values: Storage,
    layout: tuple[int, int, int, int],
) -> None:
    heads_per_kv, head_dim, block_size, lanes = layout
    num_kv_heads = keys.shape[1]
    num_heads = heads_per_kv * num_kv_heads
    its_cos, its_sin = cos[position], sin[position]
    for head in range(num_heads + num_kv_heads):
        elements = row[head * head_dim : (head + 1) * head_dim]
        if q_norm.shape[0]:
            rms_norm_row(elements, q_norm if head < num_heads else k_norm, eps, elements)
        _rotate_head(elements, its_cos, its_sin)
    block, offset = slot // block_size, slot % block_size
    size = keys.itemsize
    for head in range(num_kv_heads):
        start = (block * num_kv_heads + head) * block_size * head_dim
        run_start = start + offset // lanes * lanes * head_dim
        key = row[(num_heads + head) * head_dim : (num_heads + head + 1) * head_dim]
        value = row[(num_heads + num_kv_heads + head) * head_dim : (num_heads + num_kv_heads + head + 1) * head_dim]
        lane = offset % lanes
        key_place, value_place = run_start + lane, start + offset * head_dim
        if is_tiled(keys):
            key_place = run_start + 2 * lane
            value_place = run_start + lane // 2 * 2 * LANES + lane % 2
        store_key(keys, lanes, key.ctypes.data, head_dim, keys.ctypes.data + key_place * size)
        store_value(values, value.ctypes.data, head_dim, values.ctypes.data + value_place * size)


@parallel_kernel
def _write_rows_on_threads(
    qkv: Floats,
    positions: Integers,
    slots: Integers,
    cos: Floats,
    sin: Floats,
    q_norm: Floats,
    k_norm: Floats,
    eps: float,
    keys: Storage,
    values: Storage,
    layout: tuple[int, int, int, int],
) -> None:
    for row in parallel_range(qkv.shape[0]):
        _write_row(qkv[row], positions[row], slots[row], cos, sin, q_norm, k_norm, eps, keys, values, layout)


@kernel
def rotate_and_store(
    qkv: Floats,
    positions: Integers,
    slots: Integers,
    cos: Floats,
    sin: Floats,
    q_norm: Floats,
    k_norm: Floats,
    eps: float,
    keys: Storage,
    values: Storage,
    layout: tuple[int, int, int, int],
) -> None:
    """Rotate the queries of all rows in place; keys and values go to their slots (block * block_size + offset).

    `cos` and `sin` are [positions, rotary_dim / 2]; q_norm and k_norm are empty where heads are not normalized;
    `layout` is (heads per kv head, head_dim, block size, lanes).
    """
    if qkv.shape[0] < ROWS_FOR_THREADS:
        for row in range(qkv.shape[0]):
            _write_row(qkv[row], positions[row], slots[row], cos, sin, q_norm, k_norm, eps, keys, values, layout)
    else:
        _write_rows_on_threads(qkv, positions, slots, cos, sin, q_norm, k_norm, eps, keys, values, layout)
