"""The order of admission: strictly by arrival. A sequence that comes back after a preemption takes its old place.

Not its job: whether the first one fits (scheduler). Invariant: each waiting sequence is in it exactly once.
"""

from __future__ import annotations

import heapq

from kvpilot_engine.core.sequence import Sequence


class WaitingQueue:
    """Heap by arrival. Removal from the middle is lazy, so that its cost does not grow with the queue."""

    def __init__(self) -> None:
        self._arrivals: list[int] = []
        self._members: dict[int, Sequence] = {}
        self._num_swapped_out = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_swapped_out(self) -> int:
        """Members that wait after a preemption."""
        return self._num_swapped_out

    def add(self, sequence: Sequence) -> None:
        assert sequence.arrival not in self._members, f"{sequence.request_id} is already waiting"
        self._members[sequence.arrival] = sequence
        self._num_swapped_out += sequence.num_preemptions > 0
        heapq.heappush(self._arrivals, sequence.arrival)

    def first(self) -> Sequence | None:
        """The next in order, which stays in the queue."""
        while self._arrivals and self._arrivals[0] not in self._members:
            heapq.heappop(self._arrivals)
        return self._members[self._arrivals[0]] if self._arrivals else None

    def remove(self, sequence: Sequence) -> None:
        del self._members[sequence.arrival]
        self._num_swapped_out -= sequence.num_preemptions > 0
        if len(self._arrivals) > 2 * len(self._members) + 16:
            # A first one that waits long must not let the places of those who gave up behind it pile up.
            self._arrivals = list(self._members)
            heapq.heapify(self._arrivals)
