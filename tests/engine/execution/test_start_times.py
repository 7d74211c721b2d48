"""The parts of a start in one line."""

from __future__ import annotations

from kvpilot_engine.execution.start_times import StartTimes


def test_parts_are_added_and_told_in_the_order_of_their_end() -> None:
    moments = iter([0.0, 1.0, 1.5, 2.0, 4.0, 5.0, 5.25, 6.0])
    times = StartTimes(lambda: next(moments))
    with times.part("imports"):
        pass
    with times.part("weights"):
        pass
    with times.part("imports"):
        pass
    assert times.describe() == "loaded in 6.0 s: imports 0.8, weights 2.0"
