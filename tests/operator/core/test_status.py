"""Status: conditions, phase, what is worth a write, and the JSON form."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.core.api_status import LLMDeploymentStatus, LoadStatus, MemoryPlan, parse_status
from kvpilot_operator.core.api_types import LLMDeploymentSpec, MemoryPolicy, ModelSpec, ScalingMode, ScalingPolicy
from kvpilot_operator.core.conditions import ConditionStatus, ConditionType, find_condition, set_condition
from kvpilot_operator.core.decisions import MAX_DECISIONS, Action, Decision, Loop, append_decisions
from kvpilot_operator.core.diagnosis import Problem, find_problems
from kvpilot_operator.core.events import EventType, compute_events
from kvpilot_operator.core.memory import decide_memory
from kvpilot_operator.core.observation import DeploymentObservation, Unknown
from kvpilot_operator.core.policy import POLICY
from kvpilot_operator.core.reasons import Phase, Reason
from kvpilot_operator.core.scaling import decide_scaling
from kvpilot_operator.core.scaling_memory import ScalingMemory
from kvpilot_operator.core.status import Rendering, compute_invalid_status, compute_status, should_write
from kvpilot_operator.testing import START, make_load, make_observation, make_replica, make_termination

NOW = START + timedelta(hours=1)
SPEC = LLMDeploymentSpec(model=ModelSpec(source="hf://a/b"))
RENDERING = Rendering(selector="kvpilot.dev/deployment=llama", image="engine:1", template="t1")
NEVER = LLMDeploymentStatus()


def compute(
    observation: DeploymentObservation,
    previous: LLMDeploymentStatus = NEVER,
    *,
    now: datetime = NOW,
    rendering: Rendering = RENDERING,
    problems: tuple[Problem, ...] | None = None,
    scaling: ScalingPolicy | None = None,
) -> LLMDeploymentStatus:
    """One pass of all of the core over what was seen."""
    scaled = decide_scaling(
        scaling or ScalingPolicy(),
        observation,
        previous.scaling,
        now,
        spec_replicas=1,
        startup_timeout_s=1800.0,
    )
    tuned = decide_memory(MemoryPolicy(), observation, previous.tuning, now, shape="s1")
    found = find_problems(SPEC, observation, now) if problems is None else problems
    return compute_status(observation, scaled, tuned, found, rendering, previous, now)


def condition(status: LLMDeploymentStatus, type_: ConditionType) -> tuple[str, str]:
    found = find_condition(status.conditions, type_)
    assert found is not None
    return str(found.status), found.reason


LOADING = make_replica("new", ready=False, engine=Unknown("NotScraped"), created_at=NOW, started_at=NOW)
LOW = make_observation(make_replica("a"), make_replica("b"))
GROWING = replace(NEVER, scaling=ScalingMemory(mode="Auto", desired=2, last_scale_up=NOW, growing_from=1))
"""The load has just asked for a second replica."""


class TestReady:
    def test_all_wanted_replicas_are_updated_and_ready(self) -> None:
        status = compute(LOW)
        assert condition(status, ConditionType.READY) == ("True", Reason.ALL_REPLICAS_READY)
        assert condition(status, ConditionType.PROGRESSING) == ("False", Reason.SETTLED)
        assert condition(status, ConditionType.DEGRADED) == ("False", Reason.HEALTHY)
        assert status.phase is Phase.READY
        assert (status.replicas, status.ready_replicas, status.desired_replicas) == (2, 2, 2)

    def test_not_while_the_deployment_has_not_seen_the_change(self) -> None:  # C22
        status = compute(replace(LOW, generation=2, deployment_observed_generation_is_current=False))
        assert condition(status, ConditionType.READY) == ("False", Reason.ROLLOUT_IN_PROGRESS)
        assert status.phase is Phase.UPDATING

    def test_not_while_pods_of_the_old_template_serve(self) -> None:  # C22
        old = make_replica("old", template_hash="t0")
        status = compute(make_observation(make_replica("a"), old))
        assert condition(status, ConditionType.READY) == ("False", Reason.ROLLOUT_IN_PROGRESS)

    def test_speaks_of_the_generation_that_was_seen(self) -> None:  # C22
        status = compute(replace(LOW, generation=7))
        assert status.observed_generation == 7
        assert {c.observed_generation for c in status.conditions} == {7}

    def test_never_in_a_loop_of_memory_kills(self) -> None:  # C22
        killed = make_termination(137, reason="OOMKilled", finished_at=NOW - timedelta(seconds=30))
        status = compute(make_observation(make_replica(restart_count=5, last_termination=killed)))
        assert condition(status, ConditionType.READY) == ("False", Reason.HOST_OOM_KILLED)
        assert condition(status, ConditionType.DEGRADED) == ("True", Reason.HOST_OOM_KILLED)

    def test_not_while_a_pod_that_was_ready_crashes(self) -> None:  # C22
        crashed = make_termination(1, finished_at=NOW)
        crashing = make_replica(ready=False, restart_count=3, last_termination=crashed)
        status = compute(make_observation(crashing), compute(LOW))
        assert condition(status, ConditionType.READY) == ("False", Reason.CRASH_LOOP)
        assert condition(status, ConditionType.PROGRESSING) == ("False", Reason.CRASH_LOOP)
        assert status.phase is Phase.FAILED

    def test_says_how_many_are_missing(self) -> None:
        status = compute(make_observation(make_replica("a"), LOADING))
        ready = find_condition(status.conditions, ConditionType.READY)
        assert ready is not None
        assert (ready.reason, ready.message) == (Reason.SCALING_UP, "1 of 2 replicas are ready")
        assert status.phase is Phase.SCALING

    def test_stays_while_the_load_adds_replicas_to_those_that_serve(self) -> None:  # C22
        status = compute(make_observation(make_replica("a"), LOADING), GROWING)
        assert condition(status, ConditionType.READY) == ("True", Reason.SCALING_UP)
        assert condition(status, ConditionType.PROGRESSING) == ("True", Reason.SCALING_UP)
        assert status.phase is Phase.SCALING
        waiting = make_observation(make_replica("a"), replicas_wanted=2)
        lagging = replace(waiting, deployment_observed_generation_is_current=False)
        assert condition(compute(waiting, GROWING), ConditionType.READY)[0] == "True"
        assert condition(compute(lagging, GROWING), ConditionType.READY)[0] == "True"

    def test_is_lost_while_growing_when_one_that_served_does_not(self) -> None:  # C22
        restarted = replace(LOADING, name="a", uid="uid-a")
        assert condition(compute(make_observation(restarted, LOADING), GROWING), ConditionType.READY)[0] == "False"

    def test_is_lost_when_an_added_replica_crashes(self) -> None:  # C22
        ended = make_termination(1, finished_at=NOW)
        crashing = make_replica("b", ready=False, restart_count=1, last_termination=ended)
        status = compute(make_observation(make_replica("a"), crashing), GROWING)
        assert condition(status, ConditionType.READY) == ("False", Reason.CRASH_LOOP)

    def test_stays_when_an_added_replica_finds_no_node(self) -> None:
        stuck = make_replica("b", ready=False, scheduled=False, unschedulable_message="Insufficient gpu")
        status = compute(make_observation(make_replica("a"), stuck), GROWING)
        assert condition(status, ConditionType.READY) == ("True", Reason.SCALING_UP)
        assert condition(status, ConditionType.PROGRESSING) == ("False", Reason.UNSCHEDULABLE)
        assert condition(status, ConditionType.DEGRADED) == ("True", Reason.UNSCHEDULABLE)

    def test_growing_hides_no_rollout(self) -> None:  # C22
        old = make_replica("old", template_hash="t0")
        status = compute(make_observation(make_replica("a"), old, LOADING), GROWING)
        assert condition(status, ConditionType.READY) == ("False", Reason.ROLLOUT_IN_PROGRESS)

    def test_growth_ends_when_all_that_were_asked_for_are_ready(self) -> None:  # C22
        grown = compute(LOW, GROWING)
        assert condition(grown, ConditionType.READY) == ("True", Reason.ALL_REPLICAS_READY)
        hung = make_observation(make_replica("a"), replace(LOADING, name="b", uid="uid-b"))
        assert condition(compute(hung, grown), ConditionType.READY)[0] == "False"

    def test_more_replicas_that_the_user_asked_for_are_missed_at_once(self) -> None:  # C22
        one, bounds = make_observation(make_replica("a")), ScalingPolicy(min_replicas=2)
        first = compute(one, compute(one), scaling=bounds)
        assert first.desired_replicas == 2
        assert condition(first, ConditionType.READY) == ("False", Reason.SCALING_UP)
        then = compute(make_observation(make_replica("a"), LOADING), first, scaling=bounds)
        assert condition(then, ConditionType.READY) == ("False", Reason.SCALING_UP)

    def test_nothing_exists_yet(self) -> None:
        status = compute(make_observation(replicas_wanted=None))
        assert condition(status, ConditionType.READY) == ("False", Reason.STARTING)
        assert status.phase is Phase.PENDING

    def test_the_first_pod_is_loading(self) -> None:
        assert compute(make_observation(LOADING)).phase is Phase.STARTING

    def test_scaled_to_nothing_from_outside(self) -> None:
        external = ScalingPolicy(mode=ScalingMode.EXTERNAL)
        scaled = decide_scaling(
            external, make_observation(), NEVER.scaling, NOW, spec_replicas=0, startup_timeout_s=1.0
        )
        tuned = decide_memory(MemoryPolicy(), make_observation(), None, NOW, shape="s1")
        status = compute_status(make_observation(), scaled, tuned, (), RENDERING, NEVER, NOW)
        assert condition(status, ConditionType.READY) == ("False", Reason.NO_REPLICAS)

    def test_stays_while_a_spare_pod_goes(self) -> None:
        status = compute(make_observation(make_replica("a"), make_replica("b"), replicas_wanted=1))
        assert condition(status, ConditionType.READY) == ("True", Reason.ALL_REPLICAS_READY)
        assert condition(status, ConditionType.PROGRESSING) == ("True", Reason.SCALING_DOWN)

    def test_degraded_while_some_serve(self) -> None:
        broken = make_replica("b", ready=False, restart_count=3, last_termination=make_termination(1))
        assert compute(make_observation(make_replica("a"), broken)).phase is Phase.DEGRADED

    def test_unplaced_is_pending_and_says_why(self) -> None:
        stuck = make_replica(ready=False, scheduled=False, unschedulable_message="0/1 nodes: Insufficient gpu")
        status = compute(make_observation(stuck))
        assert condition(status, ConditionType.READY) == ("False", Reason.UNSCHEDULABLE)
        assert status.phase is Phase.PENDING


def test_paused_is_shown() -> None:
    status = compute(LOW, rendering=replace(RENDERING, is_paused=True))
    assert condition(status, ConditionType.READY) == ("True", Reason.ALL_REPLICAS_READY)
    assert condition(status, ConditionType.PROGRESSING) == ("False", Reason.PAUSED)
    assert condition(status, ConditionType.SCALING_ACTIVE) == ("False", Reason.PAUSED)
    assert status.phase is Phase.PAUSED


def test_an_update_is_offered_with_what_accepts_it() -> None:
    status = compute(LOW, rendering=replace(RENDERING, update="t2"))
    found = find_condition(status.conditions, ConditionType.UPDATE_AVAILABLE)
    assert found is not None
    assert found.reason == Reason.TEMPLATE_OUTDATED
    assert 'kvpilot.dev/accept-update: "t2"' in found.message


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([make_load(), make_load()], ("True", Reason.METRICS_FRESH)),
        ([make_load(), Unknown("Timeout")], ("False", Reason.METRICS_MISSING)),
        ([make_load(age_s=99.0)], ("False", Reason.METRICS_STALE)),
        ([], ("Unknown", Reason.REPLICAS_NOT_READY)),
    ],
)
def test_metrics_are_available_when_every_ready_replica_is_known(loads: list[Any], expected: tuple[str, str]) -> None:
    replicas = [make_replica(f"pod-{i}", load=load) for i, load in enumerate(loads)]
    assert condition(compute(make_observation(*replicas)), ConditionType.METRICS_AVAILABLE) == expected


def test_unknown_replicas_are_counted() -> None:  # D1
    status = compute(make_observation(make_replica("a"), make_replica("b", load=Unknown("Timeout"))))
    assert status.load is not None
    assert status.load.unknown_replicas == 1


def test_the_load_is_rounded() -> None:
    load = make_load(kv_usage_ratio=0.123456, running=3, waiting=2)
    status = compute(make_observation(make_replica(load=load)))
    assert status.load == LoadStatus(
        kv_usage=0.12,
        kv_usage_max=0.12,
        running=3,
        waiting=2,
        preemptions_per_minute=0.0,
        unknown_replicas=0,
        at=NOW,
    )


def test_the_memory_plan_stays_when_no_engine_can_tell() -> None:
    known = compute(LOW)
    assert known.plan is not None
    assert compute(make_observation(LOADING), known).plan == known.plan


def test_an_invalid_spec_is_said_and_the_rest_is_kept() -> None:
    before = compute(LOW)
    status = compute_invalid_status(before, 3, "spec.model.source is missing", NOW)
    assert condition(status, ConditionType.READY) == ("False", Reason.INVALID_SPEC)
    assert (status.phase, status.observed_generation) == (Phase.INVALID, 3)
    assert (status.tuning, status.scaling) == (before.tuning, before.scaling)


class TestWrites:
    def test_an_unchanged_world_is_not_written(self) -> None:
        one = make_observation(make_replica())
        before = compute(one)
        for hours in (0.001, 1, 24):
            now = NOW + timedelta(hours=hours)
            assert not should_write(before, compute(one, before, now=now), now)

    def test_a_change_of_the_load_alone_waits(self) -> None:
        busy = make_observation(make_replica(load=make_load(kv_usage_ratio=0.5)))
        busier = make_observation(make_replica(load=make_load(kv_usage_ratio=0.6)))
        before = compute(busy)
        soon, late = NOW + timedelta(seconds=10), NOW + timedelta(seconds=POLICY.load_only_write_s)
        assert not should_write(before, compute(busier, before, now=soon), soon)
        assert should_write(before, compute(busier, before, now=late), late)

    @pytest.mark.parametrize("stamp", ["above_since", "below_since"])
    def test_since_when_load_is_high_or_low_is_written_once_it_has_lasted_and_its_end_at_once(self, stamp: str) -> None:
        before = compute(LOW)

        def since(moment: datetime | None) -> LLMDeploymentStatus:
            stamps: dict[str, Any] = {"above_since": None, "below_since": None, stamp: moment}
            return replace(before, scaling=replace(before.scaling, **stamps))

        late = NOW + timedelta(seconds=POLICY.stamp_write_s)
        assert not should_write(since(None), since(NOW), late - timedelta(seconds=1))
        assert should_write(since(None), since(NOW), late)
        assert should_write(since(NOW), since(None), NOW)
        assert should_write(since(START), since(NOW), NOW)
        assert not should_write(since(START), since(START), late)

    def test_what_matters_is_written_at_once(self) -> None:
        before = compute(LOW)
        soon = NOW + timedelta(seconds=5)
        assert should_write(before, compute(make_observation(make_replica("a"), LOADING), before, now=soon), soon)
        assert should_write(before, compute(replace(LOW, generation=2), before, now=soon), soon)
        assert should_write(NEVER, before, NOW)


class TestConditionTimes:
    def test_move_with_the_status_only(self) -> None:
        first = set_condition((), "Ready", ConditionStatus.TRUE, reason="A", message="x", generation=1, now=START)
        second = set_condition(first, "Ready", ConditionStatus.TRUE, reason="B", message="y", generation=2, now=NOW)
        third = set_condition(second, "Ready", ConditionStatus.FALSE, reason="B", message="y", generation=2, now=NOW)
        assert [c.last_transition_time for c in (*first, *second, *third)] == [START, START, NOW]
        assert second[0].observed_generation == 2

    def test_keep_the_place_of_the_others(self) -> None:
        conditions = compute(LOW).conditions
        types = [c.type for c in conditions]
        assert types == list(ConditionType)
        assert [c.type for c in compute(make_observation(LOADING), compute(LOW)).conditions] == types


class TestDecisions:
    @staticmethod
    def decision(action: Action = Action.HOLD, reason: str = "AtMaxReplicas", **changes: Any) -> Decision:
        values: dict[str, Any] = {"time": NOW, "loop": Loop.REPLICAS, "before": 2, "after": 2, "message": "m"}
        return Decision(action=action, reason=reason, **{**values, **changes})

    def test_are_bounded_the_newest_kept(self) -> None:
        many = [self.decision(Action.RAISE, after=i) for i in range(50)]
        kept = append_decisions((), many)
        assert [d.after for d in kept] == list(range(50 - MAX_DECISIONS, 50))

    def test_a_hold_that_goes_on_is_told_once(self) -> None:
        later = self.decision(time=NOW + timedelta(minutes=1))
        assert append_decisions([self.decision()], [later]) == (self.decision(),)

    def test_holds_that_take_turns_are_told_once_in_a_while(self) -> None:
        kept: tuple[Decision, ...] = ()
        for minute in range(60):
            reason = "AtMaxReplicas" if minute % 2 else "LoadSkewed"
            kept = append_decisions(kept, [self.decision(reason=reason, time=NOW + timedelta(minutes=minute))])
        assert len(kept) <= 20
        assert [d.time - NOW for d in kept[:3]] == [timedelta(minutes=m) for m in (0, 1, 6)]

    def test_a_hold_of_the_other_loop_does_not_hide_it(self) -> None:
        other = self.decision(loop=Loop.MEMORY, reason="HostOOMKilled")
        assert append_decisions([self.decision(), other], [self.decision()]) == (self.decision(), other)

    def test_a_hold_after_a_change_is_told_again(self) -> None:
        change = self.decision(Action.RAISE, after=3)
        assert len(append_decisions([self.decision(), change], [self.decision()])) == 3


class TestEvents:
    def test_an_unchanged_state_gives_none(self) -> None:  # C13
        first = compute(LOW)
        assert [e.reason for e in compute_events(NEVER, first)] == [Reason.ALL_REPLICAS_READY]
        assert compute_events(first, compute(LOW, first, now=NOW + timedelta(seconds=5))) == ()

    def test_a_permanent_error_is_told_once_an_hour_long(self) -> None:  # C13
        told, status = 0, NEVER
        for minute in range(60):
            now = NOW + timedelta(minutes=minute)
            crashed = make_termination(1, finished_at=now - timedelta(seconds=20), run=minute)
            waiting = "CrashLoopBackOff" if minute % 2 else ""
            pod = make_replica(ready=False, restart_count=minute, waiting_reason=waiting, last_termination=crashed)
            new = compute(make_observation(pod), status, now=now)
            told, status = told + len(compute_events(status, new)), new
        assert told == 1

    def test_trouble_is_a_warning_and_short(self) -> None:
        killed = make_termination(137, reason="OOMKilled", finished_at=NOW)
        status = compute(make_observation(make_replica(ready=False, last_termination=killed)))
        [event] = compute_events(NEVER, status)
        assert (event.type, event.reason) == (EventType.WARNING, Reason.HOST_OOM_KILLED)
        assert len(event.message) <= 512

    def test_a_change_of_replicas_is_told_with_its_reason(self) -> None:
        busy = make_observation(make_replica(load=make_load(kv_usage_ratio=0.95)))
        first = compute(busy)
        grown = compute(busy, first, now=NOW + timedelta(seconds=15))
        [event] = compute_events(first, grown)
        assert (event.type, event.reason) == (EventType.NORMAL, Reason.KV_PRESSURE)
        assert event.message.startswith("replicas 1 to 2: KV usage 0.95")

    def test_a_lowered_cap_is_a_warning(self) -> None:
        oom = make_termination(74, report={"utilization": 0.9, "message": "short"})
        dead = make_observation(make_replica(ready=False, last_termination=oom))
        reasons = {e.reason: e for e in compute_events(NEVER, compute(dead))}
        assert reasons[Reason.DEVICE_OOM_WHILE_SERVING].type is EventType.WARNING


# --- the JSON form

moments = st.integers(0, 10**8).map(lambda s: START + timedelta(seconds=s))
loads = st.builds(
    LoadStatus,
    kv_usage=st.one_of(st.none(), st.floats(0, 1)),
    kv_usage_max=st.one_of(st.none(), st.floats(0, 1)),
    running=st.integers(0, 999),
    waiting=st.integers(0, 999),
    preemptions_per_minute=st.floats(0, 100),
    unknown_replicas=st.integers(0, 9),
    at=moments,
)
plans = st.builds(
    MemoryPlan,
    weights_bytes=st.integers(0, 10**12),
    activations_bytes=st.integers(0, 10**12),
    kv_bytes=st.integers(0, 10**12),
    kv_tokens=st.integers(0, 10**9),
    max_concurrency_at_max_len=st.floats(0, 1000),
)


@settings(deadline=None)
@given(st.one_of(st.none(), loads), st.one_of(st.none(), plans), moments)
def test_the_json_form_loses_nothing(load: LoadStatus | None, plan: MemoryPlan | None, now: datetime) -> None:
    oom = make_termination(71, report={"utilization": 0.9, "message": "short"})
    seen = make_observation(
        make_replica("a", load=make_load(kv_usage_ratio=0.95)), make_replica("b", ready=False, last_termination=oom)
    )
    status = replace(compute(seen, now=now), load=load, plan=plan)
    assert status.decisions
    assert status.tuning is not None
    assert parse_status(json.loads(json.dumps(status.to_dict(), allow_nan=False))) == status


def test_an_absent_status_is_the_empty_one() -> None:
    assert parse_status(None) == parse_status({}) == NEVER


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.sampled_from(sorted(compute(LOW).to_dict())), json_values)
def test_a_status_that_was_edited_is_read_as_far_as_it_goes(key: str, value: object) -> None:
    parse_status({**compute(LOW).to_dict(), key: value})
