"""Who gives up its blocks."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.preemption import choose_victim
from kvpilot_engine.core.sequence import Sequence
from kvpilot_engine.testing import make_request, make_sequence


def make_running(computed: list[int], preemptions: list[int] | None = None) -> list[Sequence]:
    """One running sequence per number of computed tokens, in order of arrival."""
    running = []
    for arrival, num_tokens in enumerate(computed):
        sequence = make_sequence(make_request(f"r{arrival}", range(100)), arrival=arrival)
        sequence.start(num_cached_tokens=num_tokens)
        sequence.num_preemptions = preemptions[arrival] if preemptions else 0
        running.append(sequence)
    return running


@pytest.mark.parametrize(
    ("computed", "preemptions", "needy", "expected"),
    [
        ([5], None, 0, None),
        ([1, 9], None, 0, 1),
        ([1, 9], None, 1, 1),
        ([1, 2, 9, 8], None, 0, 3),
        ([1, 2, 8, 9], None, 0, 2),
        ([1, 2, 8, 8], None, 0, 3),
        ([1, 2, 8, 9], [0, 0, 3, 0], 0, 3),
        ([1, 2, 8, 9], [0, 0, 3, 3], 0, 1),
        ([1, 2, 8, 9], [0, 3, 3, 3], 0, 1),
        ([1, 2, 8, 9], [0, 3, 3, 3], 2, None),
        ([1, 2, 8, 9], [3, 3, 3, 3], 3, None),
    ],
    ids=[
        "alone: nobody",
        "never the oldest, though it has least work",
        "the needy one itself",
        "least work in the younger half",
        "least work, not youngest",
        "of equal work the youngest",
        "one that was preempted three times is spared",
        "the older half when the younger is spared",
        "the oldest may take from the spared",
        "one that is not the oldest waits",
        "also for its own sake",
    ],
)
def test_victim(computed: list[int], preemptions: list[int] | None, needy: int, expected: int | None) -> None:
    running = make_running(computed, preemptions)
    victim = choose_victim(running[::-1], running[needy])
    assert (None if victim is None else victim.arrival) == expected
