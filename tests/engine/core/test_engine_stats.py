"""EngineStats: honest at every moment, nothing left over from the last step."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.errors import (
    DeviceOutOfMemoryError,
    OOMCause,
    OOMPhase,
)
from kvpilot_engine.testing import (
    FakeModelRunner,
    OutputCollector,
    make_engine_core,
    make_request,
)


def add_all(engine: EngineCore, requests: list[GenerationRequest]) -> None:
    for request in requests:
        engine.add_request(request)


def run(engine: EngineCore) -> OutputCollector:
    collector = OutputCollector()
    collector.run(engine)
    return collector


def make_oom() -> DeviceOutOfMemoryError:
    return DeviceOutOfMemoryError("no memory", phase=OOMPhase.DECODE, cause=OOMCause.OWN)


def test_stats_are_zero_at_the_first_look_after_everything_was_aborted() -> None:  # D6
    engine = make_engine_core(num_blocks=8, max_model_len=128)
    for i in range(10):
        engine.add_request(make_request(f"r{i}", range(i, i + 60), max_tokens=60))
    for _ in range(3):
        engine.step()
    before = engine.stats()
    assert before.num_running > 0
    assert before.num_waiting_capacity > 0
    assert before.kv_usage_ratio >= 0.5
    for i in range(10):
        engine.abort(RequestId(f"r{i}"))
    after = engine.stats()
    assert (after.num_running, after.num_waiting_capacity, after.num_waiting_budget) == (0, 0, 0)
    assert (after.num_blocks_used, after.kv_usage_ratio, after.num_swapped_out) == (0, 0.0, 0)
    assert after.finished_total["abort"] == 10
    engine.check_invariants()


def test_usage_counts_blocks_of_live_requests_and_is_zero_when_idle_with_a_warm_cache() -> None:  # D16
    engine = make_engine_core(num_blocks=12, max_model_len=64)
    for i in range(3):
        engine.add_request(make_request(f"r{i}", range(i * 100, i * 100 + 17), max_tokens=8))
    engine.step()
    assert engine.stats().kv_usage_ratio == 6 / 12
    run(engine)
    idle = engine.stats()
    assert idle.kv_usage_ratio == 0
    assert idle.num_blocks_cached == 3
    assert idle.kv_cached_ratio == 3 / 12
    assert idle.num_blocks_free + idle.num_blocks_cached + idle.num_blocks_used == idle.num_blocks_total


def test_prefix_queries_and_hits_are_counted_once_per_request() -> None:
    engine = make_engine_core(block_size=4)
    for request_id in ("a", "b"):
        engine.add_request(make_request(request_id, range(9)))
        run(engine)
    stats = engine.stats()
    assert (stats.num_prefix_queries_total, stats.num_prefix_hits_total) == (18, 8)
    assert stats.num_prompt_tokens_total == 18
    assert stats.num_generation_tokens_total == 8


def test_an_admission_whose_plans_are_dropped_is_counted_once() -> None:
    runner = FakeModelRunner()
    engine = make_engine_core(runner)
    engine.add_request(make_request("a", range(20)))
    runner.failures.extend([make_oom(), make_oom()])
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemoryError):
            engine.step()
    assert engine.stats().num_prefix_queries_total == 0
    run(engine)
    assert engine.stats().num_prefix_queries_total == 20


@pytest.mark.parametrize(
    ("num_blocks", "budget", "expected"),
    [(4, 512, (1, 0)), (64, 16, (0, 1))],
    ids=["blocks are short", "the budget is used up"],
)
def test_waiting_says_what_it_waits_for(num_blocks: int, budget: int, expected: tuple[int, int]) -> None:
    engine = make_engine_core(num_blocks=num_blocks, max_num_batched_tokens=budget)
    add_all(engine, [make_request("a", range(40), max_tokens=4), make_request("b", range(100, 140), max_tokens=4)])
    engine.step()
    stats = engine.stats()
    assert (stats.num_waiting_capacity, stats.num_waiting_budget) == expected
    engine.abort(RequestId("a"))
    assert engine.stats().num_waiting_capacity == 0


def test_every_finish_reason_is_there_from_the_start() -> None:
    assert make_engine_core().stats().finished_total == {"stop": 0, "length": 0, "abort": 0, "error": 0}
