"""Random numbers without state: Philox4x32-10, a function of key and counter.

Sampling keyed by (seed, choice, position) gives a sequence the same draws however it was scheduled or preempted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: _UInt64Array, key: tuple[int, int]) -> _UInt64Array:
    """Ten rounds over counters [..., 4] of 32-bit words held in uint64; returns the same shape."""
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = (c0 * _MULTIPLIERS[0]) >> _HALF, (c0 * _MULTIPLIERS[0]) & _MASK
        high1, low1 = (c2 * _MULTIPLIERS[1]) >> _HALF, (c2 * _MULTIPLIERS[1]) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits; the seed counts modulo 2**64."""
    counter = np.array([position & 0xFFFFFFFF, position >> 32, choice, 0], dtype=np.uint64)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return float((int(words[0]) << 21 | int(words[1]) >> 11) / (1 << 53))
