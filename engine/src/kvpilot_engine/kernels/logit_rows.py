"""Compiled loops over one row of logits: its order, the weights of its tokens, the head of the order.

Not for what is done with them. Invariant: a row is read in one fixed order: its result is the same in any batch.

Order among logits is by value, falling, and by id among equal values. It is decided on `ordered` integers, whose order
is that of the floats: comparing integers needs no care for NaN and runs on whole vectors.

Nothing sorts the vocabulary. A filter keeps the head of that order, so one key splits kept from dropped:

    keys falling   |-------- kept --------|t t t t|------ dropped ------|
                                           └ of those equal to t, the lowest ids as far as needed
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.jit import kernel, kernel_with_fused_products, kernel_with_sums

Float32Rows = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

NOT_FINITE = -1
"""In place of a token: the row holds NaN or plus infinity."""
NOTHING_ALLOWED = -2
"""In place of a token: every logit is minus infinity."""

BLOCK = 64
"""Columns that share one maximum, which tells whether a block needs to be looked at."""

_SIGN_OFF = np.int32(0x7FFFFFFF)
PLUS_INFINITY_KEY = np.int32(0x7F800000)
MINUS_INFINITY_KEY = np.int32(np.float32(-np.inf).view(np.int32) ^ 0x7FFFFFFF)
LOWEST_KEY = np.int32(-(2**31))

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_ROUNDING = 6755399441055744.0
"""1.5 * 2**52: added, it rounds to an integer and leaves that integer in the lowest bits."""
_EXP_SMALLEST = -708.0
"""Below it the result would not be a normal number; it is 0."""


@kernel
def ordered(bits: np.int32) -> np.int32:
    """An integer in the order of the float32 whose bits these are; both zeros become 0, NaNs lie beyond infinities."""
    key = bits ^ ((bits >> np.int32(31)) & _SIGN_OFF)
    return np.int32(0) if key == np.int32(-1) else key


@kernel_with_fused_products
def exp_nonpositive(x: float) -> float:
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


@kernel
def scan(keys: np.ndarray, maxima: np.ndarray) -> tuple[np.int32, int]:
    """The largest key of each block; the largest of all, or NOT_FINITE and NOTHING_ALLOWED as the second value."""
    smallest, largest = PLUS_INFINITY_KEY, LOWEST_KEY
    for block in range(maxima.size):
        high = LOWEST_KEY
        columns = keys[block * BLOCK : (block + 1) * BLOCK]
        if columns.size == BLOCK:
            for i in range(BLOCK):
                key = ordered(columns[i])
                high = max(high, key)
                smallest = min(smallest, key)
        else:
            for i in range(columns.size):
                key = ordered(columns[i])
                high = max(high, key)
                smallest = min(smallest, key)
        maxima[block] = high
        largest = max(largest, high)
    if largest >= PLUS_INFINITY_KEY or smallest < MINUS_INFINITY_KEY:
        return largest, NOT_FINITE
    return largest, NOTHING_ALLOWED if largest == MINUS_INFINITY_KEY else 0


@kernel
def first_equal(keys: np.ndarray, maxima: np.ndarray, key: np.int32) -> int:
    block = 0
    while maxima[block] != key:
        block += 1
    i = block * BLOCK
    while ordered(keys[i]) != key:
        i += 1
    return i


@kernel
def kth_largest(keys: np.ndarray, k: int) -> np.int32:
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


@kernel_with_sums
def sum_weights(weights: np.ndarray) -> float:
    total = 0.0
    for i in range(weights.size):
        total += weights[i]
    return total


@kernel_with_fused_products
def weigh(row: np.ndarray, highest: float, inverse_temperature: float, weights: np.ndarray) -> None:
    for i in range(row.size):
        weights[i] = exp_nonpositive((np.float64(row[i]) - highest) * inverse_temperature)


@kernel
def gather_from(keys: np.ndarray, maxima: np.ndarray, lowest: np.int32, ids: np.ndarray, kept: np.ndarray) -> int:
    """Ids and ordered keys of what is at least `lowest`; returns how many."""
    count = 0
    for block in range(maxima.size):
        if maxima[block] >= lowest:
            for i in range(block * BLOCK, min(keys.size, (block + 1) * BLOCK)):
                key = ordered(keys[i])
                if key >= lowest:
                    ids[count] = i
                    kept[count] = key
                    count += 1
    return count


@kernel
def keep_from(
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


@kernel
def keep_largest(k: int, count: int, ids: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> int:
    if k >= count:
        return count
    lowest = kth_largest(keys[:count], k)
    above = 0
    for i in range(count):
        above += keys[i] > lowest
    return keep_from(lowest, k - above, count, ids, keys, weights)
