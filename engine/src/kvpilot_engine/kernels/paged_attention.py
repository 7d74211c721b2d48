"""Causal attention of a step's query rows over the paged KV cache, decode and prefill in one kernel.

Not for the arithmetic of single tiles (attention_tiles) nor for what is scheduled. Storage of a layer, one array for
keys and one for values, both seen as runs of `lanes` tokens (16, or 8 where the block size is no multiple of 16):

    keys      [blocks, kv_heads, runs, head_dim, lanes]
    values    [blocks, kv_heads, runs, lanes, head_dim]

An item of work is some rows of one sequence with all query heads of one key-value head, so that keys and values are
loaded once for all of them. Exactness: softmax and sums are taken per KEY_GROUP of positions (from a multiple of it),
and the groups' results are joined in rising order: a row's bits are the same in decode, prefill and recompute, alone
and in company. Slots past a row's position are never used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.attention_runs import find_runs
from kvpilot_engine.kernels.attention_tiles import (
    CHUNK,
    KEY_GROUP,
    exp_f32,
    fetch_add,
    largest_tile,
    score_tile,
    softmax_row,
    weigh_tile,
)
from kvpilot_engine.kernels.cpu_features import tiles_permitted
from kvpilot_engine.kernels.jit import kernel, parallel_kernel, parallel_range
from kvpilot_engine.kernels.tiled_attention import TILED_ROWS, attend_item_on_tiles, tiled_scratch_floats

tiles_permitted()  # before code from the cache can use tile registers

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Storage = npt.NDArray[np.uint16] | npt.NDArray[np.float32] | npt.NDArray[np.int16]

TILE_ROWS = 48
"""Query rows (tokens times query heads) of one prefill item: what its scores and sums take fits into a core's cache."""
ITEM_FIELDS = 4
"""sequence, first row, rows, first position"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """The heads of a model and the blocks of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    in_tiles: bool = False
    """Bfloat16 as AMX multiplies it (attention_matrix_tiles); the block size is a multiple of 16 then."""

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def lanes(self) -> int:
        return 16 if self.block_size % 16 == 0 else 8

    @property
    def rows_per_item(self) -> int:
        """Tokens of a prefill item."""
        return max(1, (TILED_ROWS if self.in_tiles else TILE_ROWS) // self.heads_per_kv)

    def storage_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self.num_kv_heads, self.block_size * self.head_dim)

    def scratch_floats(self) -> int:
        """Of one thread: packed queries, two sets of sums, weights of a group, and per row two maxima and totals."""
        rows = self.rows_per_item * self.heads_per_kv
        return (
            tiled_scratch_floats(rows, self.head_dim) if self.in_tiles else rows * (3 * self.head_dim + KEY_GROUP + 4)
        )


@kernel
def plan_items(query_start: Integers, seq_lens: Integers, rows_per_item: int, items: Integers) -> int:
    """Write the items of all sequences; returns their number. `items` has a row for each possible one."""
    count = 0
    for sequence in range(seq_lens.shape[0]):
        num_rows = query_start[sequence + 1] - query_start[sequence]
        start = seq_lens[sequence] - num_rows
        done = 0
        while done < num_rows:
            rows = min(rows_per_item, num_rows - done)
            items[count, 0] = sequence
            items[count, 1] = query_start[sequence] + done
            items[count, 2] = rows
            items[count, 3] = start + done
            count += 1
            done += rows
    return count


@kernel
def _tile_size(left: int) -> int:
    largest = largest_tile()
    for size in (12, 8, 6, 4, 3, 2):
        if size <= left and size <= largest:
            return size
    return 1


@kernel
def _pack_queries(
    queries: Floats,
    first_row: int,
    num_rows: int,
    first_head: int,
    heads: int,
    head_dim: int,
    scale: float,
    out: Floats,
) -> None:
    """Rows of all the item's heads, tile after tile, scaled: [head_dim, rows of the tile] each."""
    total = num_rows * heads
    done = 0
    factor = np.float32(scale)
    while done < total:
        size = _tile_size(total - done)
        base = done * head_dim
        for row in range(size):
            token = first_row + (done + row) // heads
            column = (first_head + (done + row) % heads) * head_dim
            for element in range(head_dim):
                out[base + element * size + row] = queries[token, column + element] * factor
        done += size


