"""Who gives up its blocks when the pool is full. Pure: looks at the running sequences, changes none.

The worst priority that runs pays first. The first of the best priority is never a victim, so that there is always one
that gets through; a sequence that was preempted MAX_PREEMPTIONS times is spared by its equals, so that bad luck does
not pile up on one request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvpilot_engine.core.sequence import Sequence

MAX_PREEMPTIONS = 3
"""Preemptions of one sequence, after which only the first of all or one of a better priority may take its blocks."""
VictimRule = Callable[[Collection[Sequence], Sequence], Sequence | None]


def choose_victim(running: Collection[Sequence], needy: Sequence) -> Sequence | None:
    """The sequence to preempt so that `needy` gets a block (it may be itself), or None when it has to wait.

    Least computed work in the younger half goes first: it is the cheapest to compute again, and the older half is
    nearest to giving its blocks back by itself.
    """
    worst = max(sequence.request.priority for sequence in running)
    group = sorted((s for s in running if s.request.priority == worst), key=lambda sequence: sequence.arrival)
    num_safe = 1 if len(group) == len(running) else 0
    others = group[num_safe:]
    younger_half = group[max(num_safe, len(group) // 2) :]
    candidates = (
        [sequence for sequence in younger_half if sequence.num_preemptions < MAX_PREEMPTIONS]
        or [sequence for sequence in others if sequence.num_preemptions < MAX_PREEMPTIONS]
        # All are spared. One of them can wait; if one that may never be a victim for them did too, nothing would move.
        or (others if needy not in others else [])
    )
    return min(candidates, key=lambda sequence: (sequence.num_computed_tokens, -sequence.arrival), default=None)
