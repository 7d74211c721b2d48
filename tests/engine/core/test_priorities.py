"""Priorities: who is admitted first, who gives up blocks first, and that everybody gets through."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.preemption import choose_victim
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.sequence import Sequence
from kvpilot_engine.testing import (
    FakeModelRunner,
    OutputCollector,
    compute_expected_tokens,
    make_engine_core,
    make_request,
    make_sequence,
)


def distinct(request_id: str, num_tokens: int, *, priority: int, max_tokens: int = 4) -> GenerationRequest:
    first = sum(request_id.encode()) * 1000
    return make_request(request_id, range(first, first + num_tokens), max_tokens=max_tokens, priority=priority)


def run(engine: EngineCore, requests: list[GenerationRequest], *, late: list[GenerationRequest] | None = None) -> None:
    """Everybody to the end; `late` arrive when the others have had a step."""
    collector = OutputCollector()
    for request in requests:
        engine.add_request(request)
    collector.take(engine.step())
    for request in late or []:
        engine.add_request(request)
    collector.run(engine)
    for request in requests + (late or []):
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request)


def started(runner: FakeModelRunner) -> list[str]:
    return [s.request_id for plan in runner.plans for s in plan.scheduled if s.start_position == 0]


def test_lower_numbers_are_admitted_first_and_equals_by_arrival() -> None:
    runner = FakeModelRunner()
    engine = make_engine_core(runner, max_num_seqs=1)
    requests = [
        distinct(name, 3, priority=priority) for name, priority in (("a", 1), ("b", 0), ("c", -2), ("d", 0), ("e", 1))
    ]
    run(engine, requests)
    assert started(runner) == ["c", "b", "d", "a", "e"]


def test_a_better_request_that_waits_does_not_stop_one_that_runs() -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(runner, num_blocks=8, block_size=4, max_model_len=32)
    first = distinct("low", 20, priority=9, max_tokens=10)
    run(engine, [first], late=[distinct("high", 20, priority=0)])
    assert engine.stats().num_preemptions_total == 0
    assert started(runner) == ["low", "high"]


def test_nobody_overtakes_a_better_one_that_does_not_fit_yet() -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(runner, num_blocks=12, block_size=4, max_model_len=48)
    late = [distinct("big", 40, priority=0), distinct("tiny", 2, priority=1)]
    run(engine, [distinct("running", 20, priority=5)], late=late)
    assert started(runner) == ["running", "big", "tiny"]


def make_running(shapes: list[tuple[int, int, int]]) -> list[Sequence]:
    """One running sequence per (priority, computed tokens, preemptions), in order of arrival."""
    running = []
    for arrival, (priority, num_tokens, num_preemptions) in enumerate(shapes):
        request = make_request(f"r{arrival}", range(100), priority=priority)
        sequence = make_sequence(request, arrival=arrival)
        sequence.start(num_cached_tokens=num_tokens)
        sequence.num_preemptions = num_preemptions
        running.append(sequence)
    return running


@pytest.mark.parametrize(
    ("shapes", "needy", "expected"),
    [
        ([(1, 90, 0), (0, 1, 0)], 1, 0),
        ([(1, 90, 0), (0, 1, 0)], 0, 0),
        ([(0, 1, 0), (2, 90, 0), (1, 1, 0)], 0, 1),
        ([(2, 9, 0), (2, 5, 0), (2, 7, 0), (2, 6, 0), (0, 1, 0)], 4, 3),
        ([(2, 9, 0), (2, 5, 3), (2, 7, 3), (2, 6, 3), (0, 1, 0)], 4, 0),
        ([(2, 9, 3), (0, 1, 0)], 1, 0),
        ([(2, 9, 3), (2, 8, 3), (0, 1, 0)], 0, None),
        ([(0, 1, 0), (0, 2, 0)], 1, 1),
    ],
    ids=[
        "the worse one pays, though it came first and has more work",
        "the worse one gives up its own",
        "the worst of three",
        "least work in the younger half of the worst",
        "one that was spared less",
        "a better one takes from the spared",
        "a spared one does not take from its equals",
        "among the best as before",
    ],
)
def test_victim(shapes: list[tuple[int, int, int]], needy: int, expected: int | None) -> None:
    running = make_running(shapes)
    victim = choose_victim(running, running[needy])
    assert (None if victim is None else victim.arrival) == expected


def test_a_better_request_is_never_preempted_for_a_worse_one() -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(runner, num_blocks=14, block_size=4, max_model_len=40)
    requests = [distinct(f"low{i}", 4, priority=1, max_tokens=30) for i in range(3)]
    requests += [distinct(f"high{i}", 4, priority=0, max_tokens=30) for i in range(2)]
    run(engine, requests)
    preempted = [preemption.request_id for plan in runner.plans for preemption in plan.preempted]
    assert preempted
    running: dict[str, bool] = {}
    for plan in runner.plans:
        for preemption in plan.preempted:
            running.pop(preemption.request_id, None)
            if preemption.request_id.startswith("high"):
                assert not any(name.startswith("low") for name in running)
        running.update({s.request_id: True for s in plan.scheduled})
