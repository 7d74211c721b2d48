"""Preemption when there is room changes no output; choices of one call survive it with their shared blocks."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.testing import (
    FakeModelRunner,
    OutputCollector,
    compute_expected_logprobs,
    compute_expected_tokens,
    make_engine_core,
    make_grammar,
    make_request,
)


def make_requests() -> list[GenerationRequest]:
    return [
        make_request(
            f"r{i}",
            range(i % 3, i % 3 + 5 + 7 * i),
            max_tokens=12,
            logprobs=1,
            prompt_logprobs=1 if i % 3 == 0 else None,
            grammar=make_grammar(30, range(20)) if i % 2 else None,
            priority=i % 2,
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("every", [1, 2, 7])
@pytest.mark.parametrize("caching", [True, False])
def test_outputs_are_the_same(every: int, caching: bool) -> None:
    engine = make_engine_core(
        block_size=4, max_num_batched_tokens=24, enable_prefix_caching=caching, preempt_every=every
    )
    requests = make_requests()
    for request in requests:
        engine.add_request(request)
    collector = OutputCollector()
    collector.run(engine)
    for request in requests:
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request)
        assert collector.logprobs[request.request_id] == compute_expected_logprobs(request)
    assert engine.stats().num_preemptions_total > 0


def test_by_default_nobody_is_preempted_while_there_is_room() -> None:
    engine = make_engine_core()
    for request in make_requests():
        engine.add_request(request)
    OutputCollector().run(engine)
    assert engine.stats().num_preemptions_total == 0


@pytest.mark.parametrize(("num_blocks", "every"), [(18, 0), (64, 3), (18, 3)])
def test_all_choices_come_back_and_share_their_prompt_through_preemptions(num_blocks: int, every: int) -> None:  # A5
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(
        runner, num_blocks=num_blocks, block_size=4, max_model_len=64, max_num_batched_tokens=32, preempt_every=every
    )
    requests = [
        make_request(f"r{call}.{choice}", range(call * 100, call * 100 + 13), max_tokens=18, choice=choice)
        for call in range(4)
        for choice in range(4)
    ]
    for request in requests:
        engine.add_request(request)
    collector = OutputCollector()
    most_shared = 0
    while engine.has_work:
        collector.take(engine.step())
        engine.check_invariants()  # reference counts against the tables of all that run
        tables = [s.block_table.block_ids for s in engine._scheduler._running.values()]
        most_shared = max([most_shared, *Counter(block for table in tables for block in table).values()])
    assert engine.stats().num_preemptions_total > 0
    assert len(collector.final) == 16
    for request in requests:
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request)
    assert most_shared >= 3
    assert engine.stats().num_blocks_used == 0