@kernel
def _score_rows(
    storage: Storage,
    lanes: int,
    queries: int,
    runs: int,
    needed_soon: int,
    num_chunks: int,
    head_dim: int,
    scores: int,
    total: int,
) -> None:
    done = 0
    soon = needed_soon
    while done < total:
        size = _tile_size(total - done)
        query = queries + done * head_dim * 4
        score = scores + done * KEY_GROUP * 4
        if lanes == 16:
            if size == 12:
                score_tile(12, 16, storage, query, runs, num_chunks, head_dim, score, soon)
            elif size == 8:
                score_tile(8, 16, storage, query, runs, num_chunks, head_dim, score, soon)
            elif size == 6:
                score_tile(6, 16, storage, query, runs, num_chunks, head_dim, score, soon)
            elif size == 4:
                score_tile(4, 16, storage, query, runs, num_chunks, head_dim, score, soon)
            elif size == 3:
                score_tile(3, 16, storage, query, runs, num_chunks, head_dim, score, soon)
            elif size == 2:
                score_tile(2, 16, storage, query, runs, num_chunks, head_dim, score, soon)
            else:
                score_tile(1, 16, storage, query, runs, num_chunks, head_dim, score, soon)
        elif size == 12:
            score_tile(12, 8, storage, query, runs, num_chunks, head_dim, score, soon)
        elif size == 8:
            score_tile(8, 8, storage, query, runs, num_chunks, head_dim, score, soon)
        elif size == 6:
            score_tile(6, 8, storage, query, runs, num_chunks, head_dim, score, soon)
        elif size == 4:
            score_tile(4, 8, storage, query, runs, num_chunks, head_dim, score, soon)
        elif size == 3:
            score_tile(3, 8, storage, query, runs, num_chunks, head_dim, score, soon)
        elif size == 2:
            score_tile(2, 8, storage, query, runs, num_chunks, head_dim, score, soon)
        else:
            score_tile(1, 8, storage, query, runs, num_chunks, head_dim, score, soon)
        done += size
        soon = runs  # once is enough


@kernel
def _weigh_rows(
    storage: Storage, lanes: int, weights: int, runs: int, num_keys: int, head_dim: int, out: int, total: int
) -> None:
    done = 0
    while done < total:
        size = _tile_size(total - done)
        weight = weights + done * KEY_GROUP * 4
        target = out + done * head_dim * 4
        if size == 12:
            weigh_tile(12, lanes, storage, weight, runs, num_keys, head_dim, target)
        elif size == 8:
            weigh_tile(8, lanes, storage, weight, runs, num_keys, head_dim, target)
        elif size == 6:
            weigh_tile(6, lanes, storage, weight, runs, num_keys, head_dim, target)
        elif size == 4:
            weigh_tile(4, lanes, storage, weight, runs, num_keys, head_dim, target)
        elif size == 3:
            weigh_tile(3, lanes, storage, weight, runs, num_keys, head_dim, target)
        elif size == 2:
            weigh_tile(2, lanes, storage, weight, runs, num_keys, head_dim, target)
        else:
            weigh_tile(1, lanes, storage, weight, runs, num_keys, head_dim, target)
        done += size


@kernel
def _join(sums: Floats, more: Floats, highest: Floats, totals: Floats, row: int, new_row: int, head_dim: int) -> None:
    """Take a later group's result of a row into the row's: [..] of both sets lie in the same arrays."""
    top, new_top = highest[row], highest[new_row]
    joined = max(top, new_top)
    factor, new_factor = exp_f32(top - joined), exp_f32(new_top - joined)
    highest[row] = joined
    totals[row] = totals[row] * factor + totals[new_row] * new_factor
    for element in range(head_dim):
        sums[row * head_dim + element] = (
            sums[row * head_dim + element] * factor + more[row * head_dim + element] * new_factor
        )


