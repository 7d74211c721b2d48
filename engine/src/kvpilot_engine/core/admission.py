"""How much room stays free when one more sequence is admitted. Pure arithmetic; who is next is the queue's question."""

from __future__ import annotations

from collections.abc import Callable

RESERVED_OUTPUT_SHARE = 4
"""One in so many of the output blocks still to come stays free at admission: enough for the sequences that end early,
not so much that blocks lie idle (docs/lab-notes.md compares)."""

ReserveRule = Callable[[int, int], int]


def compute_reserve(num_running: int, num_outstanding: int) -> int:
    """Blocks to leave free beside the candidate's own.

    `num_outstanding`: the blocks that those who run and the candidate will still take if all go on to max_tokens.
    """
    return max(num_running + 1, -(-num_outstanding // RESERVED_OUTPUT_SHARE))
