"""The most memory that sampling takes beside the logits themselves."""

from __future__ import annotations

_ROWS = 6
"""Float64 rows of the vocabulary for the sequence in hand: weights, sums, sorted copies, ids."""
_PROCESSED_BYTES = 16 * 2**20
"""Copies of rows with penalties, masks or biases, made in chunks of this size."""


def sampler_bound_bytes(vocab_size: int) -> int:
    return _ROWS * vocab_size * 8 + max(_PROCESSED_BYTES, 4 * vocab_size)
