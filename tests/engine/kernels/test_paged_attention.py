"""Paged attention against a plain softmax: head layouts, block sizes, windows and soft caps; and a row's bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.kernels.attention_tiles import KEY_GROUP
from kvpilot_engine.kernels.paged_attention import ITEM_FIELDS, RUNS, HeadLayout, attend, plan_items

Floats = npt.NDArray[np.float32]
LONGEST = 300
"""More than two groups of keys."""


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
        bits: Any = np.uint16 if self.dtype is np.float16 else np.float32
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

    def expect(self, sequence: int, position: int, *, window: int = 0, softcap: float = 0.0) -> npt.NDArray[np.float64]:
        first = max(0, position - window + 1) if window else 0
        heads = self.queries[sequence, position].reshape(self.layout.num_heads, -1).astype(np.float64)
        rows = []
        for head, query in enumerate(heads):
            of_kv = head // self.layout.heads_per_kv
            scores = self.plain_keys[sequence, first : position + 1, of_kv] @ query * self.layout.head_dim**-0.5
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            rows.append(weights / weights.sum() @ self.plain_values[sequence, first : position + 1, of_kv])
        return np.concatenate(rows)


def make_case(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: Any = np.float16, sequences: int = 2
) -> Case:
    source = np.random.default_rng(5)
    layout = HeadLayout(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    blocks = -(-LONGEST // block_size)
    tables = source.permutation(sequences * blocks).reshape(sequences, blocks) + 1
    size = (sequences, LONGEST, num_kv_heads, head_dim)
    keys, values = (source.standard_normal(size).astype(dtype) for _ in range(2))
    stored = [np.full(layout.storage_shape(sequences * blocks + 1), np.nan, dtype) for _ in range(2)]
    key_runs = stored[0].reshape(-1, num_kv_heads, block_size // layout.lanes, head_dim, layout.lanes)
    value_rows = stored[1].reshape(-1, num_kv_heads, block_size, head_dim)
    for sequence in range(sequences):
        for position in range(LONGEST):
            block, slot = tables[sequence, position // block_size], position % block_size
            key_runs[block, :, slot // layout.lanes, :, slot % layout.lanes] = keys[sequence, position]
            value_rows[block, :, slot] = values[sequence, position]
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
            np.testing.assert_allclose(rows[position - start], expected, atol=3e-6)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), [(9, 3, 16), (7, 1, 24), (2, 2, 8)])
def test_a_row_has_the_same_bits_in_decode_prefill_and_company(
    num_heads: int, num_kv_heads: int, block_size: int, window: int
) -> None:
    case = make_case(num_heads, num_kv_heads, 32, block_size)
    (whole,) = case.attend([(0, 0, LONGEST)], window=window)
    for position in (0, 15, 16, KEY_GROUP - 1, KEY_GROUP, 2 * KEY_GROUP + 3, LONGEST - 1):
        (alone,) = case.attend([(0, position, position + 1)], window=window)
        assert alone.tobytes() == whole[position].tobytes()
    # not at the borders of items
    chunks = case.attend([(0, 0, 101), (1, 5, 77), (0, 101, 230), (1, 250, 251), (0, 230, 300)], window=window)
    assert np.concatenate([chunks[0], chunks[2], chunks[4]]).tobytes() == whole.tobytes()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 128, 256])
def test_lengths_at_the_borders_of_blocks(head_dim: int, block_size: int) -> None:  # A22
    case = make_case(4, 2, head_dim, block_size)
    lengths = sorted({1, *(n for n in (block_size - 1, block_size, block_size + 1, LONGEST) if n <= LONGEST)})
    for length, (rows,) in zip(lengths, (case.attend([(1, length - 1, length)]) for length in lengths), strict=True):
        np.testing.assert_allclose(rows[0], case.expect(1, length - 1), atol=3e-6)
    (whole,) = case.attend([(1, 0, LONGEST)])
    for length in lengths:
        np.testing.assert_allclose(whole[length - 1], case.expect(1, length - 1), atol=3e-6)


def test_the_last_block_of_a_cache_of_more_than_2_to_the_31_elements_is_found() -> None:  # A22
    """The system lends pages only where something is written, so this takes addresses and no memory."""
    small = make_case(2, 1, 64, 16, sequences=1)
    blocks = small.tables.shape[1]
    layout, far = small.layout, 2**31 // (16 * 64) + 100
    stored = [np.zeros(layout.storage_shape(far + blocks + 1), np.float16) for _ in range(2)]
    assert stored[0].size > 2**31
    for large, near in zip(stored, (small.keys, small.values), strict=True):
        large[far + 1 :] = near[1:]
    distant = replace(small, keys=stored[0], values=stored[1], tables=small.tables + far)
    for start in (0, LONGEST - 1):
        (found,), (expected,) = (case.attend([(0, start, LONGEST)]) for case in (distant, small))
        assert found.tobytes() == expected.tobytes()
