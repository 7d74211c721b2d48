"""The waiting queue: admission by arrival, whatever happened in between."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_engine.core.sequence import Sequence
from kvpilot_engine.core.waiting_queue import WaitingQueue
from kvpilot_engine.testing import make_request, make_sequence


def make_waiting(arrival: int) -> Sequence:
    return make_sequence(make_request(f"r{arrival}"), arrival=arrival)


def test_a_sequence_that_comes_back_takes_its_old_place() -> None:
    queue = WaitingQueue()
    sequences = [make_waiting(i) for i in range(4)]
    for sequence in sequences:
        queue.add(sequence)
    queue.remove(sequences[0])
    queue.remove(sequences[1])
    assert queue.first() is sequences[2]
    sequences[1].num_preemptions = 1
    queue.add(sequences[1])
    assert queue.first() is sequences[1]
    assert queue.num_swapped_out == 1
    queue.remove(sequences[1])
    assert queue.num_swapped_out == 0
    assert queue.first() is sequences[2]


def test_an_id_that_is_used_again_is_another_sequence() -> None:
    queue = WaitingQueue()
    gone, other, again = (make_sequence(make_request("same"), arrival=0), make_waiting(1), make_waiting(2))
    queue.add(gone)
    queue.add(other)
    queue.remove(gone)
    queue.add(again)
    assert queue.first() is other


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200))
def test_first_is_always_the_earliest_member(operations: list[tuple[int, bool]]) -> None:
    queue = WaitingQueue()
    sequences = [make_waiting(i) for i in range(10)]
    members: set[int] = set()
    for arrival, adds in operations:
        if adds and arrival not in members:
            queue.add(sequences[arrival])
            members.add(arrival)
        elif not adds and arrival in members:
            queue.remove(sequences[arrival])
            members.discard(arrival)
        first = queue.first()
        assert (None if first is None else first.arrival) == min(members, default=None)
        assert len(queue) == len(members)


def test_places_of_those_who_gave_up_do_not_pile_up_behind_a_patient_first() -> None:
    queue = WaitingQueue()
    queue.add(make_waiting(0))
    for arrival in range(1, 1000):
        sequence = make_waiting(arrival)
        queue.add(sequence)
        queue.remove(sequence)
    assert len(queue._places) < 50
