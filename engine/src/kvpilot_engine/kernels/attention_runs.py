"""Where the keys and values of one sequence lie: a table of addresses of runs for a group of keys.

Not for what is computed with them (paged_attention, tiled_attention).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.attention_tiles import CHUNK, KEY_GROUP
from kvpilot_engine.kernels.jit import kernel

Integers = npt.NDArray[np.int64]
Storage = npt.NDArray[np.uint16] | npt.NDArray[np.float32] | npt.NDArray[np.int16]

RUNS = 2 * KEY_GROUP // 8
"""Of an item's table of addresses: a group's and those that follow."""


@kernel
def find_runs(
    keys: Storage,
    values: Storage,
    kv_head: int,
    table: Integers,
    layout: tuple[int, int, int, int],
    begin: int,
    num_keys: int,
    last_position: int,
    runs: Integers,
) -> int:
    """runs[0] and runs[1]: keys and values of num_keys positions from `begin` on, which is a multiple of CHUNK.

    `table` is the sequence's row of the block tables. Behind them stand keys that are needed soon; returns how many
    places of runs[0] are filled, the rest up to a group has an address that does no harm.
    """
    _, head_dim, block_size, lanes = layout
    runs_per_block = block_size // lanes
    run_bytes = lanes * head_dim * keys.itemsize
    head_bytes = block_size * head_dim * keys.itemsize
    block_bytes = head_bytes * keys.shape[1]
    key_base = keys.ctypes.data + kv_head * head_bytes
    value_base = values.ctypes.data + kv_head * head_bytes
    num_chunks = (num_keys + CHUNK - 1) // CHUNK
    num_runs = (num_keys + lanes - 1) // lanes
    for run in range(num_chunks * CHUNK // lanes):
        # where blocks hold 8 tokens, the second half of the last chunk may not exist: any address will do
        place = begin // lanes + min(run, num_runs - 1)
        offset = table[place // runs_per_block] * block_bytes + place % runs_per_block * run_bytes
        runs[0, run] = key_base + offset
        runs[1, run] = value_base + offset
    # what follows is only asked for early: keys of the next group, or again the values of this one
    first_ahead = num_chunks * CHUNK // lanes
    known = max(first_ahead, min(first_ahead + KEY_GROUP // lanes, (last_position - begin) // lanes + 1))
    for run in range(first_ahead, known):
        place = begin // lanes + run
        offset = table[place // runs_per_block] * block_bytes + place % runs_per_block * run_bytes
        runs[0, run] = key_base + offset
    runs[0, known : first_ahead + KEY_GROUP // lanes] = runs[1, 0]
    return known


@kernel
def find_first_keys(
    keys: Storage,
    kv_head: int,
    table: Integers,
    layout: tuple[int, int, int, int],
    begin: int,
    last_position: int,
    runs: Integers,
) -> None:
    """Keys from `begin` on into `runs`, as far as both reach."""
    _, head_dim, block_size, lanes = layout
    runs_per_block = block_size // lanes
    run_bytes = lanes * head_dim * keys.itemsize
    head_bytes = block_size * head_dim * keys.itemsize
    block_bytes = head_bytes * keys.shape[1]
    base = keys.ctypes.data + kv_head * head_bytes
    for run in range(min(runs.shape[0], (last_position - begin) // lanes + 1)):
        place = begin // lanes + run
        runs[run] = base + table[place // runs_per_block] * block_bytes + place % runs_per_block * run_bytes
