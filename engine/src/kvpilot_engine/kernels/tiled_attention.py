"""One item of paged attention on AMX: its rows in tiles of sixteen, keys and values multiplied where they lie.

Not for how items are planned and shared by threads (paged_attention) nor for the arithmetic (attention_matrix_tiles).
Exactness: groups of GROUP positions are taken in rising order, whole runs of sixteen in each, and whatever a row does
not see adds zeros: a row's bits are the same in decode, prefill and recompute.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.attention_matrix_tiles import (
    GROUP,
    ROWS,
    STEP,
    TILE_BYTES,
    WEIGHT_ROW_BYTES,
    begin_tiles,
    copy_values,
    end_tiles,
    finish_row,
    round_row,
    score_tile_on_runs,
    soften_row,
    weigh_tile_on_runs,
)
from kvpilot_engine.kernels.attention_runs import find_first_keys, find_runs
from kvpilot_engine.kernels.attention_tiles import CHUNK, KEY_GROUP, MASKED, prefetch_lines
from kvpilot_engine.kernels.jit import kernel
from kvpilot_engine.kernels.simd import LANES, LINE

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Storage = npt.NDArray[np.uint16] | npt.NDArray[np.float32] | npt.NDArray[np.int16]

TILED_ROWS = 256
"""Query rows (tokens times query heads) of one prefill item: they share the keys and values of a group."""

_LOG2_E = 1.4426950408889634


def tiled_scratch_floats(rows: int, head_dim: int) -> int:
    """Of one thread, for so many rows: see attend_item_on_tiles."""
    tiles = -(-rows // ROWS)
    return (
        tiles * -(-head_dim // STEP) * TILE_BYTES // 4
        + ROWS * WEIGHT_ROW_BYTES // 4
        + ROWS * GROUP
        + tiles * ROWS * head_dim
        + LANES * head_dim // 2
        + tiles * ROWS * (LANES + 1)
        + LANES
    )


@kernel
def attend_item_on_tiles(
    item: Integers,
    kv_head: int,
    next_item: Integers,
    next_kv_head: int,
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
    """Arguments are those of paged_attention.attend; `scratch` and `runs` are the thread's.

    The next item's first keys are fetched into the cache at the end of this one's.
    """
    heads, head_dim, _, lanes = layout
    sequence, first_row, num_rows, first_position = item[0], item[1], item[2], item[3]
    total = num_rows * heads
    num_tiles = (total + ROWS - 1) // ROWS
    tile_bytes = (head_dim + STEP - 1) // STEP * TILE_BYTES
    row_bytes = head_dim * 4
    total_bytes = LANES * 4
    run_lines = lanes * head_dim * 2 // LINE

    query_tiles = (scratch.ctypes.data + LINE - 1) // LINE * LINE
    weights = query_tiles + num_tiles * tile_bytes
    scores = weights + ROWS * WEIGHT_ROW_BYTES
    last_values = scores + ROWS * GROUP * 4
    sums = last_values + lanes * head_dim * 2
    totals = sums + num_tiles * ROWS * row_bytes
    highest = totals + num_tiles * ROWS * total_bytes
    end = highest + num_tiles * ROWS * 4
    base = scratch.ctypes.data
    scratch[(sums - base) // 4 : (highest - base) // 4] = 0.0
    scratch[(highest - base) // 4 : (end - base) // 4] = MASKED

    for row in range(total):
        head = kv_head * heads + row % heads
        round_row(
            queries.ctypes.data + ((first_row + row // heads) * queries.shape[1] + head * head_dim) * 4,
            np.float32(scale * _LOG2_E),
            head_dim,
            query_tiles + row // ROWS * tile_bytes + row % ROWS * LINE,
        )
    next_begin = max(0, next_item[3] - window + 1) // STEP * STEP if window else 0
    next_sequence, next_last = next_item[0], next_item[3] + next_item[2] - 1
    cap = np.float32(softcap * _LOG2_E)
    last_position = first_position + num_rows - 1
    first_key = max(0, first_position - window + 1) if window else 0
    begin_tiles(min(total, ROWS))
    for group in range(first_key // GROUP, last_position // GROUP + 1):
        start = group * GROUP
        # steps before the window of the first row are seen by no row
        first_step = max(0, first_key - start) // STEP
        begin = start + first_step * STEP
        num_keys = min(start + GROUP, last_position + 1) - begin
        num_chunks = (num_keys + CHUNK - 1) // CHUNK
        known = find_runs(keys, values, kv_head, tables[sequence], layout, begin, num_keys, last_position, runs)
        find_first_keys(
            keys,
            next_kv_head,
            tables[next_sequence],
            layout,
            next_begin,
            next_last,
            runs[0, known : num_chunks + KEY_GROUP // lanes],
        )
        if num_keys % CHUNK:
            copy_values(runs[1, num_chunks - 1], num_keys % CHUNK, head_dim, last_values)
            runs[1, num_chunks - 1] = last_values
        if num_tiles == 1:
            # memory is the bottleneck of decode: it must not rest while tiles are multiplied
            for run in range(num_chunks):
                prefetch_lines(runs[1, run], run_lines)
        for tile in range(num_tiles):
            last_row = min(total, (tile + 1) * ROWS) - 1
            first_seen = first_position + tile * ROWS // heads - window + 1 if window else 0
            end_seen = min(first_position + last_row // heads + 1, begin + num_keys) - start
            tile_step = max(first_step, (first_seen - start) // STEP)
            end_chunk = (end_seen + CHUNK - 1) // CHUNK
            first_chunk = 2 * tile_step
            if end_chunk <= first_chunk:
                continue
            its_runs = 8 * (first_chunk - 2 * first_step)
            score_tile_on_runs(
                query_tiles + tile * tile_bytes,
                runs[0].ctypes.data + its_runs,
                end_chunk - first_chunk,
                head_dim,
                scores + first_chunk * CHUNK * 4,
            )
            for row in range(tile * ROWS, last_row + 1):
                position = first_position + row // heads - start
                soften_row(
                    scores + row % ROWS * GROUP * 4,
                    weights + row % ROWS * WEIGHT_ROW_BYTES,
                    tile_step,
                    (end_seen + STEP - 1) // STEP,
                    position - window + 1 if window else 0,
                    position + 1,
                    cap,
                    sums + row * row_bytes,
                    head_dim,
                    totals + row * total_bytes,
                    highest + row * 4,
                )
            if num_tiles == 1:
                for run in range(num_chunks, num_chunks + GROUP // CHUNK):
                    prefetch_lines(runs[0, run], run_lines)
            weigh_tile_on_runs(
                weights + first_chunk * CHUNK * 2,
                runs[1].ctypes.data + its_runs,
                end_chunk - first_chunk,
                head_dim,
                sums + tile * ROWS * row_bytes,
            )
    end_tiles()
    for row in range(total):
        column = (kv_head * heads + row % heads) * head_dim
        finish_row(
            sums + row * row_bytes,
            totals + row * total_bytes,
            head_dim,
            out.ctypes.data + ((first_row + row // heads) * out.shape[1] + column) * 4,
        )
