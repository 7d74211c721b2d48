"""Who gives up its blocks when the pool is full. Pure: looks at the running sequences, changes none.

The oldest is never a victim, so that there is always one that gets through; a sequence that was preempted
MAX_PREEMPTIONS times is spared, so that bad luck does not pile up on one request.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpilot_engine.core.sequence import Sequence

MAX_PREEMPTIONS = 3
"""Preemptions of one sequence, after which only the oldest may still take its blocks."""


def choose_victim(running: Iterable[Sequence], needy: Sequence) -> Sequence | None:
    """The sequence to preempt so that `needy` gets a block (it may be itself), or None when it has to wait.

    Least computed work in the younger half goes first: it is the cheapest to compute again, and the older half is
    nearest to giving its blocks back by itself.
    """
    by_arrival = sorted(running, key=lambda sequence: sequence.arrival)
    younger_half = by_arrival[max(1, len(by_arrival) // 2) :]
    others = by_arrival[1:]
    candidates = (
        [sequence for sequence in younger_half if sequence.num_preemptions < MAX_PREEMPTIONS]
        or [sequence for sequence in others if sequence.num_preemptions < MAX_PREEMPTIONS]
        # All are spared. One that is not the oldest can wait; if the oldest did too, nothing would ever move.
        or (others if needy is by_arrival[0] else [])
    )
    return min(candidates, key=lambda sequence: (sequence.num_computed_tokens, -sequence.arrival), default=None)