@kernel
def _attend_item(
    item: Integers,
    kv_head: int,
    queries: Floats,
    keys: Storage,
    values: Storage,
    tables: Integers,
    layout: tuple[int, int, int, int],
    scale: float,
    softcap: float,
    window: int,
    scratch: Floats,
    runs: Integers,
    out: Floats,
) -> None:
    heads, head_dim, _, lanes = layout
    sequence, first_row, num_rows, first_position = item[0], item[1], item[2], item[3]
    total = num_rows * heads
    packed = scratch[: total * head_dim]
    sums = scratch[total * head_dim : 2 * total * head_dim]
    more = scratch[2 * total * head_dim : 3 * total * head_dim]
    weights = scratch[3 * total * head_dim : 3 * total * head_dim + total * KEY_GROUP]
    rest = 3 * total * head_dim + total * KEY_GROUP
    highest = scratch[rest : rest + 2 * total]
    totals = scratch[rest + 2 * total : rest + 4 * total]
    key_runs, value_runs = runs[0].ctypes.data, runs[1].ctypes.data

    _pack_queries(queries, first_row, num_rows, kv_head * heads, heads, head_dim, scale, packed)
    last_position = first_position + num_rows - 1
    first_key = max(0, first_position - window + 1) if window else 0
    first_group = first_key // KEY_GROUP
    for group in range(first_group, last_position // KEY_GROUP + 1):
        start = group * KEY_GROUP
        # chunks before the window of the first row are seen by no row
        first_chunk = max(0, first_key - start) // CHUNK
        begin = start + first_chunk * CHUNK
        num_keys = min(start + KEY_GROUP, last_position + 1) - begin
        num_chunks = (num_keys + CHUNK - 1) // CHUNK
        find_runs(keys, values, kv_head, tables[sequence], layout, begin, num_keys, last_position, runs)
        _score_rows(
            keys, lanes, packed.ctypes.data, key_runs, value_runs, num_chunks, head_dim, weights.ctypes.data, total
        )
        is_first = group == first_group
        first_stat = 0 if is_first else total
        for row in range(total):
            position = first_position + row // heads
            seen_from = max(0, position - window + 1 - begin) if window else 0
            highest[first_stat + row] = softmax_row(
                weights.ctypes.data + row * KEY_GROUP * 4,
                num_chunks,
                seen_from,
                position + 1 - begin,
                np.float32(softcap),
                totals.ctypes.data + (first_stat + row) * 4,
            )
        target = sums if is_first else more
        _weigh_rows(values, lanes, weights.ctypes.data, value_runs, num_keys, head_dim, target.ctypes.data, total)
        if not is_first:
            for row in range(total):
                _join(sums, more, highest, totals, row, total + row, head_dim)
    for row in range(total):
        share = np.float32(1.0) / totals[row]
        column = (kv_head * heads + row % heads) * head_dim
        for element in range(head_dim):
            out[first_row + row // heads, column + element] = sums[row * head_dim + element] * share


@parallel_kernel
def _attend_rows(
    queries: Floats,
    keys: Storage,
    values: Storage,
    tables: Integers,
    items: Integers,
    layout: tuple[int, int, int, int],
    scale: float,
    softcap: float,
    window: int,
    scratch: Floats,
    runs: Integers,
    next_item: Integers,
    out: Floats,
) -> None:
    num_kv_heads = keys.shape[1]
    num_work = items.shape[0] * num_kv_heads
    next_item[0] = 0
    for thread in parallel_range(scratch.shape[0]):
        while True:
            work = fetch_add(next_item.ctypes.data, 1)
            if work >= num_work:
                break
            _attend_item(
                items[work // num_kv_heads],
                work % num_kv_heads,
                queries,
                keys,
                values,
                tables,
                layout,
                scale,
                softcap,
                window,
                scratch[thread],
                runs[thread],
                out,
            )


@parallel_kernel
def _attend_on_tiles(
    queries: Floats,
    keys: Storage,
    values: Storage,
    tables: Integers,
    items: Integers,
    layout: tuple[int, int, int, int],
    scale: float,
    softcap: float,
    window: int,
    scratch: Floats,
    runs: Integers,
    next_item: Integers,
    out: Floats,
) -> None:
    num_kv_heads = keys.shape[1]
    num_work = items.shape[0] * num_kv_heads
    next_item[0] = 0
    for thread in parallel_range(scratch.shape[0]):
        while True:
            work = fetch_add(next_item.ctypes.data, 1)
            if work >= num_work:
                break
            soon = min(fetch_add(next_item.ctypes.data, 0), num_work - 1)
            attend_item_on_tiles(
                items[work // num_kv_heads],
                work % num_kv_heads,
                items[soon // num_kv_heads],
                soon % num_kv_heads,
                queries,
                keys,
                values,
                tables,
                layout,
                scale,
                softcap,
                window,
                scratch[thread],
                runs[thread],
                out,
            )


def choose_attention(kind: npt.DTypeLike) -> Callable[..., None]:
    """The kernel for a cache with elements of this kind: int16 is bfloat16 in tiles."""
    return _attend_on_tiles if kind == np.int16 else _attend_rows


def attend(
    queries: Floats,
    keys: Storage,
    values: Storage,
    tables: Integers,
    items: Integers,
    layout: tuple[int, int, int, int],
    scale: float,
    softcap: float,
    window: int,
    scratch: Floats,
    runs: Integers,
    next_item: Integers,
    out: Floats,
) -> None:
    """out[row, head] for all items. Threads take the next item when they are done with one, so long ones come first.

    `layout` is (heads per kv head, head_dim, block size, lanes); `scratch` and `runs` have a row for each thread;
    softcap and window are 0 where there is none.
    """
    run = choose_attention(keys.dtype)
    run(
        queries,
        keys,
        values,
        tables,
        items,
        layout,
        scale,
        softcap,
        window,
        scratch,
        runs,
        next_item,
        out,
    )
