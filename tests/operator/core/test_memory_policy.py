"""The memory decision: what each kind of event does to the cap, and the promises of the module as properties."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.core.api_types import (
    EngineSpec,
    LLMDeploymentSpec,
    MemoryPolicy,
    MemoryTuningSpec,
    ModelSpec,
    ResourcesSpec,
    TuningMode,
)
from kvpilot_operator.core.decisions import Action
from kvpilot_operator.core.memory import MemoryDecision, decide_memory, engine_shape
from kvpilot_operator.core.observation import (
    EngineOOM,
    EngineTuning,
    ReplicaObservation,
    StartFailure,
    Termination,
    Unknown,
)
from kvpilot_operator.core.policy import POLICY
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.tuning_memory import (
    LearnedLimit,
    TuningMemory,
    build_tuning_file,
    dump_tuning_memory,
    load_tuning_memory,
)
from kvpilot_operator.testing import (
    START,
    make_engine_memory,
    make_engine_state,
    make_observation,
    make_replica,
    make_termination,
)

NOW = START + timedelta(hours=1)
GIB = 1024**3
POLICY_090 = MemoryPolicy(utilization=0.9, tuning=MemoryTuningSpec(min=0.5, max=0.95))
SHAPE = "s1"


def decide(
    *replicas: ReplicaObservation,
    memory: TuningMemory | None = None,
    policy: MemoryPolicy = POLICY_090,
    now: datetime = NOW,
    shape: str = SHAPE,
) -> MemoryDecision:
    return decide_memory(policy, make_observation(*replicas), memory, now, shape=shape)


def oom(seq: int = 1, utilization: float = 0.9, **changes: Any) -> EngineOOM:
    values: dict[str, Any] = {"phase": "decode", "cause": "own", "survived": True, "message": "out of memory"}
    return EngineOOM(seq=seq, utilization=utilization, **{**values, **changes})


def serving(name: str = "pod-0", *events: EngineOOM, **state: Any) -> ReplicaObservation:
    return make_replica(name, engine=make_engine_state(oom_events=events, **state))


def ended(
    exit_code: int, name: str = "pod-0", *, run: int = 0, reason: str = "Error", **report: Any
) -> ReplicaObservation:
    """A pod whose container ended like this and is about to start again."""
    return make_replica(
        name,
        ready=False,
        restart_count=run,
        waiting_reason="CrashLoopBackOff",
        engine=Unknown("NotScraped"),
        last_termination=make_termination(exit_code, reason=reason, report=report or None, run=run),
    )


def test_tuning_starts_from_the_spec() -> None:
    decision = decide(make_replica())
    assert (decision.utilization, decision.memory.revision, decision.reason) == (0.9, 1, Reason.TUNED)
    assert decision.applied == 1
    assert decision.records == ()


class TestOwnOOM:
    def test_lowers_the_cap_by_the_least_step_without_evidence(self) -> None:
        decision = decide(serving("pod-0", oom()))
        assert (decision.utilization, decision.memory.revision) == (0.88, 2)
        [record] = decision.records
        assert (record.action, record.reason) == (Action.LOWER, Reason.DEVICE_OOM_WHILE_SERVING)
        assert (record.before, record.after) == (0.9, 0.88)

    def test_is_sized_from_the_bytes_that_were_missing(self) -> None:
        event = oom(requested_bytes=GIB // 2, free_bytes=0)  # 5 % of the 10 GiB device
        assert decide(serving("pod-0", event)).utilization == 0.85

    def test_takes_off_what_was_free(self) -> None:
        event = oom(requested_bytes=GIB, free_bytes=GIB - 1)
        assert decide(serving("pod-0", event)).utilization == 0.88

    def test_is_bounded_whatever_the_evidence(self) -> None:
        assert decide(serving("pod-0", oom(requested_bytes=9 * GIB))).utilization == 0.8

    def test_at_load_takes_the_engines_own_suggestion(self) -> None:
        pod = ended(71, utilization=0.9, cause="own", suggested={"utilization": 0.84})
        decision = decide(pod)
        assert decision.utilization == 0.84
        assert decision.records[0].reason == Reason.DEVICE_OOM_AT_LOAD

    def test_is_remembered_as_failed(self) -> None:
        [entry] = decide(serving("pod-0", oom())).memory.learned
        assert (entry.device, entry.shape, entry.failed, entry.safe) == ("cpu", SHAPE, 0.9, None)

    def test_at_load_is_put_down_to_the_device_that_all_have(self) -> None:
        [entry] = decide(serving("a"), ended(71, "b", utilization=0.95)).memory.learned
        assert (entry.device, entry.safe, entry.failed) == ("cpu", 0.9, 0.95)

    def test_of_several_pods_at_one_share_lowers_once(self) -> None:
        first = decide(serving("a", oom()), serving("b", oom()))
        assert first.utilization == 0.88
        late = decide(serving("a", oom()), serving("b", oom()), serving("c", oom()), memory=first.memory)
        assert late.utilization == 0.88

    def test_of_a_share_that_was_left_already_changes_nothing(self) -> None:
        lowered = decide(serving("a", oom())).memory
        late = decide(serving("b", oom(utilization=0.9, requested_bytes=2 * GIB)), memory=lowered)
        assert (late.utilization, late.memory.revision) == (0.88, 2)

    def test_never_goes_below_what_the_engine_needs(self) -> None:
        need = make_engine_memory(min_utilization=0.889)
        decision = decide(serving("pod-0", oom(), memory=need))
        assert decision.utilization == 0.89
        state = {"memory": need, "tuning": _applied(decision.memory)}
        again = decide(serving("pod-0", oom(), oom(2, 0.89), **state), memory=decision.memory)
        assert again.utilization == 0.89
        assert again.reason is Reason.AT_MEMORY_FLOOR
        assert again.records[0].reason == Reason.AT_MEMORY_FLOOR
        assert "maxModelLen" in again.records[0].message

    def test_never_goes_below_the_minimum_of_the_spec(self) -> None:
        policy = replace(POLICY_090, tuning=MemoryTuningSpec(min=0.89, max=0.95))
        assert decide(serving("pod-0", oom()), policy=policy).utilization == 0.89

    def test_of_unknown_share_counts_for_the_present_one(self) -> None:
        assert decide(ended(74)).utilization == 0.88

    @pytest.mark.parametrize("cause", ["neighbour", "host", "gremlins"])
    def test_is_not_what_others_did(self, cause: str) -> None:
        decision = decide(serving("pod-0", oom(cause=cause)))
        assert decision.utilization == 0.9
        assert all(entry.failed is None for entry in decision.memory.learned)


class TestEachEventOnce:
    def test_seen_again(self) -> None:
        pods = (serving("a", oom(1)), ended(71, "b", utilization=0.9))
        first = decide(*pods)
        second = decide(*pods, memory=first.memory)
        assert second.memory == first.memory
        assert second.records == ()

    def test_after_a_restart_of_the_operator(self) -> None:
        first = decide(serving("a", oom(1)))
        restored = load_tuning_memory(dump_tuning_memory(first.memory))
        assert decide(serving("a", oom(1)), memory=restored).memory == first.memory

    def test_told_by_the_living_engine_and_by_its_last_words(self) -> None:
        first = decide(serving("a", oom(3, survived=False)))
        dead = ended(74, "a", oom_seq=3)
        assert decide(dead, memory=first.memory).utilization == first.utilization == 0.88

    def test_while_the_pod_moves_from_ended_to_waiting_to_running(self) -> None:
        pod = ended(71, utilization=0.9)
        first = decide(pod)
        restarted = replace(pod, restart_count=1, waiting_reason="")
        assert decide(restarted, memory=first.memory).memory.recommended == 0.88

    def test_the_same_number_in_the_next_run_is_another_event(self) -> None:
        first = decide(serving("a", oom(1)))
        next_run = make_replica("a", restart_count=1, engine=make_engine_state(oom_events=(oom(1, 0.88),)))
        assert decide(next_run, memory=first.memory).utilization == 0.86

    def test_the_last_words_of_the_next_run_are_another_event(self) -> None:
        first = decide(serving("a", oom(1)))
        dead = ended(74, "a", run=1, utilization=0.88, oom_seq=1)
        assert decide(dead, memory=first.memory).utilization == 0.86

    def test_with_tuning_off_nothing_is_saved_up(self) -> None:
        off = replace(POLICY_090, tuning=MemoryTuningSpec(mode=TuningMode.DISABLED))
        first = decide(serving("a", oom(1)), policy=off)
        assert (first.utilization, first.reason, first.records) == (0.9, Reason.TUNING_DISABLED, ())
        assert decide(serving("a", oom(1)), memory=first.memory).utilization == 0.9


class TestHostOOM:
    def test_leaves_the_cap_and_advises_host_memory(self) -> None:  # C27
        decision = decide(ended(137, reason="OOMKilled"))
        assert (decision.utilization, decision.memory.revision) == (0.9, 1)
        assert decision.memory.learned == ()
        [record] = decision.records
        assert (record.action, record.reason) == (Action.HOLD, Reason.HOST_OOM_KILLED)
        assert "resources.limits.memory" in record.message

    @pytest.mark.parametrize("exit_code", [0, 1, 64, 66, 70, 75, 137, 143])
    def test_other_ends_are_no_memory_events(self, exit_code: int) -> None:  # C27
        decision = decide(ended(exit_code))
        assert (decision.utilization, decision.records) == (0.9, ())


def test_contention_is_reported_and_teaches_nothing() -> None:
    decision = decide(ended(73, message="2 GiB of others"))
    assert decision.utilization == 0.9
    assert decision.memory.learned == ()
    assert decision.records[0].reason == Reason.DEVICE_MEMORY_CONTENDED


class TestDoesNotFit:
    policy = MemoryPolicy(utilization=0.6, tuning=MemoryTuningSpec(min=0.5, max=0.9))

    def test_is_raised_when_the_device_has_room(self) -> None:
        pod = ended(72, utilization=0.6, message="needs 0.713", suggested={"utilization": 0.713})
        decision = decide(pod, policy=self.policy)
        assert (decision.utilization, decision.memory.revision) == (0.72, 2)
        assert decision.records[0].action is Action.RAISE

    def test_says_the_numbers_when_the_maximum_forbids_it(self) -> None:
        pod = ended(72, utilization=0.6, suggested={"utilization": 0.97, "max_model_len": 2048})
        decision = decide(pod, policy=self.policy)
        assert (decision.utilization, decision.reason) == (0.6, Reason.MODEL_DOES_NOT_FIT)
        assert "0.97" in decision.message
        assert "0.9" in decision.message
        assert "2048" in decision.message
        assert decide(pod, policy=self.policy, memory=decision.memory).reason is Reason.MODEL_DOES_NOT_FIT

    def test_never_lowers(self) -> None:
        decision = decide(ended(72, utilization=0.6, suggested={"utilization": 0.3}), policy=self.policy)
        assert decision.utilization == 0.6

    def test_is_not_raised_to_what_failed(self) -> None:
        failed = LearnedLimit(device="cpu", shape=SHAPE, safe=None, failed=0.7, at=START)
        memory = TuningMemory(
            utilization=0.6, recommended=0.6, revision=3, spec_utilization=0.6, shape=SHAPE, learned=(failed,)
        )
        pod = ended(72, utilization=0.6, suggested={"utilization": 0.69})
        decision = decide(pod, policy=self.policy, memory=memory)
        assert (decision.utilization, decision.reason) == (0.6, Reason.MODEL_DOES_NOT_FIT)

    def test_of_a_smaller_share_than_the_present_one_waits(self) -> None:
        pod = ended(72, utilization=0.55, suggested={"utilization": 0.99})
        assert decide(pod, policy=self.policy).reason is Reason.TUNED

    def test_is_over_when_a_start_succeeds(self) -> None:
        pod = ended(72, utilization=0.6, suggested={"utilization": 0.97})
        blocked = decide(pod, policy=self.policy).memory
        running = serving("pod-0", tuning=EngineTuning(revision=1, state="applied", utilization=0.6, reason=""))
        assert decide(running, policy=self.policy, memory=blocked).reason is Reason.TUNED


class TestFailedStarts:
    def fail(self, memory: TuningMemory | None, run: int) -> MemoryDecision:
        share = 0.9 if memory is None else memory.utilization
        now = NOW + timedelta(minutes=run)
        return decide(ended(71, run=run, utilization=share, message="short"), memory=memory, now=now)

    def test_tuning_stops_after_three(self) -> None:  # D18
        decision = self.fail(None, 0)
        caps = [decision.utilization]
        for run in range(1, 6):
            decision = self.fail(decision.memory, run)
            caps.append(decision.utilization)
        assert caps == [0.88, 0.86, 0.86, 0.86, 0.86, 0.86]
        assert decision.reason is Reason.OOM_UNRESOLVED
        assert "tuning stops" in decision.message

    def test_the_last_good_share_is_kept(self) -> None:  # D18
        good = LearnedLimit(device="cpu", shape=SHAPE, safe=0.7, failed=None, at=START)
        memory = TuningMemory(
            utilization=0.9, recommended=0.9, revision=1, spec_utilization=0.9, shape=SHAPE, learned=(good,)
        )
        decision = self.fail(self.fail(self.fail(memory, 0).memory, 1).memory, 2)
        assert (decision.utilization, decision.reason) == (0.7, Reason.OOM_UNRESOLVED)

    def test_a_start_that_succeeds_ends_the_series(self) -> None:  # D18
        memory = self.fail(self.fail(None, 0).memory, 1).memory
        assert memory.failed_starts == 2
        state = make_engine_state(tuning=_applied(memory))
        up = make_replica("pod-0", restart_count=2, started_at=NOW + timedelta(minutes=5), engine=state)
        assert decide(up, memory=memory, now=NOW + timedelta(minutes=6)).memory.failed_starts == 0

    def test_a_pod_that_has_been_up_all_along_does_not_end_it(self) -> None:  # D18
        memory = self.fail(None, 0).memory
        old = make_replica("old", started_at=START, engine=make_engine_state(tuning=_applied(memory)))
        assert decide(old, memory=memory).memory.failed_starts == 1

    def test_an_edit_of_the_spec_starts_anew(self) -> None:
        memory = self.fail(self.fail(self.fail(None, 0).memory, 1).memory, 2).memory
        policy = replace(POLICY_090, utilization=0.8)
        decision = decide(ended(71, run=2, utilization=0.86), memory=memory, policy=policy)
        assert (decision.utilization, decision.memory.failed_starts) == (0.8, 0)
        assert decision.reason is Reason.TUNED
        assert decision.memory.revision == memory.revision + 1

    def test_an_edit_that_changes_nothing_in_force_is_another_try_all_the_same(self) -> None:
        failed = LearnedLimit(device="cpu", shape=SHAPE, safe=None, failed=0.9, at=NOW)
        memory = TuningMemory(
            utilization=0.88, recommended=0.88, revision=4, spec_utilization=0.9, shape=SHAPE, learned=(failed,)
        )
        decision = decide(make_replica(), memory=memory, policy=replace(POLICY_090, utilization=0.93))
        assert (decision.utilization, decision.memory.revision) == (0.88, 5)

    def test_an_engine_that_gave_up_by_itself_is_told(self) -> None:
        failure = StartFailure(
            reason="DeviceOOMAtLoad", exit_code=71, utilization=0.9, revision=1, message="short of 1 GiB"
        )
        state = make_engine_state(state="held", state_reason="OOMUnresolved", start_failures=(failure,) * 3)
        held = make_replica(ready=False, engine=state)
        decision = decide(held)
        assert decision.reason is Reason.OOM_UNRESOLVED
        assert "short of 1 GiB" in decision.message


class TestSpecEdits:
    learned = LearnedLimit(device="cpu", shape=SHAPE, safe=0.86, failed=0.9, at=NOW)
    memory = TuningMemory(
        utilization=0.88, recommended=0.88, revision=4, spec_utilization=0.9, shape=SHAPE, learned=(learned,)
    )

    def test_a_lower_share_is_taken(self) -> None:
        decision = decide(make_replica(), memory=self.memory, policy=replace(POLICY_090, utilization=0.7))
        assert (decision.utilization, decision.memory.revision) == (0.7, 5)
        assert decision.records[0].action is Action.RESET

    def test_a_higher_one_is_bounded_by_what_failed(self) -> None:
        decision = decide(make_replica(), memory=self.memory, policy=replace(POLICY_090, utilization=0.95))
        assert decision.utilization == 0.88
        assert "0.9 ran out of memory" in decision.records[0].message

    def test_what_failed_is_forgotten_in_time(self) -> None:
        later = NOW + timedelta(seconds=POLICY.failed_expiry_s)
        policy = replace(POLICY_090, utilization=0.95)
        assert decide(make_replica(), memory=self.memory, policy=policy, now=later).utilization == 0.95

    def test_another_model_starts_from_the_spec(self) -> None:
        decision = decide(make_replica(), memory=self.memory, shape="s2")
        assert decision.utilization == 0.9
        assert self.learned in decision.memory.learned

    def test_changed_bounds_hold(self) -> None:
        policy = MemoryPolicy(utilization=0.9, tuning=MemoryTuningSpec(min=0.9, max=0.95))
        assert decide(make_replica(), memory=self.memory, policy=policy).utilization == 0.9


class TestAdvise:
    policy = replace(POLICY_090, tuning=MemoryTuningSpec(mode=TuningMode.ADVISE))

    def test_the_cap_stays_and_the_recommendation_is_told(self) -> None:
        decision = decide(serving("pod-0", oom()), policy=self.policy)
        assert (decision.utilization, decision.memory.recommended) == (0.9, 0.88)
        assert (decision.memory.revision, decision.reason) == (1, Reason.ADVISING)

    def test_switching_it_to_auto_takes_the_recommendation(self) -> None:
        advised = decide(serving("pod-0", oom()), policy=self.policy).memory
        decision = decide(serving("pod-0", oom()), memory=advised)
        assert (decision.utilization, decision.memory.revision) == (0.88, 2)


def test_what_runs_is_remembered_as_safe() -> None:
    [entry] = decide(make_replica()).memory.learned
    assert (entry.safe, entry.failed) == (0.9, None)


@pytest.mark.parametrize(
    ("tuning", "reason"),
    [
        (EngineTuning(revision=1, state="applied", utilization=0.9, reason=""), Reason.TUNED),
        (EngineTuning(revision=0, state="applied", utilization=0.9, reason=""), Reason.APPLYING),
        (EngineTuning(revision=1, state="deferred", utilization=0.95, reason="3 blocks in use"), Reason.APPLYING),
        (EngineTuning(revision=1, state="rejected", utilization=0.95, reason="too small"), Reason.RESIZE_REJECTED),
    ],
)
def test_how_far_the_cap_got_is_told(tuning: EngineTuning, reason: Reason) -> None:
    decision = decide(serving("pod-0", tuning=tuning))
    assert decision.reason is reason
    assert tuning.reason in decision.message


def test_the_tuning_file_is_what_engines_read() -> None:
    memory = replace(decide(make_replica()).memory, pods={"uid-1": 0.92})
    expected = {"revision": 1, "memory_utilization": {"default": 0.9, "pods": {"uid-1": 0.92}}}
    assert build_tuning_file(memory) == expected


def test_the_shape_follows_what_memory_depends_on() -> None:
    spec = LLMDeploymentSpec(model=ModelSpec(source="hf://a/b"))
    assert engine_shape(spec) == engine_shape(replace(spec, replicas=7))
    assert engine_shape(spec) != engine_shape(replace(spec, engine=EngineSpec(max_model_len=512)))
    assert engine_shape(spec) != engine_shape(replace(spec, model=ModelSpec(source="hf://a/c")))
    limited = replace(spec, resources=ResourcesSpec(limits={"memory": "2Gi"}))
    assert engine_shape(spec) == engine_shape(limited)


def _applied(memory: TuningMemory) -> EngineTuning:
    return EngineTuning(revision=memory.revision, state="applied", utilization=memory.utilization, reason="")


# --- properties: a device that fails above a hidden limit, observed at random

shares = st.floats(0.3, 1.0).map(lambda x: round(x, 3))
sizes = st.one_of(st.none(), st.integers(0, 12 * GIB))
events = st.builds(
    lambda code, share, requested, suggested: ("end", code, share, requested, suggested),
    st.sampled_from([0, 1, 71, 72, 73, 74, 137]),
    st.one_of(st.none(), shares),
    sizes,
    st.one_of(st.none(), st.floats(0.05, 1.3)),
)
survived = st.tuples(st.just("oom"), st.sampled_from(["own", "neighbour", "host"]), shares, sizes, st.none())
histories = st.lists(st.one_of(events, survived, st.just("ready")), max_size=12)


def observe(step: Any, index: int, memory: TuningMemory | None, need: float) -> ReplicaObservation:
    if step == "ready":
        tuning = (
            EngineTuning(revision=1, state="applied", utilization=0.9, reason="")
            if memory is None
            else _applied(memory)
        )
        engine = make_engine_state(tuning=tuning, memory=make_engine_memory(min_utilization=need))
        return make_replica(restart_count=index, started_at=NOW + timedelta(seconds=index), engine=engine)
    kind, what, share, requested, suggested = step
    if kind == "oom":
        event = oom(1, share, cause=what, requested_bytes=requested)
        engine = make_engine_state(oom_events=(event,), memory=make_engine_memory(min_utilization=need))
        return make_replica(restart_count=index, engine=engine)
    end: Termination = make_termination(
        what,
        reason="OOMKilled" if what == 137 else "Error",
        report={"utilization": share, "requested_bytes": requested, "suggested": {"utilization": suggested}},
        run=index,
    )
    return make_replica(ready=False, restart_count=index, engine=Unknown("NotScraped"), last_termination=end)


@settings(deadline=None)
@given(histories, st.floats(0.1, 0.6), st.floats(0.5, 0.9), st.floats(0.0, 0.1))
def test_the_cap_keeps_its_promises(history: list[Any], need: float, low: float, more: float) -> None:  # D18
    policy = MemoryPolicy(utilization=0.9, tuning=MemoryTuningSpec(min=min(low, 0.9), max=0.9 + more))
    memory: TuningMemory | None = None
    for index, step in enumerate(history):
        replica = observe(step, index, memory, need)
        before = 0.9 if memory is None else memory.recommended
        decision = decide(replica, memory=memory, policy=policy, now=NOW + timedelta(seconds=index))
        after = decision.memory
        assert policy.tuning.min - 1e-9 <= after.recommended <= policy.tuning.max + 1e-9
        if after.recommended < before - 1e-9 and after.blocked_reason != Reason.OOM_UNRESOLVED:
            assert step != "ready"
            failing = before if step[2] is None else min(before, step[2])
            assert failing - after.recommended <= POLICY.max_memory_step + 0.01
            assert (step[0] == "end" and step[1] in (71, 74)) or (step[0] == "oom" and step[1] == "own")
            if step[0] == "oom":
                assert after.recommended >= min(need, before) - 1e-9
        if after.recommended > before + 1e-9:
            failed = after.lowest_failed(NOW + timedelta(seconds=index), POLICY.failed_expiry_s)
            assert failed is None or after.recommended < failed
        again = decide(replica, memory=after, policy=policy, now=NOW + timedelta(seconds=index))
        assert (again.memory.recommended, again.memory.revision) == (after.recommended, after.revision)
        assert again.records == ()
        assert load_tuning_memory(dump_tuning_memory(after)) == after
        memory = after
