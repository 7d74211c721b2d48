"""Paged attention against a plain softmax: head layouts, block sizes, windows and soft caps; and a row's bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.kernels.attention_matrix_tiles import GROUP
from kvpilot_engine.kernels.attention_runs import RUNS
from kvpilot_engine.kernels.attention_tiles import KEY_GROUP
from kvpilot_engine.kernels.cpu_features import multiplies_tiles
from kvpilot_engine.kernels.paged_attention import ITEM_FIELDS, HeadLayout, attend, plan_items

Floats = npt.NDArray[np.float32]
LONGEST = 300
"""More than two groups of keys."""
TILES = pytest.param(np.int16, marks=pytest.mark.skipif(not multiplies_tiles(), reason="this processor has no AMX"))
"""A cache of bfloat16 in tiles; its bits are int16, those of half precision uint16."""
LOG2_E = 1.4426950408889634
TILED_SHAPES = [(9, 3, 64, 16), (4, 4, 80, 16), (8, 1, 128, 48), (10, 2, 256, 16), (12, 2, 16, 32), (50, 1, 32, 64)]


def round_to_bfloat16(values: Floats) -> Floats:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: Floats = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    return rounded


@dataclass(frozen=True)
class Case:
    """Keys, values and queries of some sequences of LONGEST tokens, in a cache full of NaN elsewhere."""

    layout: HeadLayout
    dtype: Any
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    tables: npt.NDArray[np.int64]
    plain_keys: Floats
    """[sequences, tokens, kv heads, head_dim], as stored"""
    plain_values: Floats
    queries: Floats
    """[sequences, tokens, heads * head_dim]"""

    @property
    def tolerance(self) -> float:
        """Weights are bfloat16 on tiles."""
        return 4e-3 if self.layout.in_tiles else 3e-6

    def attend(self, parts: list[tuple[int, int, int]], *, window: int = 0, softcap: float = 0.0) -> list[Floats]:
        """Rows start..end of sequences, all in one step: parts are (sequence, start, end)."""
        counts = np.array([end - start for _, start, end in parts])
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        queries = np.concatenate([self.queries[sequence, start:end] for sequence, start, end in parts])
        items = np.empty((len(queries), ITEM_FIELDS), np.int64)
        ends = np.array([end for *_, end in parts], np.int64)
        count = plan_items(query_start, ends, self.layout.rows_per_item, items)
        num_threads = numba.get_num_threads()
        out = np.full_like(queries, np.nan)
        layout = self.layout
        bits: Any = np.uint16 if self.dtype is np.float16 else self.dtype
        attend(
            queries,
            self.keys.view(bits),
            self.values.view(bits),
            self.tables[[sequence for sequence, *_ in parts]],
            items[:count],
            (layout.heads_per_kv, layout.head_dim, layout.block_size, layout.lanes),
            layout.head_dim**-0.5,
            softcap,
            window,
            np.full((num_threads, layout.scratch_floats()), np.nan, np.float32),
            np.zeros((num_threads, 2, RUNS), np.int64),
            np.zeros(1, np.int64),
            out,
        )
        return np.split(out, query_start[1:-1])

    def forget(self, sequence: int, end: int) -> None:
        """Not a number in all slots from a position on."""
        size = (self.layout.num_kv_heads, self.layout.head_dim)
        nothing = np.full(size, np.nan, np.float32)
        for position in range(end, self.tables.shape[1] * self.layout.block_size):
            block = self.tables[sequence, position // self.layout.block_size]
            put(self.layout, self.keys, self.values, block, position % self.layout.block_size, nothing, nothing)

    def expect(self, sequence: int, position: int, *, window: int = 0, softcap: float = 0.0) -> npt.NDArray[np.float64]:
        first = max(0, position - window + 1) if window else 0
        heads = self.queries[sequence, position].reshape(self.layout.num_heads, -1).astype(np.float64)
        rows = []
        factor = self.layout.head_dim**-0.5 * LOG2_E
        for head, query in enumerate(heads):
            of_kv = head // self.layout.heads_per_kv
            if self.layout.in_tiles:
                query = round_to_bfloat16((query * factor).astype(np.float32)).astype(np.float64) / factor
            scores = self.plain_keys[sequence, first : position + 1, of_kv] @ query * self.layout.head_dim**-0.5
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            rows.append(weights / weights.sum() @ self.plain_values[sequence, first : position + 1, of_kv])
        return np.concatenate(rows)


def put(
    layout: HeadLayout,
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    block: int,
    slot: int,
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
) -> None:
    """A token's key and value [kv heads, head_dim] to its place, as the kernels' modules draw it."""
    heads, head_dim, lanes = layout.num_kv_heads, layout.head_dim, layout.lanes
    run, lane = slot // lanes, slot % lanes
    if layout.in_tiles:
        key, value = ((round_to_bfloat16(part).view(np.uint32) >> 16).astype(np.uint16) for part in (key, value))
        paired = keys.view(np.uint16).reshape(-1, heads, layout.block_size // lanes, head_dim // 2, lanes, 2)
        paired[block, :, run, :, lane] = key.reshape(heads, head_dim // 2, 2)
        columns = values.view(np.uint16).reshape(-1, heads, layout.block_size // lanes, head_dim // 16, 8, 16, 2)
        columns[block, :, run, :, lane // 2, :, lane % 2] = value.reshape(heads, head_dim // 16, 16)
    else:
        keys.reshape(-1, heads, layout.block_size // lanes, head_dim, lanes)[block, :, run, :, lane] = key
        values.reshape(-1, heads, layout.block_size, head_dim)[block, :, slot] = value


def make_case(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: Any = np.float16, sequences: int = 2
) -> Case:
    source = np.random.default_rng(5)
    layout = HeadLayout(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        in_tiles=dtype is np.int16,
    )
    blocks = -(-LONGEST // block_size)
    tables = source.permutation(sequences * blocks).reshape(sequences, blocks) + 1
    size = (sequences, LONGEST, num_kv_heads, head_dim)
    keys, values = (source.standard_normal(size).astype(np.float32) for _ in range(2))
    keys, values = (round_to_bfloat16(part) if layout.in_tiles else part.astype(dtype) for part in (keys, values))
    shape = layout.storage_shape(sequences * blocks + 1)
    stored = [np.full(shape, 0x7FFF if layout.in_tiles else np.nan, dtype) for _ in range(2)]
    for sequence in range(sequences):
        for position in range(LONGEST):
            block, slot = tables[sequence, position // block_size], position % block_size
            put(layout, stored[0], stored[1], block, slot, keys[sequence, position], values[sequence, position])
    queries = source.standard_normal((sequences, LONGEST, num_heads * head_dim)).astype(np.float32)
    return Case(
        layout, dtype, stored[0], stored[1], tables, keys.astype(np.float32), values.astype(np.float32), queries
    )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (9, 3, 64, 16, np.float16),
        (4, 4, 80, 8, np.float16),
        (8, 1, 128, 24, np.float16),
        (14, 2, 96, 32, np.float32),
        (10, 2, 256, 16, np.float16),
        (12, 2, 16, 8, np.float32),
        (50, 1, 32, 64, np.float16),
        *(pytest.param(*shape, *TILES.values, marks=TILES.marks) for shape in TILED_SHAPES),
    ],
)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (150, 5.0)])
def test_rows_equal_a_plain_softmax(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: Any, window: int, softcap: float
) -> None:
    case = make_case(num_heads, num_kv_heads, head_dim, block_size, dtype)
    parts = [(0, 299, 300), (1, 0, 140), (1, 140, 141), (0, 127, 130)]
    found = case.attend(parts, window=window, softcap=softcap)
    for (sequence, start, end), rows in zip(parts, found, strict=True):
        for position in {start, (start + end) // 2, end - 1}:
            expected = case.expect(sequence, position, window=window, softcap=softcap)
            np.testing.assert_allclose(rows[position - start], expected, atol=case.tolerance)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (9, 3, 32, 16, np.float16),
        (7, 1, 32, 24, np.float16),
        (2, 2, 32, 8, np.float16),
        *(pytest.param(*shape, *TILES.values, marks=TILES.marks) for shape in TILED_SHAPES),
    ],
)
def test_a_row_has_the_same_bits_in_decode_prefill_and_company(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: Any, window: int
) -> None:
    case = make_case(num_heads, num_kv_heads, head_dim, block_size, dtype)
    (whole,) = case.attend([(0, 0, LONGEST)], window=window)
    for position in (0, 15, 16, GROUP - 1, GROUP, KEY_GROUP - 1, KEY_GROUP, 2 * KEY_GROUP + 3, LONGEST - 1):
        (alone,) = case.attend([(0, position, position + 1)], window=window)
        assert alone.tobytes() == whole[position].tobytes()
    # not at the borders of items
    chunks = case.attend([(0, 0, 101), (1, 5, 77), (0, 101, 230), (1, 250, 251), (0, 230, 300)], window=window)
    assert np.concatenate([chunks[0], chunks[2], chunks[4]]).tobytes() == whole.tobytes()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(
    ("block_size", "dtype"),
    [
        *((size, np.float16) for size in (8, 16, 24, 32, 128, 256)),
        *(pytest.param(size, *TILES.values, marks=TILES.marks) for size in (16, 32, 256)),
    ],
)
def test_lengths_at_the_borders_of_blocks(head_dim: int, block_size: int, dtype: Any) -> None:  # A22
    case = make_case(4, 2, head_dim, block_size, dtype)
    lengths = sorted({1, *(n for n in (block_size - 1, block_size, block_size + 1, LONGEST) if n <= LONGEST)})
    for length, (rows,) in zip(lengths, (case.attend([(1, length - 1, length)]) for length in lengths), strict=True):
        np.testing.assert_allclose(rows[0], case.expect(1, length - 1), atol=case.tolerance)
    (whole,) = case.attend([(1, 0, LONGEST)])
    for length in lengths:
        np.testing.assert_allclose(whole[length - 1], case.expect(1, length - 1), atol=case.tolerance)


@pytest.mark.parametrize("dtype", [np.float16, TILES])
def test_the_last_block_of_a_cache_of_more_than_2_to_the_31_elements_is_found(dtype: Any) -> None:  # A22
    """The system lends pages only where something is written, so this takes addresses and no memory."""
    small = make_case(2, 1, 64, 16, dtype, sequences=1)
    blocks = small.tables.shape[1]
    layout, far = small.layout, 2**31 // (16 * 64) + 100
    stored = [np.zeros(layout.storage_shape(far + blocks + 1), dtype) for _ in range(2)]
    assert stored[0].size > 2**31
    for large, near in zip(stored, (small.keys, small.values), strict=True):
        large[far + 1 :] = near[1:]
    distant = replace(small, keys=stored[0], values=stored[1], tables=small.tables + far)
    for start in (0, LONGEST - 1):
        (found,), (expected,) = (case.attend([(0, start, LONGEST)]) for case in (distant, small))
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("block_size", "dtype"), [(8, np.float16), pytest.param(16, *TILES.values, marks=TILES.marks)])
def test_what_lies_behind_the_end_is_never_used(block_size: int, dtype: Any) -> None:
    case = make_case(6, 2, 64, block_size, dtype)
    for end in (1, 17, 33, GROUP + 1, 2 * KEY_GROUP - 15):
        (expected,) = case.attend([(0, end - 1, end)])
        spoiled = replace(case, keys=case.keys.copy(), values=case.values.copy())
        spoiled.forget(0, end)
        (alone,), (whole,) = spoiled.attend([(0, end - 1, end)]), spoiled.attend([(0, 0, end)])
        assert alone.tobytes() == whole[-1:].tobytes() == expected.tobytes()
