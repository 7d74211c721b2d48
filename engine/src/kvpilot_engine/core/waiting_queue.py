"""The order of admission: by priority, then arrival. A sequence that comes back after a preemption takes its old place.

Not its job: whether the first one fits (scheduler). Invariant: each waiting sequence is in it exactly once.
"""

from __future__ import annotations

import heapq

from kvpilot_engine.core.sequence import Sequence


class WaitingQueue:
    """Heap by (priority, arrival). Removal from the middle is lazy, so that its cost does not grow with the queue."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
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
        heapq.heappush(self._places, sequence.place)

    def first(self) -> Sequence | None:
        """The next in order, which stays in the queue."""
        while self._places and self._places[0][1] not in self._members:
            heapq.heappop(self._places)
        return self._members[self._places[0][1]] if self._places else None

    def remove(self, sequence: Sequence) -> None:
        del self._members[sequence.arrival]
        self._num_swapped_out -= sequence.num_preemptions > 0
        if len(self._places) > 2 * len(self._members) + 16:
            # A first one that waits long must not let the places of those who gave up behind it pile up.
            self._places = [member.place for member in self._members.values()]
            heapq.heapify(self._places)
