"""Compiled choice of a token in each row of logits: temperature, filters, draw.

Not for what a request asks for: that arrives as one number per row and field. Rows are shared out among threads, one
row to one thread; nothing is written but results and the workspace.
"""

from __future__ import annotations

import numpy as np
from numba import get_num_threads

from kvpilot_engine.kernels.jit import kernel, kernel_with_sums, parallel_kernel, parallel_range
from kvpilot_engine.kernels.logit_rows import (
    BLOCK,
    MINUS_INFINITY_KEY,
    Float32Rows,
    Float64s,
    Int64s,
    exp_nonpositive,
    first_equal,
    gather_from,
    keep_from,
    keep_largest,
    kth_largest,
    ordered,
    scan,
    sum_weights,
    weigh,
)

_WIDEST = 64
"""Temperatures below the largest logit where even a million tokens weigh nothing beside it: exp(-64)."""
_SUM_BLOCK = 1024
"""Columns whose weights are added up before the draw is compared with them."""
_LARGEST_FLOAT = 1.7976931348623157e308


@kernel_with_sums
def _sum_from(weights: np.ndarray, keys: np.ndarray, lowest: np.int32) -> float:
    """The weight of the keys that are at least `lowest`."""
    total = 0.0
    for i in range(weights.size):
        total += weights[i] if keys[i] >= lowest else 0.0
    return total


@kernel_with_sums
def _sum_above(weights: np.ndarray, row: np.ndarray, lowest: np.float32) -> float:
    """The weight of the logits that are at least `lowest`."""
    total = 0.0
    for i in range(weights.size):
        total += weights[i] if row[i] >= lowest else 0.0
    return total


