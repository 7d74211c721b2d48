"""Log-probabilities through the core: each token asked for once, whatever chunks, preemptions and failures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.scheduler_output import FinishReason, ModelRunnerOutput, SchedulerOutput
from kvpilot_engine.errors import DeviceOutOfMemoryError, NeverFitsError, OOMCause, OOMPhase
from kvpilot_engine.testing import (
    FakeModelRunner,
    OutputCollector,
    compute_expected_logprobs,
    compute_expected_tokens,
    make_engine_core,
    make_request,
)


def run(engine: EngineCore) -> OutputCollector:
    collector = OutputCollector()
    collector.run(engine)
    return collector


@pytest.mark.parametrize("budget", [1, 3, 5, 64])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 13])
def test_each_token_of_the_prompt_but_the_first_is_reported_once_and_in_order(budget: int, num_tokens: int) -> None:
    engine = make_engine_core(block_size=4, max_num_batched_tokens=budget)
    request = make_request("a", range(num_tokens), max_tokens=3, logprobs=2, prompt_logprobs=1)
    engine.add_request(request)
    collector = run(engine)
    assert collector.logprobs[request.request_id] == compute_expected_logprobs(request)
    assert len(collector.logprobs[request.request_id]) == num_tokens - 1 + 3


def test_nothing_is_reported_that_was_not_asked_for() -> None:
    runner = FakeModelRunner()
    engine = make_engine_core(runner)
    engine.add_request(make_request("a", range(9)))
    assert run(engine).logprobs[RequestId("a")] == ()
    assert all(s.prompt_targets == () for plan in runner.plans for s in plan.scheduled)


@pytest.mark.parametrize("budget", [3, 64])
def test_a_request_that_only_scores_its_prompt_ends_without_a_token(budget: int) -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(runner, block_size=4, max_num_batched_tokens=budget)
    request = make_request("a", range(9), max_tokens=0, prompt_logprobs=0)
    engine.add_request(request)
    collector = run(engine)
    final = collector.final[request.request_id]
    assert (final.finish_reason, final.num_output_tokens) == (FinishReason.LENGTH, 0)
    assert collector.token_ids[request.request_id] == ()
    assert collector.logprobs[request.request_id] == compute_expected_logprobs(request)
    assert not any(s.samples for plan in runner.plans for s in plan.scheduled)


def test_a_prompt_that_is_only_scored_may_fill_the_model_length() -> None:
    engine = make_engine_core(max_model_len=32)
    engine.add_request(make_request("a", range(32), max_tokens=0, prompt_logprobs=0))
    with pytest.raises(NeverFitsError, match="33 tokens; max_model_len is 32"):
        engine.add_request(make_request("b", range(33), max_tokens=0, prompt_logprobs=0))
    assert len(run(engine).logprobs[RequestId("a")]) == 31


def test_scoring_computes_the_whole_prompt_and_is_no_query_of_the_prefix_cache() -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(runner, block_size=4)
    engine.add_request(make_request("first", range(13)))
    run(engine)
    before = engine.stats()
    request = make_request("scored", range(13), prompt_logprobs=0)
    engine.add_request(request)
    collector = run(engine)
    assert collector.final[request.request_id].num_cached_tokens == 0
    assert collector.logprobs[request.request_id] == compute_expected_logprobs(request)
    after = engine.stats()
    assert after.num_prefix_queries_total == before.num_prefix_queries_total
    assert after.num_prefix_hits_total == before.num_prefix_hits_total
    engine.add_request(make_request("third", range(13)))
    assert run(engine).final[RequestId("third")].num_cached_tokens == 12


@settings(deadline=None, max_examples=80)
@given(
    prompts=st.lists(st.integers(1, 24), min_size=2, max_size=5),
    budget=st.integers(1, 12),
    caching=st.booleans(),
    oom_every=st.integers(2, 9),
)
def test_preemptions_and_dropped_steps_neither_lose_nor_repeat_one(
    prompts: list[int], budget: int, caching: bool, oom_every: int
) -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(
        runner,
        num_blocks=12,
        block_size=4,
        enable_prefix_caching=caching,
        max_num_batched_tokens=budget,
        max_model_len=48,
    )
    requests = [
        make_request(f"r{i}", range(i, i + length), max_tokens=20, logprobs=1, prompt_logprobs=2)
        for i, length in enumerate(prompts)
    ]
    for request in requests:
        engine.add_request(request)
    collector = OutputCollector()
    step = 0
    while engine.has_work:
        step += 1
        assert step < 2000
        if step % oom_every == 0:
            runner.failures.append(DeviceOutOfMemoryError("no memory", phase=OOMPhase.DECODE, cause=OOMCause.OWN))
            with pytest.raises(DeviceOutOfMemoryError):
                engine.step()
        else:
            collector.take(engine.step())
        engine.check_invariants()
    for request in requests:
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request)
        assert collector.logprobs[request.request_id] == compute_expected_logprobs(request)


class ForgetfulRunner(FakeModelRunner):
    """Leaves one kind of log-probabilities out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute(plan)
        if self._kind == "prompt":
            return ModelRunnerOutput(result.sampled, result.logprobs)
        return ModelRunnerOutput(result.sampled, prompt_logprobs=result.prompt_logprobs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("prompt", "log-probabilities of 0 prompt tokens of a; 2 were asked for"),
        ("output", "no log-probability for a"),
    ],
)
def test_a_result_without_what_was_asked_for_is_an_error(kind: str, message: str) -> None:
    engine = make_engine_core(ForgetfulRunner(kind))
    engine.add_request(make_request("a", range(3), logprobs=0, prompt_logprobs=0))
    final = run(engine).final[RequestId("a")]
    assert final.finish_reason is FinishReason.ERROR
    assert message in final.message


def test_a_sequence_with_unusable_logits_ends_alone_and_leaves_no_prefix_of_that_step() -> None:
    runner = FakeModelRunner(block_size=4)
    engine = make_engine_core(runner, block_size=4)
    runner.unusable.add(RequestId("a"))
    other = make_request("b", range(50, 60))
    engine.add_request(make_request("a", range(9)))
    engine.add_request(other)
    collector = run(engine)
    final = collector.final[RequestId("a")]
    assert (final.finish_reason, final.message) == (FinishReason.ERROR, "the logits are not finite")
    assert collector.token_ids[other.request_id] == compute_expected_tokens(other)
    engine.add_request(make_request("again", range(9)))
    assert run(engine).final[RequestId("again")].num_cached_tokens == 0
