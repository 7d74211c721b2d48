"""The scheduler: one budget, order of admission, the reserve, plan and commit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.kv_cache_manager import KVCacheManager
from kvpilot_engine.core.preemption import MAX_PREEMPTIONS
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.scheduler import Scheduler
from kvpilot_engine.core.scheduler_output import (
    FinishReason,
    ModelRunnerOutput,
    Preemption,
    SchedulerOutput,
    SequenceOutput,
)
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import ModelExecutionError
from kvpilot_engine.testing import FakeModelRunner, make_request

BLOCK_SIZE = 4


class Bench:
    """A scheduler, its cache and a fake to run the plans."""

    def __init__(
        self, *requests: GenerationRequest, num_blocks: int = 32, budget: int = 64, seqs: int = 8, caching: bool = True
    ) -> None:
        cache = CacheSettings(block_size=BLOCK_SIZE, enable_prefix_caching=caching)
        self.kv_cache = KVCacheManager(cache, num_blocks=num_blocks, max_step_tokens=budget, model="m")
        settings = SchedulerSettings(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=1000)
        self.scheduler = Scheduler(settings, self.kv_cache)
        self.runner = FakeModelRunner(block_size=BLOCK_SIZE)
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> tuple[SchedulerOutput, list[SequenceOutput]]:
        plan = self.scheduler.schedule()
        outputs = list(plan.rejected)
        if plan.scheduled:
            outputs += self.scheduler.update_from_output(plan, self.runner.execute(plan))
        self.scheduler.check_invariants()
        return plan, outputs


def distinct(request_id: str, num_tokens: int, *, max_tokens: int = 4) -> GenerationRequest:
    """A request whose prompt shares no block with those of other ids."""
    first = sum(request_id.encode()) * 1000
    return make_request(request_id, range(first, first + num_tokens), max_tokens=max_tokens)


def work(plan: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    return [(s.request_id, s.start_position, len(s.token_ids), s.samples) for s in plan.scheduled]


def test_prompt_chunks_and_next_tokens_share_one_batch_and_budget() -> None:
    bench = Bench(distinct("a", 3), budget=8)
    bench.step()
    bench.scheduler.add(distinct("b", 12))
    assert work(bench.step()[0]) == [("a", 3, 1, True), ("b", 0, 7, False)]
    assert work(bench.step()[0]) == [("a", 4, 1, True), ("b", 7, 5, True)]


def test_a_chunk_that_does_not_end_the_prompt_brings_no_news() -> None:
    bench = Bench(distinct("a", 10), budget=8)
    assert bench.step()[1] == []
    (output,) = bench.step()[1]
    assert len(output.new_token_ids) == 1


def test_blocks_for_the_whole_prompt_are_taken_with_its_first_chunk() -> None:  # A4
    bench = Bench(distinct("a", 30), budget=4)
    plan, _ = bench.step()
    assert len(plan.scheduled[0].block_ids) == 8


def test_nobody_overtakes_the_first_in_the_queue() -> None:
    bench = Bench(distinct("big", 40), distinct("huge", 80), distinct("tiny", 2), num_blocks=24)
    plan, _ = bench.step()
    assert [s.request_id for s in plan.scheduled] == ["big"]
    assert bench.scheduler.lacks_capacity()


def test_the_batch_holds_no_more_than_max_num_seqs() -> None:
    bench = Bench(*(distinct(name, 2) for name in "abc"), seqs=2)
    assert len(bench.step()[0].scheduled) == 2
    assert bench.scheduler.lacks_capacity()


def test_who_waits_for_the_budget_only_does_not_lack_capacity() -> None:
    bench = Bench(distinct("a", 8), distinct("b", 8), budget=8)
    bench.step()
    assert bench.scheduler.num_waiting == 1
    assert not bench.scheduler.lacks_capacity()


@pytest.mark.parametrize(
    ("num_blocks", "admitted"),
    [(5, 1), (6, 2)],
    ids=["running + 1 would not stay free", "running + 1 stays free"],
)
def test_admission_leaves_one_block_for_each_that_runs(num_blocks: int, admitted: int) -> None:
    bench = Bench(distinct("a", 8), distinct("b", 8), num_blocks=num_blocks)
    assert len(bench.step()[0].scheduled) == admitted


@pytest.mark.parametrize(("num_blocks", "admitted"), [(23, 1), (24, 2)])
def test_admission_leaves_a_quarter_of_the_outstanding_output(num_blocks: int, admitted: int) -> None:
    """Each has 10 blocks of prompt and 8 of output to come: a reserve of 4 beside the 20."""
    bench = Bench(distinct("a", 40, max_tokens=32), distinct("b", 40, max_tokens=32), num_blocks=num_blocks, budget=99)
    assert len(bench.step()[0].scheduled) == admitted


def test_the_reserve_is_waived_when_nothing_runs() -> None:
    bench = Bench(distinct("a", 28, max_tokens=4), num_blocks=8)
    assert len(bench.step()[0].scheduled) == 1


def test_a_full_pool_preempts_and_the_victim_returns_before_later_arrivals() -> None:
    bench = Bench(distinct("a", 7, max_tokens=20), distinct("b", 7, max_tokens=20), num_blocks=7)
    bench.step()
    bench.scheduler.add(distinct("late", 2))
    preempted: list[str] = []
    started: list[str] = []
    while len(bench.scheduler):
        plan, _ = bench.step()
        started += [s.request_id for s in plan.scheduled if s.start_position == 0]
        preempted += [preemption.request_id for preemption in plan.preempted]
    assert preempted == ["b"]
    assert started.index("b") < started.index("late")
    assert bench.scheduler.counters.num_preemptions == 1


def test_a_victim_that_was_already_planned_leaves_its_share_to_others() -> None:
    """`needy` is planned after `victim` and takes its block: the victim leaves the plan, and `last` gets its token."""
    names = ("oldest", "old", "victim", "needy", "last")
    prompts = (9, 9, 5, 8, 9)
    bench = Bench(*(distinct(name, n, max_tokens=8) for name, n in zip(names, prompts, strict=True)), num_blocks=64)
    bench.step()
    bench.scheduler._settings = replace(bench.scheduler._settings, max_num_batched_tokens=4)
    pool = bench.kv_cache.pool
    assert pool.allocate(pool.num_available) is not None
    plan = bench.scheduler.schedule()
    assert plan.preempted == (Preemption(RequestId("victim"), num_lost_tokens=5, num_preemptions=1),)
    assert [s.request_id for s in plan.scheduled] == ["oldest", "old", "needy", "last"]


def test_one_that_finds_only_spared_ones_sits_the_step_out_and_the_oldest_does_not() -> None:
    bench = Bench(distinct("oldest", 8), distinct("needy", 8), distinct("other", 9), num_blocks=64)
    bench.step()
    for sequence in bench.scheduler._running.values():
        sequence.num_preemptions = MAX_PREEMPTIONS
    pool = bench.kv_cache.pool
    ballast = pool.allocate(pool.num_available - 1)
    assert ballast is not None
    plan = bench.scheduler.schedule()
    assert work(plan) == [("oldest", 8, 1, True), ("other", 9, 1, True)]
    assert plan.preempted == ()
    bench.scheduler.update_from_output(plan, bench.runner.execute(plan))
    pool.free(ballast)
    assert ("needy", 8, 1, True) in work(bench.step()[0])


def test_a_budget_smaller_than_the_batch_serves_those_who_came_first() -> None:
    bench = Bench(*(distinct(name, 2) for name in "abc"))
    bench.step()
    bench.scheduler._settings = replace(bench.scheduler._settings, max_num_batched_tokens=2)
    assert [s.request_id for s in bench.step()[0].scheduled] == ["a", "b"]


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_tokens_computed_again_are_counted_and_are_no_prefix_hits(caching: bool, budget: int) -> None:
    requests = [distinct("a", 7, max_tokens=20), distinct("b", 7, max_tokens=20)]
    bench = Bench(*requests, num_blocks=7, caching=caching, budget=budget)
    lost = 0
    while len(bench.scheduler):
        plan, _ = bench.step()
        lost += sum(preemption.num_lost_tokens for preemption in plan.preempted)
    counters = bench.scheduler.counters
    assert counters.num_prefix_hits == 0
    assert counters.num_prefix_queries == (14 if caching else 0)
    assert counters.num_prompt_tokens == 14
    assert counters.num_generation_tokens == 40
    assert 0 < counters.num_recomputed_tokens <= lost
    if not caching:
        assert counters.num_recomputed_tokens == lost


def test_a_prefix_found_again_after_a_preemption_is_not_told_as_cached() -> None:
    bench = Bench(distinct("a", 7, max_tokens=6), distinct("b", 16, max_tokens=8), num_blocks=9)
    bench.step()
    pool = bench.kv_cache.pool
    ballast = pool.allocate(pool.num_available)
    assert ballast is not None
    while not bench.scheduler.num_swapped_out:
        plan = bench.scheduler.schedule()
        bench.scheduler.update_from_output(plan, bench.runner.execute(plan))
    pool.free(ballast)
    restarts = []
    finals = []
    while len(bench.scheduler):
        plan, outputs = bench.step()
        restarts += [s.start_position for s in plan.scheduled if s.request_id == "b"]
        finals += [output for output in outputs if output.finish_reason is not None]
    assert restarts[0] == 16
    assert [output.num_cached_tokens for output in finals] == [0, 0]
    assert bench.scheduler.counters.num_prefix_hits == 0


def test_a_prefix_is_looked_up_when_its_sequence_starts_not_when_it_came() -> None:
    prompt = range(9)
    bench = Bench(*(make_request(name, prompt) for name in ("first", "second")), seqs=1)
    assert bench.kv_cache.find_prefix(bench.scheduler._sequences[RequestId("second")]).num_cached_tokens == 0
    starts: dict[str, int] = {}
    while len(bench.scheduler):
        plan, _ = bench.step()
        for scheduled in plan.scheduled:
            starts.setdefault(scheduled.request_id, scheduled.start_position)
    assert starts == {"first": 0, "second": 8}


def test_a_prefix_that_was_evicted_while_its_sequence_waited_is_computed_again() -> None:
    bench = Bench(make_request("first", range(9)), num_blocks=8)
    while len(bench.scheduler):
        bench.step()
    waiting = make_request("second", range(9))
    bench.scheduler.add(waiting)
    assert bench.kv_cache.find_prefix(bench.scheduler._sequences[waiting.request_id]).num_cached_tokens == 8
    pool = bench.kv_cache.pool
    evicting = pool.allocate(pool.num_available)
    assert evicting is not None
    pool.free(evicting)
    (scheduled,) = bench.step()[0].scheduled
    assert (scheduled.start_position, len(scheduled.token_ids)) == (0, 9)


def make_requests(shapes: list[tuple[int, int]]) -> list[GenerationRequest]:
    return [distinct(f"r{i}", prompt, max_tokens=output) for i, (prompt, output) in enumerate(shapes)]


SHAPES = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=6)


@settings(deadline=None)
@given(SHAPES, st.integers(10, 20), st.integers(1, 24), st.integers(0, 20))
def test_a_dropped_plan_leaves_nothing_behind(
    shapes: list[tuple[int, int]], num_blocks: int, budget: int, num_steps: int
) -> None:
    bench = Bench(*make_requests(shapes), num_blocks=num_blocks, budget=budget)
    for _ in range(num_steps):
        bench.step()

    def describe() -> object:
        pool = bench.kv_cache.pool
        tables = {
            s.request_id: (s.status, s.num_computed_tokens, s.block_table.block_ids, s.num_tokens)
            for s in bench.scheduler._sequences.values()
        }
        # A reserved block may have lost its cached prefix; that it is available again is what counts.
        return tables, pool.num_available, pool.num_used, bench.scheduler.num_waiting

    before = describe()
    plan = bench.scheduler.schedule()
    if not plan.scheduled:
        return
    bench.scheduler.check_invariants()
    bench.scheduler.drop(plan)
    bench.scheduler.check_invariants()
    again = bench.scheduler.schedule()
    if not plan.preempted:
        bench.scheduler.drop(again)
        assert describe() == before
        again = bench.scheduler.schedule()
        assert work(again) == work(plan)
    assert again.scheduled


def test_planning_alone_moves_and_publishes_nothing() -> None:
    bench = Bench(distinct("a", 8))
    bench.scheduler.schedule()
    (sequence,) = bench.scheduler._running.values()
    assert sequence.num_computed_tokens == 0
    assert bench.kv_cache.pool._by_hash == {}
    assert bench.scheduler.counters.num_prefix_queries == 0


def test_one_plan_at_a_time() -> None:
    bench = Bench(distinct("a", 8))
    plan = bench.scheduler.schedule()
    with pytest.raises(AssertionError, match="neither committed nor dropped"):
        bench.scheduler.schedule()
    bench.scheduler.drop(plan)
    with pytest.raises(AssertionError, match="not the open one"):
        bench.scheduler.update_from_output(plan, ModelRunnerOutput({}))


def test_a_missing_token_commits_nothing() -> None:
    bench = Bench(distinct("a", 8), distinct("b", 8))
    plan = bench.scheduler.schedule()
    with pytest.raises(ModelExecutionError, match="no token for b"):
        bench.scheduler.update_from_output(plan, ModelRunnerOutput({plan.scheduled[0].request_id: TokenId(1)}))
    assert bench.scheduler.counters.num_steps == 0
    bench.scheduler.drop(plan)
    bench.scheduler.check_invariants()


@pytest.mark.parametrize("commits", [True, False])
def test_a_sequence_that_ends_while_its_step_runs_gets_no_more_news(commits: bool) -> None:
    bench = Bench(distinct("a", 8), distinct("b", 8))
    plan = bench.scheduler.schedule()
    result = bench.runner.execute(plan)
    gone = bench.scheduler.finish(plan.scheduled[0].request_id, FinishReason.ABORT)
    assert gone is not None
    assert gone.finish_reason is FinishReason.ABORT
    if commits:
        outputs = bench.scheduler.update_from_output(plan, result)
        assert [output.request_id for output in outputs] == ["b"]
    else:
        bench.scheduler.drop(plan)
        assert bench.scheduler.num_waiting == 1
    bench.scheduler.check_invariants()
    assert bench.kv_cache.pool.num_used == (2 if commits else 0)


def test_a_waiting_request_that_a_smaller_pool_can_never_hold_ends_as_an_error() -> None:  # A2
    bench = Bench(distinct("big", 40), distinct("small", 4), num_blocks=16)
    bench.kv_cache.pool.set_target(8)
    plan, outputs = bench.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [
        ("big", FinishReason.ERROR),
        ("small", None),
    ]
    assert "44 tokens" in plan.rejected[0].message
    assert "holds 32" in plan.rejected[0].message


def test_a_running_request_that_a_smaller_pool_can_not_hold_ends_as_an_error() -> None:  # A2
    bench = Bench(distinct("big", 8, max_tokens=40), num_blocks=16)
    bench.step()
    bench.kv_cache.pool.set_target(4)
    bench.scheduler.add(distinct("small", 4))
    ends: dict[str, FinishReason] = {}
    for _ in range(40):
        for output in bench.step()[1]:
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
    assert ends == {"big": FinishReason.ERROR, "small": FinishReason.LENGTH}
    assert bench.kv_cache.pool.num_held_out == 12


@settings(deadline=None)
@given(SHAPES, st.lists(st.integers(0, 20), max_size=20), st.integers(1, 24))
def test_whatever_the_cap_does_every_sequence_ends(
    shapes: list[tuple[int, int]], targets: list[int], budget: int
) -> None:
    bench = Bench(*make_requests(shapes), num_blocks=20, budget=budget)
    ends: list[SequenceOutput] = []
    for target in targets:
        bench.kv_cache.pool.set_target(target)
        ends += [output for output in bench.step()[1] if output.finish_reason is not None]
    num_steps = 0
    while len(bench.scheduler):
        ends += [output for output in bench.step()[1] if output.finish_reason is not None]
        num_steps += 1
        assert num_steps < 2000
    assert sorted(output.request_id for output in ends) == sorted(
        request.request_id for request in make_requests(shapes)
    )
    assert bench.kv_cache.pool.num_used == 0
