"""Advice on the block size: equal to what the engine really held, over a rolling window."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_engine.core.block_size_advice import CANDIDATES, LENGTH_BUCKETS, BlockSizeAdvisor
from kvpilot_engine.testing import FakeModelRunner, OutputCollector, make_engine_core, make_request

LENGTHS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 200)), min_size=1, max_size=5)


@given(LENGTHS, st.integers(1, 256))
def test_costs_are_those_of_counting_step_by_step(requests: list[tuple[int, int]], present: int) -> None:
    advisor = BlockSizeAdvisor(present)
    for prompt, output in requests:
        advisor.note(prompt, output)
    advice = advisor.advise()
    held = [length for prompt, output in requests for length in range(prompt, prompt + output)]
    for cost in (advice.present, *advice.candidates):
        blocks = [-(-length // cost.block_size) for length in held]
        wasted = sum(blocks) * cost.block_size - sum(held)
        assert cost.wasted_tokens == pytest.approx(wasted / len(held))
        assert cost.waste_ratio == pytest.approx(wasted / (sum(blocks) * cost.block_size))
        assert cost.table_len == pytest.approx(sum(blocks) / len(held))
    assert advice.present.block_size == present
    assert advice.saved_tokens == pytest.approx(advice.present.wasted_tokens - advice.recommended.wasted_tokens)


@given(LENGTHS, LENGTHS)
def test_only_the_newest_requests_count(old: list[tuple[int, int]], new: list[tuple[int, int]]) -> None:
    rolling = BlockSizeAdvisor(16, max_requests=len(new))
    fresh = BlockSizeAdvisor(16)
    for lengths in old + new:
        rolling.note(*lengths)
    for lengths in new:
        fresh.note(*lengths)
    assert rolling.advise() == fresh.advise()


def test_long_requests_may_have_large_blocks_and_short_ones_get_small_ones() -> None:
    sizes = []
    for prompt in (4, 100, 600, 20_000):
        advisor = BlockSizeAdvisor(16)
        advisor.note(prompt, 64)
        sizes.append(advisor.advise().recommended.block_size)
    assert sizes == [8, 8, 16, 128]


def test_lengths_are_counted_by_bucket() -> None:
    advisor = BlockSizeAdvisor(16)
    for prompt, output in ((16, 1), (17, 40), (200_000, 5)):
        advisor.note(prompt, output)
    advice = advisor.advise()
    assert advice.num_requests == 3
    assert [advice.prompt_lengths[0], advice.prompt_lengths[1], advice.prompt_lengths[-1]] == [1, 1, 1]
    assert [advice.output_lengths[0], advice.output_lengths[2]] == [2, 1]
    assert len(advice.prompt_lengths) == len(LENGTH_BUCKETS) + 1


def test_without_traffic_the_present_size_stays() -> None:
    advice = BlockSizeAdvisor(24).advise()
    assert advice.recommended == advice.present
    assert (advice.present.block_size, advice.num_requests) == (24, 0)
    BlockSizeAdvisor(24).note(5, 0)


def measure_waste(block_size: int, requests: list[tuple[int, int]]) -> tuple[float, int]:
    """The trace through the engine: slots without a token ÷ slots held, over all steps, and the size recommended."""
    runner = FakeModelRunner(block_size=block_size)
    engine = make_engine_core(
        runner,
        num_blocks=24_000 // block_size,
        block_size=block_size,
        enable_prefix_caching=False,
        max_num_batched_tokens=4096,
        max_model_len=4096,
    )
    for i, (prompt, output) in enumerate(requests):
        engine.add_request(make_request(f"r{i}", range(i, i + prompt), max_tokens=output))
    OutputCollector().run(engine)
    samplings = [s for plan in runner.plans for s in plan.scheduled if s.samples]
    num_slots = sum(len(s.block_ids) for s in samplings) * block_size
    advice = engine.stats().block_size_advice
    waste = 1 - sum(s.end_position for s in samplings) / num_slots
    assert engine.stats().num_preemptions_total == 0
    assert advice.present.waste_ratio == pytest.approx(waste)
    return waste, advice.recommended.block_size


def test_a_mixed_trace_wastes_less_than_four_percent_at_the_recommended_size() -> None:
    """Prompts of 128, 512 and 2,048 tokens, a little more or less, with the outputs of a chat."""
    source = random.Random(11)
    requests = [
        (source.choice((128, 512, 2048)) + source.randrange(-20, 21), source.randrange(16, 128)) for _ in range(24)
    ]
    _, recommended = measure_waste(16, requests)
    assert recommended in CANDIDATES
    waste, again = measure_waste(recommended, requests)
    assert again == recommended
    assert 0.005 < waste < 0.04
