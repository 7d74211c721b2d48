"""Random numbers without state: Philox4x32-10, a function of key and counter.

Sampling keyed by (seed, choice, position) gives a sequence the same draws however it was scheduled or preempted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.jit import kernel

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

UInt64s = npt.NDArray[np.uint64]


@kernel
def philox4x32(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Ten rounds over a counter of four 32-bit words; each number holds 32 bits."""
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEP_0) & _MASK, (k1 + _KEY_STEP_1) & _MASK
    return c0, c1, c2, c3


@kernel
def fill_uniforms(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray, draws: np.ndarray) -> None:
    for i in range(draws.size):
        seed, position = seeds[i], positions[i]
        high, low, _, _ = philox4x32(
            position & _MASK, position >> _HALF, choices[i], np.uint64(0), seed & _MASK, seed >> _HALF
        )
        draws[i] = np.float64((high << np.uint64(21)) | (low >> np.uint64(11))) / np.float64(1 << 53)


def uniforms(seeds: UInt64s, choices: UInt64s, positions: UInt64s) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice, position)."""
    draws = np.empty(seeds.size, np.float64)
    fill_uniforms(seeds, choices, positions, draws)
    return draws
