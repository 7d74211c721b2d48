"""Compiled loops over rows of logits: the choice of a token, and log-probabilities.

Not for what a request asks for: that arrives as one number per row and field. Invariant: a row is read by one thread in
one fixed order, so that its result is the same in any batch; nothing is written but results and the workspace.

Order among logits is by value, falling, and by id among equal values. It is decided on `ordered` integers, whose order
is that of the floats: comparing integers needs no care for NaN and runs on whole vectors.

The filters never sort the vocabulary. Each keeps the head of that order, so one key splits kept from dropped:

    keys falling   |-------- kept --------|t t t t|------ dropped ------|
                                           └ of those equal to t, the lowest ids as far as needed
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import get_num_threads, njit, prange

Float32Rows = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

NOT_FINITE = -1
"""In place of a token: the row holds NaN or plus infinity."""
NOTHING_ALLOWED = -2
"""In place of a token: every logit is minus infinity."""

_BLOCK = 64
"""Columns that share one maximum, which tells whether a block needs to be looked at."""
_SUM_BLOCK = 1024
"""Columns whose weights are added up before the draw is compared with them."""

_SIGN_OFF = np.int32(0x7FFFFFFF)
_PLUS_INFINITY = np.int32(0x7F800000)
_MINUS_INFINITY = np.int32(np.float32(-np.inf).view(np.int32) ^ 0x7FFFFFFF)

_LOWEST = np.int32(-(2**31))

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_ROUNDING = 6755399441055744.0
"""1.5 * 2**52: added, it rounds to an integer and leaves that integer in the lowest bits."""
_EXP_SMALLEST = -708.0
"""Below it the result would not be a normal number; it is 0."""
_LARGEST_FLOAT = 1.7976931348623157e308


@njit(inline="always")
def ordered(bits: np.int32) -> np.int32:
    """An integer in the order of the float32 whose bits these are; both zeros become 0, NaNs lie beyond infinities."""
    key = bits ^ ((bits >> np.int32(31)) & _SIGN_OFF)
    return np.int32(0) if key == np.int32(-1) else key


@njit(inline="always")
def _exp(x: float) -> float:
    """exp for x <= 0, within 2 units of the last place. Written out because only so does it run on whole vectors."""
    shifted = x * _LOG2_E + _ROUNDING
    whole = shifted - _ROUNDING
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = 1 / 6227020800.0
    p = p * r + 1 / 479001600.0
    p = p * r + 1 / 39916800.0
    p = p * r + 1 / 3628800.0
    p = p * r + 1 / 362880.0
    p = p * r + 1 / 40320.0
    p = p * r + 1 / 5040.0
    p = p * r + 1 / 720.0
    p = p * r + 1 / 120.0
    p = p * r + 1 / 24.0
    p = p * r + 1 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    # multiply by 2**whole: add it to the exponent's bits
    bits = np.float64(p).view(np.int64) + (np.float64(shifted).view(np.int64) << 52)
    return np.int64(bits).view(np.float64) if x > _EXP_SMALLEST else 0.0


@njit(cache=True)
def _scan(keys: np.ndarray, maxima: np.ndarray) -> tuple[np.int32, int]:
    """The largest key of each block; the largest of all, or NOT_FINITE and NOTHING_ALLOWED as the second value."""
    smallest = _PLUS_INFINITY
    largest = _LOWEST
    size = keys.size
    for block in range(maxima.size):
        high = _LOWEST
        for i in range(block * _BLOCK, min(size, (block + 1) * _BLOCK)):
            key = ordered(keys[i])
            high = max(high, key)
            smallest = min(smallest, key)
        maxima[block] = high
        largest = max(largest, high)
    if largest >= _PLUS_INFINITY or smallest < _MINUS_INFINITY:
        return largest, NOT_FINITE
    return largest, NOTHING_ALLOWED if largest == _MINUS_INFINITY else 0


@njit(cache=True)
def _first_equal(keys: np.ndarray, maxima: np.ndarray, key: np.int32) -> int:
    block = 0
    while maxima[block] != key:
        block += 1
    i = block * _BLOCK
    while ordered(keys[i]) != key:
        i += 1
    return i


@njit(cache=True)
def _kth_largest(keys: np.ndarray, k: int) -> np.int32:
    """The k-th largest of ordered keys, by halving the range of values: each pass only counts."""
    low, high = np.int64(-(2**31)), np.int64(2**31)
    while high - low > 1:
        middle = (low + high) >> 1
        pivot = np.int32(middle)
        count = np.int32(0)
        for i in range(keys.size):
            count += np.int32(keys[i] >= pivot)
        if count >= k:
            low = middle
        else:
            high = middle
    return np.int32(low)


@njit(cache=True, fastmath={"reassoc", "nsz"})
def _sum(weights: np.ndarray) -> float:
    total = 0.0
    for i in range(weights.size):
        total += weights[i]
    return total


@njit(cache=True, fastmath={"reassoc", "nsz"})
def _sum_from(weights: np.ndarray, keys: np.ndarray, lowest: np.int32) -> float:
    """The weight of the keys that are at least `lowest`."""
    total = 0.0
    for i in range(weights.size):
        total += weights[i] if keys[i] >= lowest else 0.0
    return total


@njit(cache=True, fastmath={"contract"})
def _weigh(row: np.ndarray, highest: float, inverse_temperature: float, weights: np.ndarray) -> None:
    for i in range(row.size):
        weights[i] = _exp((np.float64(row[i]) - highest) * inverse_temperature)


@njit(cache=True)
def _gather_from(keys: np.ndarray, maxima: np.ndarray, lowest: np.int32, ids: np.ndarray, kept: np.ndarray) -> int:
    """Ids and ordered keys of what is at least `lowest`; returns how many."""
    count = 0
    for block in range(maxima.size):
        if maxima[block] >= lowest:
            for i in range(block * _BLOCK, min(keys.size, (block + 1) * _BLOCK)):
                key = ordered(keys[i])
                ids[count] = i
                kept[count] = key
                count += int(key >= lowest)
    return count


@njit(cache=True)
def _gather_heavy(keys: np.ndarray, least: float, ids: np.ndarray, kept: np.ndarray, weights: np.ndarray) -> int:
    """Ids, ordered keys and (moved to the front) weights of what weighs at least `least`; returns how many."""
    count = 0
    for i in range(keys.size):
        weight = weights[i]
        ids[count] = i
        kept[count] = ordered(keys[i])
        weights[count] = weight
        count += weight >= least
    return count


@njit(cache=True)
def _keep_from(
    lowest: np.int32, num_equal: int, count: int, ids: np.ndarray, keys: np.ndarray, weights: np.ndarray
) -> int:
    """Keep what is above `lowest`, and the first num_equal of what equals it; returns how many."""
    kept = 0
    for i in range(count):
        key = keys[i]
        is_equal = key == lowest
        keep = (key > lowest) | (is_equal & (num_equal > 0))
        num_equal -= is_equal
        ids[kept] = ids[i]
        keys[kept] = key
        weights[kept] = weights[i]
        kept += keep
    return kept


@njit(cache=True)
def _keep_largest(k: int, count: int, ids: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> int:
    if k >= count:
        return count
    lowest = _kth_largest(keys[:count], k)
    above = 0
    for i in range(count):
        above += keys[i] > lowest
    return _keep_from(lowest, k - above, count, ids, keys, weights)


@njit(cache=True)
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
    return _keep_from(lowest, num_equal, count, ids, keys, weights)


@njit(cache=True)
def _draw(weights: np.ndarray, uniform: float) -> int:
    """The first index at which the cumulative weight exceeds `uniform` of the whole."""
    total = 0.0
    for start in range(0, weights.size, _SUM_BLOCK):
        total += _sum(weights[start : start + _SUM_BLOCK])
    wanted = uniform * total
    before = 0.0
    last = 0
    for start in range(0, weights.size, _SUM_BLOCK):
        block = weights[start : start + _SUM_BLOCK]
        after = before + _sum(block)
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


@njit(cache=True)
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
    highest_key, problem = _scan(keys, maxima)
    if problem:
        return problem
    first = _first_equal(keys, maxima, highest_key)
    if temperature == 0.0 or top_k == 1:
        return first
    highest = np.float64(row[first])
    # a product, because dividing is slow; limited, because 0 * infinity is no number
    inverse = min(1.0 / temperature, _LARGEST_FLOAT)
    if 0 < top_k < row.size:
        # at least k blocks hold something as large as the k-th largest maximum
        lowest = _kth_largest(maxima, top_k) if top_k <= maxima.size else _MINUS_INFINITY
        count = _gather_from(keys, maxima, lowest, ids, kept)
        for i in range(count):
            weights[i] = _exp((np.float64(row[ids[i]]) - highest) * inverse)
        count = _keep_largest(top_k, count, ids, kept, weights)
        if min_p > 0.0:
            heavy = 0
            for i in range(count):
                ids[heavy], kept[heavy], weights[heavy] = ids[i], kept[i], weights[i]
                heavy += weights[i] >= min_p
            count = heavy
        total = _sum(weights[:count])
    else:
        _weigh(row, highest, inverse, weights[: row.size])
        if top_p == 1.0 and min_p == 0.0:
            return _draw(weights[: row.size], uniform)
        if min_p > 0.0:
            count = _gather_heavy(keys, min_p, ids, kept, weights)
            total = _sum(weights[:count])
        else:
            total = _sum(weights[: row.size])
            # all that is lighter weighs less than 1 - top_p together, so the nucleus has none of it
            count = _gather_heavy(keys, (1.0 - top_p) * total / row.size * 0.999, ids, kept, weights)
    if top_p < 1.0:
        count = _keep_nucleus(top_p * total, count, ids, kept, weights)
    return int(ids[_draw(weights[:count], uniform)])


@njit(cache=True)
def _choose_share(
    logits: np.ndarray,
    rows: np.ndarray,
    temperatures: np.ndarray,
    top_ks: np.ndarray,
    top_ps: np.ndarray,
    min_ps: np.ndarray,
    uniforms: np.ndarray,
    tokens: np.ndarray,
    worker: int,
    num_workers: int,
) -> None:
    size = logits.shape[1]
    bits = logits.view(np.int32)
    maxima = np.empty((size + _BLOCK - 1) // _BLOCK, np.int32)
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


@njit(cache=True, parallel=True)
def _choose_in_parallel(
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
    for worker in prange(num_workers):
        _choose_share(logits, rows, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, worker, num_workers)


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
        _choose_in_parallel(logits, rows, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, num_workers)
    else:
        # without a parallel region: waking threads for one row costs more than they save
        _choose_share(logits, rows, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, 0, 1)
    return tokens


@njit(cache=True)
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
    highest_key, problem = _scan(keys, maxima)
    if problem:
        return np.nan, 0
    highest = np.float64(row[_first_equal(keys, maxima, highest_key)])
    _weigh(row, highest, 1.0, weights)
    offset = highest + np.log(_sum(weights))
    target_key = ordered(keys[target])
    rank = 1
    for i in range(row.size):
        key = ordered(keys[i])
        rank += (key > target_key) | ((key == target_key) & (i < target))
    if num_top > 0:
        lowest = _kth_largest(maxima, num_top) if num_top <= maxima.size else _LOWEST
        count = _gather_from(keys, maxima, lowest, ids, kept)
        count = _keep_largest(num_top, count, ids, kept, weights)
        # stable: among equal ones the lower id stays first
        order = np.argsort(-kept[:count].astype(np.int64), kind="mergesort")
        for i in range(count):
            top_ids[i] = ids[order[i]]
            top_logprobs[i] = np.float64(row[ids[order[i]]]) - offset
    return np.float64(row[target]) - offset, rank


@njit(cache=True)
def _rate_share(
    logits: np.ndarray,
    rows: np.ndarray,
    targets: np.ndarray,
    num_tops: np.ndarray,
    logprobs: np.ndarray,
    ranks: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
    worker: int,
    num_workers: int,
) -> None:
    size = logits.shape[1]
    bits = logits.view(np.int32)
    maxima = np.empty((size + _BLOCK - 1) // _BLOCK, np.int32)
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


@njit(cache=True, parallel=True)
def _rate_in_parallel(
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
    for worker in prange(num_workers):
        _rate_share(logits, rows, targets, num_tops, logprobs, ranks, top_ids, top_logprobs, worker, num_workers)


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
        _rate_in_parallel(logits, rows, targets, num_tops, *results, num_workers)
    else:
        _rate_share(logits, rows, targets, num_tops, *results, 0, 1)
    return results


@njit(cache=True)
def copy_allowed(source: np.ndarray, words: np.ndarray, destination: np.ndarray) -> bool:
    """Copy a row, minus infinity where the token's bit is 0 or missing in uint32 `words`; False if it is not finite."""
    for i in range(source.size):
        value = source[i]
        # false for NaN too
        if not value < np.float32(np.inf):
            return False
        word = i >> 5
        allowed = word < words.size and (words[word] >> np.uint32(i & 31)) & np.uint32(1)
        destination[i] = value if allowed else np.float32(-np.inf)
    return True
