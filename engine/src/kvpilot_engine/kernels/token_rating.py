"""Compiled log-probabilities: of one token in each row of logits, its rank, and the most probable tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import get_num_threads

from kvpilot_engine.kernels.jit import kernel, parallel_kernel, parallel_range
from kvpilot_engine.kernels.logit_rows import (
    BLOCK,
    LOWEST_KEY,
    Float32Rows,
    Float64s,
    Int64s,
    first_equal,
    gather_from,
    keep_largest,
    kth_largest,
    ordered,
    scan,
    sum_weights,
    weigh,
)


@kernel
def _rate(
    row: np.ndarray,
    keys: np.ndarray,
    target: int,
    num_top: int,
    maxima: np.ndarray,
    ids: np.ndarray,
    kept: np.ndarray,
    weights: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
) -> tuple[float, int]:
    highest_key, problem = scan(keys, maxima)
    if problem:
        return np.nan, 0
    highest = np.float64(row[first_equal(keys, maxima, highest_key)])
    weigh(row, highest, 1.0, weights)
    offset = highest + np.log(sum_weights(weights))
    target_key = ordered(keys[target])
    rank = 1
    for i in range(row.size):
        key = ordered(keys[i])
        rank += (key > target_key) | ((key == target_key) & (i < target))
    if num_top > 0:
        lowest = kth_largest(maxima, num_top) if num_top <= maxima.size else LOWEST_KEY
        count = gather_from(keys, maxima, lowest, ids, kept)
        count = keep_largest(num_top, count, ids, kept, weights)
        # stable: among equal ones the lower id stays first
        order = np.argsort(-kept[:count].astype(np.int64), kind="mergesort")
        for i in range(count):
            top_ids[i] = ids[order[i]]
            top_logprobs[i] = np.float64(row[ids[order[i]]]) - offset
    return np.float64(row[target]) - offset, rank


@kernel
def rate_share(
    logits: np.ndarray,
    rows: np.ndarray,
    targets: np.ndarray,
    num_tops: np.ndarray,
    logprobs: np.ndarray,
    ranks: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
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
        logprobs[i], ranks[i] = _rate(
            logits[row],
            bits[row],
            targets[i],
            num_tops[i],
            maxima,
            ids,
            kept,
            weights,
            top_ids[i],
            top_logprobs[i],
        )


@parallel_kernel
def rate_in_parallel(
    logits: np.ndarray,
    rows: np.ndarray,
    targets: np.ndarray,
    num_tops: np.ndarray,
    logprobs: np.ndarray,
    ranks: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
    num_workers: int,
) -> None:
    for worker in parallel_range(num_workers):  # an unsigned number: as it is, the share would be compiled twice
        rate_share(
            logits, rows, targets, num_tops, logprobs, ranks, top_ids, top_logprobs, np.int64(worker), num_workers
        )


def rate_tokens(
    logits: Float32Rows, rows: Int64s, targets: Int64s, num_tops: Int64s
) -> tuple[Float64s, Int64s, npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Log-probability (NaN in an unusable row) and rank of one token in each of `rows`, and the most probable tokens.

    The last two are [rows, largest of num_tops], falling; a row with fewer leaves the rest as it is.
    """
    count = rows.size
    width = min(int(num_tops.max(initial=0)), logits.shape[1])
    logprobs, ranks = np.empty(count, np.float64), np.empty(count, np.int64)
    top_ids, top_logprobs = np.empty((count, width), np.int64), np.empty((count, width), np.float64)
    results = (logprobs, ranks, top_ids, top_logprobs)
    num_workers = min(get_num_threads(), count)
    if num_workers > 1:
        rate_in_parallel(logits, rows, targets, num_tops, *results, num_workers)
    else:
        rate_share(logits, rows, targets, num_tops, *results, 0, 1)
    return results
