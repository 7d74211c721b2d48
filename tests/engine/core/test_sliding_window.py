"""Blocks behind a sliding window: given away, never read, and the request may be longer than the pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_engine.core.capacity import ResizeState
from kvpilot_engine.core.ids import NULL_BLOCK, RequestId
from kvpilot_engine.errors import NeverFitsError
from kvpilot_engine.testing import (
    FakeModelRunner,
    OutputCollector,
    compute_expected_logprobs,
    compute_expected_tokens,
    make_engine_core,
    make_request,
)

WINDOW = 8


def test_a_table_keeps_positions_and_names_the_null_block_for_what_nobody_reads() -> None:
    runner = FakeModelRunner(block_size=4, window=WINDOW)
    engine = make_engine_core(runner, num_blocks=16, block_size=4, window=WINDOW, max_model_len=64)
    request = make_request("a", range(6), max_tokens=30)
    engine.add_request(request)
    collector = OutputCollector()
    collector.run(engine)
    assert collector.token_ids[request.request_id] == compute_expected_tokens(request, window=WINDOW)
    for plan in runner.plans:
        (scheduled,) = plan.scheduled
        first_read = max(0, scheduled.start_position - WINDOW + 1)
        num_unread = first_read // 4
        assert scheduled.block_ids[:num_unread] == (NULL_BLOCK,) * num_unread
        assert NULL_BLOCK not in scheduled.block_ids[num_unread:]
        assert len(scheduled.block_ids) == -(-scheduled.end_position // 4)


@pytest.mark.parametrize(("prompt", "output"), [(100, 30), (6, 120), (1, 127)])
def test_a_request_longer_than_the_pool_is_served(prompt: int, output: int) -> None:
    """A window of 8 and steps of 6 tokens hold 13 tokens, which lie in at most 5 blocks of 4."""
    engine = make_engine_core(num_blocks=5, block_size=4, window=WINDOW, max_num_batched_tokens=6, max_model_len=130)
    request = make_request("long", range(prompt), max_tokens=output, prompt_logprobs=0)
    engine.add_request(request)
    collector = OutputCollector()
    collector.run(engine)
    assert collector.token_ids[request.request_id] == compute_expected_tokens(request, window=WINDOW)
    assert collector.logprobs[request.request_id] == compute_expected_logprobs(request, window=WINDOW)


def test_a_pool_smaller_than_window_and_step_refuses_what_would_not_fit() -> None:
    engine = make_engine_core(num_blocks=4, block_size=4, window=WINDOW, max_num_batched_tokens=6, max_model_len=130)
    with pytest.raises(NeverFitsError, match="the whole KV cache holds 16"):
        engine.add_request(make_request("long", range(10), max_tokens=7))
    engine.add_request(make_request("short", range(10), max_tokens=6))
    assert engine.resize(3).state is ResizeState.REJECTED


def test_the_floor_of_a_resize_is_what_one_request_holds_at_a_time() -> None:
    engine = make_engine_core(num_blocks=9, block_size=4, window=WINDOW, max_num_batched_tokens=6, max_model_len=130)
    assert engine.resize(5).state is ResizeState.APPLIED
    assert engine.resize(4).state is ResizeState.REJECTED


def test_more_requests_run_at_once() -> None:
    counts = []
    for window in (None, WINDOW):
        runner = FakeModelRunner(block_size=4, window=window)
        engine = make_engine_core(runner, num_blocks=40, block_size=4, window=window, max_num_batched_tokens=16)
        for i in range(4):
            engine.add_request(make_request(f"r{i}", range(i * 100, i * 100 + 60), max_tokens=20))
        OutputCollector().run(engine)
        counts.append(max(len(plan.scheduled) for plan in runner.plans))
        assert engine.stats().num_preemptions_total == 0
    assert counts[0] < counts[1] == 4


def test_a_cached_prefix_is_found_and_what_lies_before_the_window_is_not_taken() -> None:
    runner = FakeModelRunner(block_size=4, window=WINDOW)
    engine = make_engine_core(runner, num_blocks=32, block_size=4, window=WINDOW, max_model_len=64)
    collector = OutputCollector()
    for name in ("first", "second"):
        request = make_request(name, range(41), max_tokens=3)
        engine.add_request(request)
        collector.run(engine)
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request, window=WINDOW)
    assert collector.final[RequestId("second")].num_cached_tokens == 40
    (plan,) = [plan for plan in runner.plans if plan.scheduled[0].start_position == 40 and plan.num_tokens == 1][:1]
    assert plan.scheduled[0].block_ids.count(NULL_BLOCK) == (40 - WINDOW + 1) // 4


def test_a_hit_in_the_smallest_pool_does_not_ask_for_more_than_there_is() -> None:
    """What is found in the cache is part of what one request holds at a time, not on top of it."""
    engine = make_engine_core(num_blocks=6, block_size=4, window=WINDOW, max_num_batched_tokens=6, max_model_len=130)
    collector = OutputCollector()
    for request in (make_request("first", range(23), max_tokens=1), make_request("second", range(60))):
        engine.add_request(request)
        collector.run(engine)
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request, window=WINDOW)
    assert collector.final[RequestId("second")].num_cached_tokens == 20


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=8),
    window=st.integers(1, 30),
    budget=st.integers(1, 20),
    spare_blocks=st.integers(0, 8),
    caching=st.booleans(),
    preempt_every=st.sampled_from([0, 3]),
)
def test_everybody_gets_its_own_tokens_in_any_pool_that_holds_one(
    shapes: list[tuple[int, int]], window: int, budget: int, spare_blocks: int, caching: bool, preempt_every: int
) -> None:
    num_blocks = -(-(window - 1 + budget) // 4) + 1 + spare_blocks
    engine = make_engine_core(
        num_blocks=num_blocks,
        block_size=4,
        window=window,
        max_num_batched_tokens=budget,
        max_model_len=90,
        enable_prefix_caching=caching,
        preempt_every=preempt_every,
    )
    requests = [
        make_request(
            f"r{i}", range(i % 3, i % 3 + prompt), max_tokens=output, prompt_logprobs=0 if i % 4 == 3 else None
        )
        for i, (prompt, output) in enumerate(shapes)
    ]
    for request in requests:
        engine.add_request(request)
    collector = OutputCollector()
    collector.run(engine)
    for request in requests:
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request, window=window)
        assert collector.logprobs[request.request_id] == compute_expected_logprobs(request, window=window)
    assert engine.stats().num_blocks_used == 0
