"""Compiled edits of one row of logits: penalties and masks."""

from __future__ import annotations

import numpy as np

from kvpilot_engine.kernels.jit import kernel

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@kernel
def penalize(
    row: np.ndarray,
    history: np.ndarray,
    num_prompt_tokens: int,
    repetition: float,
    frequency: float,
    presence: float,
    counts: np.ndarray,
) -> None:
    """Apply the penalties to a float32 row, for the tokens of int32 `history`; int32 `counts` is 0 before and after.

    A finite logit stays finite, however strong the penalty; minus infinity stays what it is.
    """
    if repetition != 1.0:
        for token in history:
            if counts[token] == 0:
                counts[token] = 1
                value = np.float64(row[token])
                row[token] = _bounded(value, value / repetition if value > 0.0 else value * repetition)
        for token in history:
            counts[token] = 0
    if frequency != 0.0 or presence != 0.0:
        for token in history[num_prompt_tokens:]:
            counts[token] += 1
        for token in history[num_prompt_tokens:]:
            if counts[token] > 0:
                value = np.float64(row[token])
                row[token] = _bounded(value, value - frequency * counts[token] - presence)
                counts[token] = 0


@kernel
def _bounded(before: float, after: float) -> np.float32:
    return np.float32(before if np.isinf(before) else min(max(after, -_LARGEST_FLOAT32), _LARGEST_FLOAT32))


@kernel
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
