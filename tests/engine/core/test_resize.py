"""The cap: blocks are held out of the pool while the engine serves."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.capacity import ResizeResult, ResizeState
from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.testing import (
    OutputCollector,
    compute_expected_tokens,
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


def test_growing_is_immediate_and_shrinking_waits_for_blocks_in_use() -> None:
    engine = make_engine_core(num_blocks=16, block_size=4, max_model_len=32)
    assert engine.resize(10) == ResizeResult(ResizeState.APPLIED)
    assert engine.stats().num_blocks_total == 10
    assert engine.resize(16) == ResizeResult(ResizeState.APPLIED)
    requests = [make_request(f"r{i}", range(i * 100, i * 100 + 20), max_tokens=4) for i in range(2)]
    add_all(engine, requests)
    collector = OutputCollector()
    collector.take(engine.step())
    assert engine.stats().num_blocks_used == 10
    assert engine.resize(8) == ResizeResult(ResizeState.DEFERRED, num_blocks_to_go=2)
    assert engine.num_blocks_to_go == 2
    collector.run(engine)
    assert all(collector.token_ids[r.request_id] == compute_expected_tokens(r) for r in requests)
    assert engine.num_blocks_to_go == 0
    stats = engine.stats()
    assert (stats.num_blocks_total, stats.num_blocks_held_out) == (8, 8)


@pytest.mark.parametrize(("usable_blocks", "numbers"), [(7, ("7", "8", "32")), (0, ("0", "8")), (17, ("17", "16"))])
def test_a_cap_out_of_bounds_is_rejected_with_the_numbers(usable_blocks: int, numbers: tuple[str, ...]) -> None:
    engine = make_engine_core(num_blocks=16, block_size=4, max_model_len=32)
    result = engine.resize(usable_blocks)
    assert result.state is ResizeState.REJECTED
    assert all(number in result.reason for number in numbers)
    assert engine.stats().num_blocks_total == 16


def test_a_deferred_cap_already_bounds_what_the_door_takes() -> None:
    engine = make_engine_core(num_blocks=16, block_size=4, max_model_len=40)
    engine.add_request(make_request("a", range(36), max_tokens=4))
    engine.add_request(make_request("b", range(100, 120), max_tokens=4))
    engine.step()
    assert engine.resize(10).state is ResizeState.DEFERRED
    engine.add_request(make_request("c", range(36), max_tokens=4))
    assert len(run(engine).final) == 3


def test_an_abort_lets_a_deferred_cap_take_effect_at_once() -> None:
    engine = make_engine_core(num_blocks=16, block_size=4, max_model_len=32)
    add_all(engine, [make_request(f"r{i}", range(i * 100, i * 100 + 20)) for i in range(2)])
    engine.step()
    assert engine.resize(8).state is ResizeState.DEFERRED
    engine.abort(RequestId("r0"))
    engine.check_invariants()
    assert engine.num_blocks_to_go == 0
    assert engine.stats().num_blocks_total == 8