@kernel
def _keep_heavy(least: float, count: int, ids: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> int:
    """Keep what weighs at least `least`; returns how many."""
    kept = 0
    for i in range(count):
        ids[kept], keys[kept], weights[kept] = ids[i], keys[i], weights[i]
        kept += int(weights[i] >= least)
    return kept


@kernel
def _keep_nucleus(wanted: float, count: int, ids: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> int:
    """Keep the head of the order as long as the weight before a token is below `wanted`."""
    low, high = np.int64(2**31), np.int64(-(2**31))
    for i in range(count):
        low = min(low, np.int64(keys[i]))
        high = max(high, np.int64(keys[i]))
    high += 1
    while high - low > 1:
        middle = (low + high) >> 1
        if _sum_from(weights[:count], keys[:count], np.int32(middle)) >= wanted:
            low = middle
        else:
            high = middle
    lowest = np.int32(low)
    before = _sum_from(weights[:count], keys[:count], np.int32(low + 1))
    num_equal = 0
    for i in range(count):
        if keys[i] == lowest and before < wanted:
            before += weights[i]
            num_equal += 1
    return keep_from(lowest, num_equal, count, ids, keys, weights)


@kernel
def _draw(weights: np.ndarray, uniform: float) -> int:
    """The first index at which the cumulative weight exceeds `uniform` of the whole."""
    total = 0.0
    for start in range(0, weights.size, _SUM_BLOCK):
        total += sum_weights(weights[start : start + _SUM_BLOCK])
    wanted = uniform * total
    before = 0.0
    last = 0
    for start in range(0, weights.size, _SUM_BLOCK):
        block = weights[start : start + _SUM_BLOCK]
        after = before + sum_weights(block)
        if after > wanted or start + _SUM_BLOCK >= weights.size:
            for i in range(block.size):
                before += block[i]
                if block[i] > 0.0:
                    last = start + i
                    if before > wanted:
                        return last
            # rounding may push the draw onto the end of what was added up in another order
            if after > wanted:
                return last
        before = after
    return last


@kernel
def _nucleus_floor(
    row: np.ndarray, weights: np.ndarray, highest: float, temperature: float, wanted: float
) -> np.float32:
    """A logit near the lowest of the nucleus, never above it: found by trying thresholds, not by looking at values."""
    low, high = 0, _WIDEST
    while low < high:
        distance = (low + high) // 2
        if _sum_above(weights, row, np.float32(highest - distance * temperature)) >= wanted:
            high = distance
        else:
            low = distance + 1
    return np.float32(highest - low * temperature) if low < _WIDEST else np.float32(-np.inf)


@kernel
def _choose(
    row: np.ndarray,
    keys: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    maxima: np.ndarray,
    ids: np.ndarray,
    kept: np.ndarray,
    weights: np.ndarray,
) -> int:
    highest_key, problem = scan(keys, maxima)
    if problem:
        return problem
    first = first_equal(keys, maxima, highest_key)
    if temperature == 0.0 or top_k == 1:
        return first
    highest = np.float64(row[first])
    # a product, because dividing is slow; limited, because 0 * infinity is no number
    inverse = min(1.0 / temperature, _LARGEST_FLOAT)
    total = 0.0
    lowest = MINUS_INFINITY_KEY
    if 0 < top_k <= maxima.size:
        # at least k blocks hold something as large as the k-th largest maximum
        lowest = kth_largest(maxima, top_k)
    if min_p > 0.0:
        floor = np.float32(highest + temperature * (np.log(min_p) * (1 + 1e-9) - 1e-9))
        lowest = max(lowest, ordered(np.float32(floor).view(np.int32)))
    is_sparse = bool(lowest > MINUS_INFINITY_KEY)
    if not is_sparse:
        weigh(row, highest, inverse, weights)
        if top_p == 1.0 and not 0 < top_k < row.size:
            return _draw(weights, uniform)
        if not 0 < top_k < row.size:
            total = sum_weights(weights)
            floor = _nucleus_floor(row, weights, highest, temperature, top_p * total)
            lowest = ordered(np.float32(floor).view(np.int32))
    count = gather_from(keys, maxima, lowest, ids, kept)
    if is_sparse and count > row.size // 8:
        weigh(row, highest, inverse, weights)
        is_sparse = False
    for i in range(count):
        # in place: an id is never before its place among the gathered
        weights[i] = exp_nonpositive((np.float64(row[ids[i]]) - highest) * inverse) if is_sparse else weights[ids[i]]
    if min_p > 0.0:
        count = _keep_heavy(min_p, count, ids, kept, weights)
    if 0 < top_k < count:
        count = keep_largest(top_k, count, ids, kept, weights)
    if top_p < 1.0:
        if total == 0.0:
            total = sum_weights(weights[:count])
        count = _keep_nucleus(top_p * total, count, ids, kept, weights)
    return int(ids[_draw(weights[:count], uniform)])


@kernel
def choose_share(
    logits: np.ndarray,
    rows: np.ndarray,
    temperatures: np.ndarray,
    top_ks: np.ndarray,
    top_ps: np.ndarray,
    min_ps: np.ndarray,
    uniforms: np.ndarray,
    tokens: np.ndarray,
    worker: int | np.int64,
    num_workers: int,
) -> None:
    size = logits.shape[1]
    bits = logits.view(np.int32)
    maxima = np.empty((size + BLOCK - 1) // BLOCK, np.int32)
    ids = np.empty(size, np.int32)
    kept = np.empty(size, np.int32)
    weights = np.empty(size, np.float64)
    for i in range(worker, rows.size, num_workers):
        row = rows[i]
        tokens[i] = _choose(
            logits[row],
            bits[row],
            temperatures[i],
            top_ks[i],
            top_ps[i],
            min_ps[i],
            uniforms[i],
            maxima,
            ids,
            kept,
            weights,
        )


@parallel_kernel
def choose_in_parallel(
    logits: np.ndarray,
    rows: np.ndarray,
    temperatures: np.ndarray,
    top_ks: np.ndarray,
    top_ps: np.ndarray,
    min_ps: np.ndarray,
    uniforms: np.ndarray,
    tokens: np.ndarray,
    num_workers: int,
) -> None:
    for worker in parallel_range(num_workers):  # an unsigned number: as it is, the share would be compiled twice
        choose_share(
            logits, rows, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, np.int64(worker), num_workers
        )


def choose_tokens(
    logits: Float32Rows,
    rows: Int64s,
    temperatures: Float64s,
    top_ks: Int64s,
    top_ps: Float64s,
    min_ps: Float64s,
    uniforms: Float64s,
) -> Int64s:
    """The token of each of `rows` of [any, vocabulary] logits, or why there is none.

    Beside the result it needs 16 bytes a column and thread, whatever the number of rows.
    """
    tokens = np.empty(rows.size, np.int64)
    num_workers = min(get_num_threads(), rows.size)
    if num_workers > 1:
        choose_in_parallel(logits, rows, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, num_workers)
    else:
        # without a parallel region: waking threads for one row costs more than they save
        choose_share(logits, rows, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, 0, 1)
    return tokens
