"""Whatever comes in whatever order: the bookkeeping adds up, and every request gets its own tokens and one end."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpilot_engine.core.capacity import ResizeState
from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.scheduler_output import FinishReason
from kvpilot_engine.errors import (
    DeviceOutOfMemoryError,
    ModelExecutionError,
    NeverFitsError,
    OOMCause,
    OOMPhase,
    OverloadedError,
)
from kvpilot_engine.testing import (
    FakeModelRunner,
    OutputCollector,
    compute_expected_logprobs,
    compute_expected_tokens,
    make_engine_core,
    make_grammar,
    make_request,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 14
MAX_MODEL_LEN = 36


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, aborts, resizes and failing steps on a pool that holds one and a half long requests."""

    @initialize(
        budget=st.integers(1, 40),
        seqs=st.integers(1, 6),
        caching=st.booleans(),
        window=st.none() | st.integers(1, 20),
        preempt_every=st.sampled_from([0, 0, 1, 2, 5]),
    )
    def start(self, budget: int, seqs: int, caching: bool, window: int | None, preempt_every: int) -> None:
        self.window = window
        self.runner = FakeModelRunner(block_size=BLOCK_SIZE, window=window)
        self.engine = make_engine_core(
            self.runner,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_queue_len=12,
            window=window,
            preempt_every=preempt_every,
        )
        self.collector = OutputCollector()
        self.requests: dict[RequestId, GenerationRequest] = {}
        self.target = NUM_BLOCKS
        self.budget = budget

    @rule(
        prompt_len=st.integers(1, 4) | st.integers(1, MAX_MODEL_LEN),
        first=st.integers(0, 2),
        max_tokens=st.integers(1, 8) | st.integers(20, 35),
        salt=st.sampled_from(["", "", "s"]),
        stop=st.integers(0, 999),
        min_tokens=st.sampled_from([0, 0, 1, 3]),
        priority=st.sampled_from([0, 0, 0, -1, 5]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        only_scores=st.sampled_from([False, False, False, True]),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
        residues=st.sampled_from([(), (), (1, 0, 4, 2), range(18)]),
        choices=st.sampled_from([1, 1, 1, 4]),
    )
    def arrive(
        self,
        prompt_len: int,
        first: int,
        max_tokens: int,
        salt: str,
        stop: int,
        min_tokens: int,
        priority: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        only_scores: bool,
        repetition_penalty: float,
        residues: Iterable[int],
        choices: int,
    ) -> None:
        """Prompts have one of three beginnings, so that prefixes are shared."""
        if only_scores:
            max_tokens, prompt_logprobs = 0, 1
        for choice in range(choices):
            self.add(
                make_request(
                    f"r{len(self.requests)}",
                    range(first, first + prompt_len),
                    max_tokens=max_tokens,
                    cache_salt=salt,
                    stop_token_ids=range(stop, stop + 20),
                    min_tokens=min(min_tokens, max_tokens),
                    priority=priority,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    repetition_penalty=repetition_penalty,
                    grammar=make_grammar(20, residues) if residues else None,
                    choice=choice,
                )
            )

    def add(self, request: GenerationRequest) -> None:
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        try:
            self.engine.add_request(request)
        except NeverFitsError:
            assert num_tokens > min(MAX_MODEL_LEN, self.target * BLOCK_SIZE)
        except OverloadedError:
            assert self.engine.stats().num_waiting_capacity + self.engine.stats().num_waiting_budget == 12
        else:
            assert num_tokens <= MAX_MODEL_LEN
            assert num_tokens <= self.target * BLOCK_SIZE or self.window is not None
            self.requests[request.request_id] = request

    @rule(num_steps=st.integers(1, 4) | st.integers(10, 30))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            num_plans = len(self.runner.plans)
            had_work = self.engine.has_work
            outputs = self.engine.step()
            self.collector.take(outputs)
            self.engine.check_invariants()
            assert len(self.runner.plans) > num_plans or outputs or not had_work, "nothing scheduled, nothing ended"
            if self.runner.plans:
                plan = self.runner.plans[-1]
                assert not {p.request_id for p in plan.preempted} & {s.request_id for s in plan.scheduled}
                assert plan.num_tokens <= self.budget

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(self.requests.keys() - self.collector.final.keys())
        if live:
            output = self.engine.abort(data.draw(st.sampled_from(live)))
            assert output is not None
            self.collector.take([output])

    @rule(usable_blocks=st.integers(0, NUM_BLOCKS + 1))
    def resize(self, usable_blocks: int) -> None:
        result = self.engine.resize(usable_blocks)
        is_possible = -(-MAX_MODEL_LEN // BLOCK_SIZE) <= usable_blocks <= NUM_BLOCKS
        if result.state is ResizeState.REJECTED:
            assert not is_possible
        else:
            assert is_possible or (self.window is not None and usable_blocks <= NUM_BLOCKS)
            self.target = usable_blocks

    @rule()
    def run_out_of_device_memory(self) -> None:
        self.runner.failures.append(
            DeviceOutOfMemoryError("no memory", phase=OOMPhase.PREFILL, cause=OOMCause.NEIGHBOUR)
        )
        if self.engine.has_work:
            with pytest.raises(DeviceOutOfMemoryError):
                self.engine.step()
        self.runner.failures.clear()

    @rule(data=st.data())
    def yield_unusable_logits(self, data: st.DataObject) -> None:
        live = sorted(self.requests.keys() - self.collector.final.keys())
        if live:
            self.runner.unusable.add(data.draw(st.sampled_from(live)))

    @rule()
    def fail(self) -> None:
        self.runner.failures.append(ModelExecutionError("broken"))
        outputs = self.engine.step()
        assert all(output.finish_reason is FinishReason.ERROR for output in outputs)
        self.collector.take(outputs)
        self.runner.failures.clear()

    @invariant()
    def bookkeeping_adds_up(self) -> None:
        self.engine.check_invariants()
        stats = self.engine.stats()
        live = len(self.requests) - len(self.collector.final)
        assert stats.num_running + stats.num_waiting_capacity + stats.num_waiting_budget == live
        assert sum(stats.finished_total.values()) == len(self.collector.final)
        in_use = stats.num_blocks_free + stats.num_blocks_cached + stats.num_blocks_used
        assert in_use == stats.num_blocks_total == NUM_BLOCKS - stats.num_blocks_held_out
        assert stats.num_blocks_total == self.target + self.engine.num_blocks_to_go

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.collector.run(self.engine)
        assert self.collector.final.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            final = self.collector.final[request_id]
            token_ids = self.collector.token_ids[request_id]
            logprobs = self.collector.logprobs[request_id]
            expected = compute_expected_tokens(request, window=self.window)
            expected_logprobs = compute_expected_logprobs(request, window=self.window)
            if final.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert token_ids == expected
                assert logprobs == expected_logprobs
            else:
                assert token_ids == expected[: len(token_ids)]
                assert logprobs == expected_logprobs[: len(logprobs)]
            assert final.num_output_tokens == len(token_ids)
        assert self.engine.stats().num_blocks_used == 0
        assert self.engine.num_blocks_to_go == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@settings(deadline=None, max_examples=150)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(20, 42), st.integers(0, 12)), min_size=4, max_size=8),
    budget=st.integers(1, 12),
    num_blocks=st.integers(12, 16),
    caching=st.booleans(),
    oom_every=st.integers(2, 30),
)
def test_tokens_are_right_under_heavy_preemption(
    shapes: list[tuple[int, int, int]], budget: int, num_blocks: int, caching: bool, oom_every: int
) -> None:
    """Short prompts with long outputs get past the reserve and then fight for a pool that holds about one."""
    runner = FakeModelRunner(block_size=BLOCK_SIZE)
    engine = make_engine_core(
        runner,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=caching,
        max_num_batched_tokens=budget,
        max_model_len=48,
    )
    collector = OutputCollector()
    requests = []
    for i, (prompt_len, max_tokens, num_steps) in enumerate(shapes):
        requests.append(make_request(f"r{i}", range(i % 3, i % 3 + prompt_len), max_tokens=max_tokens))
        engine.add_request(requests[-1])
        for step in range(num_steps):
            if step % oom_every == oom_every - 1:
                runner.failures.append(DeviceOutOfMemoryError("no memory", phase=OOMPhase.DECODE, cause=OOMCause.OWN))
                with pytest.raises(DeviceOutOfMemoryError):
                    engine.step()
                engine.check_invariants()
            collector.take(engine.step())
            engine.check_invariants()
    collector.run(engine)
    for request in requests:
        assert collector.token_ids[request.request_id] == compute_expected_tokens(request)
        assert collector.final[request.request_id].finish_reason is FinishReason.LENGTH
    for plan in runner.plans:
        assert not {p.request_id for p in plan.preempted} & {s.request_id for s in plan.scheduled}
        assert plan.num_tokens <= budget
