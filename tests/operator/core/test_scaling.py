"""The scaling decision: tables for each rule, properties for the promises of the module."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.core.api_types import ScalingMode, ScalingPolicy, ScalingTargets
from kvpilot_operator.core.decisions import Action
from kvpilot_operator.core.observation import DeploymentObservation, ReplicaObservation, Unknown
from kvpilot_operator.core.policy import POLICY
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.scaling import ScalingDecision, decide_scaling
from kvpilot_operator.core.scaling_memory import PreemptionSample, ScalingMemory, parse_scaling_memory
from kvpilot_operator.testing import START, make_load, make_observation, make_replica

NOW = START + timedelta(hours=2)
LONG_AGO = START
SPEC = ScalingPolicy(min_replicas=1, max_replicas=10)
CONFIRMED = ScalingMemory(mode="Auto", above_since=LONG_AGO)
CALM = ScalingMemory(mode="Auto", below_since=LONG_AGO, last_scale_up=LONG_AGO)


def decide(
    observation: DeploymentObservation,
    memory: ScalingMemory = CONFIRMED,
    scaling: ScalingPolicy = SPEC,
    *,
    now: datetime = NOW,
    spec_replicas: int = 1,
    startup_timeout_s: float = 1800.0,
) -> ScalingDecision:
    return decide_scaling(
        scaling, observation, memory, now, spec_replicas=spec_replicas, startup_timeout_s=startup_timeout_s
    )


def replicas(*loads: tuple[float, int] | None) -> tuple[ReplicaObservation, ...]:
    """Ready replicas by (KV usage, waiting); None can't be read."""
    return tuple(
        make_replica(
            f"pod-{i}",
            load=Unknown("Timeout") if load is None else make_load(kv_usage_ratio=load[0], waiting=load[1]),
        )
        for i, load in enumerate(loads)
    )


def pending(name: str = "new", **changes: Any) -> ReplicaObservation:
    return make_replica(name, ready=False, engine=Unknown("NotScraped"), created_at=NOW, **changes)


@pytest.mark.parametrize(
    ("loads", "desired", "reason"),
    [
        pytest.param([(0.5, 0)], 1, Reason.WITHIN_TARGETS, id="below target"),
        pytest.param([(0.95, 0)], 2, Reason.KV_PRESSURE, id="kv above target"),
        pytest.param([(0.32, 200)], 2, Reason.QUEUE_PRESSURE, id="D15: a queue alone, at most doubling"),
        pytest.param([(0.95, 0)] * 4, 5, Reason.KV_PRESSURE, id="to the computed target"),
        pytest.param([(0.3, 6)] * 4, 6, Reason.QUEUE_PRESSURE, id="computed from the queue"),
        pytest.param([(0.4, 0), (0.4, 0)], 2, Reason.WITHIN_TARGETS, id="D14: ratios are not added up"),
        pytest.param([(0.98, 6), (0.2, 0), (0.2, 0), (0.2, 0)], 4, Reason.LOAD_SKEWED, id="D13: a lone hot replica"),
        pytest.param([(0.98, 30), (0.2, 0), (0.2, 0), (0.2, 0)], 5, Reason.QUEUE_PRESSURE, id="D13: with a real queue"),
        pytest.param([(0.98, 0), (0.98, 0), (0.3, 0), (0.3, 0)], 5, Reason.KV_PRESSURE, id="half of them hot"),
        pytest.param([(0.95, 0), (0.95, 0), None], 4, Reason.KV_PRESSURE, id="D1: up from the known ones"),
        pytest.param([(0.95, 0), None], 3, Reason.KV_PRESSURE, id="D1: an unknown one is not idle"),
        pytest.param([(0.05, 0), (0.05, 0), None], 3, Reason.HELD_ON_PARTIAL_METRICS, id="D1: never down on partial"),
        pytest.param([None, None], 2, Reason.METRICS_MISSING, id="all unknown"),
        pytest.param([(0.05, 0), (0.05, 0)], 1, Reason.LOW_LOAD, id="down when one less would do"),
        pytest.param([(0.5, 0), (0.5, 0)], 2, Reason.WITHIN_TARGETS, id="not down: the rest would be above target"),
        pytest.param([(0.05, 0)] * 6, 5, Reason.LOW_LOAD, id="down one at a time"),
        pytest.param([(0.05, 9), (0.05, 0), (0.05, 0)], 3, Reason.LOAD_SKEWED, id="D15: a queue keeps replicas"),
    ],
)
def test_the_load_decides(loads: list[tuple[float, int] | None], desired: int, reason: Reason) -> None:
    memory = replace(CONFIRMED, below_since=LONG_AGO)
    decision = decide(make_observation(*replicas(*loads)), memory)
    assert (decision.desired, decision.reason) == (desired, reason)
    assert decision.replicas == desired


def test_usage_is_weighted_by_the_size_of_the_cache() -> None:  # D14
    small = make_replica("small", load=make_load(kv_usage_ratio=0.1, blocks_total=100))
    large = make_replica("large", load=make_load(kv_usage_ratio=0.9, blocks_total=900))
    decision = decide(make_observation(small, large))
    assert decision.picture.kv_usage_mean == pytest.approx(0.82)
    assert decision.desired == 3


def test_load_must_last_before_replicas_are_added() -> None:
    observation = make_observation(*replicas((0.95, 0)))
    first = decide(observation, ScalingMemory())
    assert (first.desired, first.reason) == (1, Reason.CONFIRMING)
    too_soon = decide(observation, first.memory, now=NOW + timedelta(seconds=5))
    assert too_soon.desired == 1
    lasting = decide(observation, too_soon.memory, now=NOW + timedelta(seconds=POLICY.confirm_up_s))
    assert (lasting.desired, lasting.reason) == (2, Reason.KV_PRESSURE)


def test_a_pause_in_the_load_starts_the_confirmation_anew() -> None:
    calm = decide(make_observation(*replicas((0.3, 0))), CONFIRMED)
    assert calm.memory.above_since is None


def test_replicas_that_were_asked_for_count_as_coming() -> None:  # D3
    memory, asked = CONFIRMED, []
    observation = make_observation(*replicas((0.95, 30)))
    for cycle in range(20):
        decision = decide(observation, memory, now=NOW + timedelta(seconds=15 * cycle))
        memory = replace(decision.memory, above_since=LONG_AGO)
        asked.append(decision.desired)
        observation = make_observation(*replicas((0.95, 30)), pending(), replicas_wanted=decision.desired)
    assert set(asked) == {2}
    assert decision.reason is Reason.HELD_WHILE_PENDING


def test_a_replica_that_never_comes_stops_holding_growth_after_the_startup_timeout() -> None:
    observation = make_observation(*replicas((0.97, 40)), pending())
    memory = replace(CONFIRMED, last_scale_up=NOW - timedelta(seconds=1800))
    assert decide(observation, memory).desired == 4
    assert decide(observation, replace(memory, last_scale_up=NOW - timedelta(seconds=1799))).desired == 2


def test_a_loading_replica_that_was_not_asked_for_does_not_stop_growth() -> None:  # D2
    observation = make_observation(*replicas((0.97, 40)), pending())
    decision = decide(observation, CONFIRMED)
    assert (decision.desired, decision.reason) == (4, Reason.QUEUE_PRESSURE)


def test_a_loading_replica_counts_as_idle_when_growing() -> None:  # D2
    observation = make_observation(*replicas((0.97, 0)), pending())
    assert decide(observation, CONFIRMED).desired == 2


def test_a_loading_replica_keeps_the_count() -> None:  # D2
    observation = make_observation(*replicas((0.01, 0), (0.01, 0)), pending())
    decision = decide(observation, CALM)
    assert (decision.desired, decision.reason) == (3, Reason.HELD_WHILE_PENDING)


def test_nothing_more_is_asked_for_while_a_replica_can_not_be_placed() -> None:  # D3
    stuck = make_replica("stuck", ready=False, scheduled=False, unschedulable_message="0/1 nodes: Insufficient gpu")
    for loads in ([(0.97, 40)], [(0.5, 0)]):
        decision = decide(make_observation(*replicas(*loads), stuck), CONFIRMED)
        assert (decision.desired, decision.reason) == (2, Reason.UNSCHEDULABLE)
        assert "Insufficient gpu" in decision.message


def test_a_replica_that_can_not_be_placed_does_not_hold_idle_ones_for_ever() -> None:
    stuck = make_replica("stuck", ready=False, scheduled=False, unschedulable_message="0/1 nodes")
    observation = make_observation(*replicas((0.0, 0), (0.0, 0)), stuck)
    waiting = decide(observation, ScalingMemory(last_scale_up=LONG_AGO))
    assert (waiting.desired, waiting.reason) == (3, Reason.UNSCHEDULABLE)
    later = NOW + timedelta(seconds=SPEC.scale_down_stabilization_seconds)
    lowered = decide(observation, waiting.memory, now=later)
    assert (lowered.desired, lowered.reason) == (2, Reason.LOW_LOAD)


def test_the_scheduler_gets_a_moment() -> None:
    fresh = pending("fresh", scheduled=False, unschedulable_message="0/1 nodes")
    assert decide(make_observation(*replicas((0.5, 0)), fresh), CONFIRMED).reason is Reason.HELD_WHILE_PENDING


def test_the_count_is_held_while_no_replica_is_ready() -> None:  # D4
    unready = [make_replica(f"pod-{i}", ready=False) for i in range(4)]
    decision = decide(make_observation(*unready), CALM)
    assert (decision.desired, decision.reason) == (4, Reason.HELD_WHILE_UNREADY)


def test_a_stale_load_is_unknown() -> None:  # D6
    old = make_replica("old", load=make_load(kv_usage_ratio=0.99, age_s=POLICY.stale_after_s + 1))
    decision = decide(make_observation(old), CONFIRMED)
    assert (decision.desired, decision.reason) == (1, Reason.METRICS_STALE)


def test_the_maximum_is_said_when_it_binds() -> None:
    decision = decide(make_observation(*replicas((0.95, 0), (0.95, 0))), scaling=replace(SPEC, max_replicas=2))
    assert (decision.desired, decision.reason) == (2, Reason.AT_MAX_REPLICAS)
    assert decision.record is not None
    assert decision.record.action is Action.HOLD


@pytest.mark.parametrize(("low", "high", "expected"), [(3, 5, 3), (1, 1, 1)])
def test_changed_bounds_hold_at_once(low: int, high: int, expected: int) -> None:
    decision = decide(
        make_observation(*replicas(None, None)), scaling=replace(SPEC, min_replicas=low, max_replicas=high)
    )
    assert (decision.desired, decision.reason) == (expected, Reason.OUTSIDE_BOUNDS)


def test_replicas_go_down_once_in_a_window() -> None:
    observation = make_observation(*replicas((0.0, 0), (0.0, 0), (0.0, 0)))
    first = decide(observation, ScalingMemory())
    assert (first.desired, first.reason) == (3, Reason.STABILIZING)
    at_window = NOW + timedelta(seconds=SPEC.scale_down_stabilization_seconds)
    lowered = decide(observation, first.memory, now=at_window)
    assert lowered.desired == 2
    rest = make_observation(*replicas((0.0, 0), (0.0, 0)))
    assert decide(rest, lowered.memory, now=at_window + timedelta(seconds=299)).desired == 2
    held = decide(rest, lowered.memory, now=at_window + timedelta(seconds=5))
    assert decide(rest, held.memory, now=at_window + timedelta(seconds=310)).desired == 1


def test_a_peak_inside_the_window_starts_it_anew() -> None:
    observation = make_observation(*replicas((0.7, 0), (0.7, 0)))
    assert decide(observation, CALM).memory.below_since is None


def test_a_reading_that_is_missing_once_does_not_start_the_window_anew() -> None:
    decision = decide(make_observation(*replicas((0.0, 0), (0.0, 0), None)), CALM)
    assert decision.memory.below_since == LONG_AGO


def test_time_stamps_of_the_future_do_not_hold_for_ever() -> None:
    memory = replace(CALM, last_scale_up=NOW + timedelta(days=30))
    observation = make_observation(*replicas((0.0, 0), (0.0, 0)))
    held = decide(observation, memory)
    later = NOW + timedelta(seconds=SPEC.scale_down_stabilization_seconds)
    assert held.desired == 2
    assert decide(observation, held.memory, now=later).desired == 1


def test_preemptions_ask_for_replicas() -> None:
    memory, wanted = ScalingMemory(), 0
    for second in range(0, 60, 5):
        load = make_load(kv_usage_ratio=0.75, preemptions_total=second)
        decision = decide(make_observation(make_replica(load=load)), memory, now=NOW + timedelta(seconds=second))
        memory, wanted = decision.memory, max(wanted, decision.desired)
    assert (wanted, decision.reason) == (2, Reason.PREEMPTION_PRESSURE)
    assert decision.picture.preemptions_per_minute == pytest.approx(60.0)


def test_a_burst_after_a_quiet_time_is_not_spread_over_it() -> None:
    quiet = make_observation(make_replica(load=make_load(preemptions_total=3)))
    memory = decide(quiet, ScalingMemory()).memory
    later = NOW + timedelta(days=1)
    assert decide(quiet, memory, now=later).memory.samples == memory.samples
    burst = make_observation(make_replica(load=make_load(preemptions_total=13)))
    assert decide(burst, memory, now=later).picture.preemptions_per_minute == pytest.approx(20.0)


def test_preemptions_that_stop_leave_no_rate() -> None:
    load = make_load(preemptions_total=13)
    sample = PreemptionSample(pod_uid="uid-pod-0", total=13, at=NOW - timedelta(seconds=20), per_minute=40.0)
    decision = decide(make_observation(make_replica(load=load)), ScalingMemory(samples=(sample,)))
    assert decision.picture.preemptions_per_minute == 0.0


def test_a_restarted_counter_is_no_rate() -> None:
    memory = decide(make_observation(make_replica(load=make_load(preemptions_total=500)))).memory
    restarted = make_observation(make_replica(load=make_load(preemptions_total=3)))
    decision = decide(restarted, memory, now=NOW + timedelta(seconds=60))
    assert decision.picture.preemptions_per_minute == 0.0
    assert decision.memory.samples[0].per_minute is None


def test_a_missing_deployment_starts_at_the_objects_count_or_where_it_was() -> None:
    nothing = make_observation(replicas_wanted=None)
    assert decide(nothing, ScalingMemory(), spec_replicas=3).replicas == 3
    assert decide(nothing, ScalingMemory(desired=5), spec_replicas=3).replicas == 5
    assert decide(nothing, ScalingMemory(), spec_replicas=50).replicas == SPEC.max_replicas


class TestExternalScaler:
    external = replace(SPEC, mode=ScalingMode.EXTERNAL)

    def test_the_object_is_followed_and_the_recommendation_published(self) -> None:
        memory = replace(CONFIRMED, mode="External")
        decision = decide(make_observation(*replicas((0.95, 0))), memory, self.external, spec_replicas=7)
        assert (decision.desired, decision.replicas, decision.adopt) == (2, 7, None)
        assert decision.reason is Reason.EXTERNAL_SCALER
        assert "asks for 2" in decision.message

    def test_the_recommendation_stays_while_nobody_acts(self) -> None:
        memory = replace(CONFIRMED, mode="External")
        observation = make_observation(*replicas((0.95, 0)))
        first = decide(observation, memory, self.external)
        second = decide(observation, first.memory, self.external, now=NOW + timedelta(seconds=5))
        assert first.desired == second.desired == 2

    def test_what_runs_is_handed_over_first(self) -> None:
        memory = replace(CONFIRMED, mode="Auto", desired=3)
        observation = make_observation(*replicas((0.5, 0), (0.5, 0), (0.5, 0)))
        entering = decide(observation, memory, self.external, spec_replicas=1)
        assert (entering.adopt, entering.replicas) == (3, None)
        assert decide(observation, entering.memory, self.external, spec_replicas=1).adopt == 3
        taken = decide(observation, entering.memory, self.external, spec_replicas=3)
        assert (taken.adopt, taken.replicas, taken.memory.mode) == (None, 3, "External")
        assert decide(observation, taken.memory, self.external, spec_replicas=0).replicas == 0

    def test_a_foreign_autoscaler_on_our_deployment_stops_writing(self) -> None:
        observation = make_observation(*replicas((0.95, 0)), foreign_scaler="hpa-1")
        decision = decide(observation)
        assert (decision.replicas, decision.reason) == (None, Reason.EXTERNAL_SCALER)
        assert "hpa-1" in decision.message


def test_holds_that_mean_nothing_are_not_recorded() -> None:
    assert decide(make_observation(*replicas((0.5, 0)))).record is None


def test_a_record_carries_the_numbers() -> None:
    record = decide(make_observation(*replicas((0.95, 2)))).record
    assert record is not None
    assert (record.action, record.before, record.after) == (Action.RAISE, 1, 2)
    assert record.inputs["kvUsage"] == 0.95
    assert record.inputs["waiting"] == 2


# --- properties

ratios = st.floats(0.0, 1.0, allow_nan=False)
a_load = st.tuples(ratios, st.integers(0, 60))
a_replica = st.one_of(a_load, a_load, a_load, st.none(), st.just("pending"))
moments = st.one_of(st.none(), st.integers(0, 7200).map(lambda s: NOW - timedelta(seconds=s)))
memories = st.builds(
    ScalingMemory,
    mode=st.just("Auto"),
    last_scale_up=moments,
    last_scale_down=moments,
    above_since=moments,
    below_since=moments,
)
policies = st.builds(
    lambda low, more, kv, waiting, window: ScalingPolicy(
        min_replicas=low,
        max_replicas=low + more,
        targets=ScalingTargets(kv_usage=kv, waiting_per_replica=waiting),
        scale_down_stabilization_seconds=window,
    ),
    st.integers(1, 4),
    st.integers(0, 8),
    st.floats(0.3, 1.0),
    st.integers(1, 20),
    st.integers(0, 600),
)


def build(kinds: list[Any], wanted: int) -> DeploymentObservation:
    made = []
    for i, kind in enumerate(kinds):
        if kind == "pending":
            made.append(pending(f"pod-{i}"))
        else:
            made.extend(replace(r, name=f"pod-{i}", uid=f"uid-{i}") for r in replicas(kind))
    return make_observation(*made, replicas_wanted=wanted)


@settings(deadline=None)
@given(policies, st.lists(a_replica, max_size=8), st.integers(0, 12), memories)
def test_result_is_within_bounds(scaling: ScalingPolicy, kinds: list[Any], wanted: int, memory: ScalingMemory) -> None:
    decision = decide(build(kinds, wanted), memory, scaling)
    assert scaling.min_replicas <= decision.desired <= scaling.max_replicas


@settings(deadline=None)
@given(policies, st.lists(a_replica, min_size=1, max_size=8), memories)
def test_nothing_unknown_or_unready_ever_lowers(
    scaling: ScalingPolicy, kinds: list[Any], memory: ScalingMemory
) -> None:
    observation = build(kinds, len(kinds))
    decision = decide(observation, memory, scaling)
    if observation.coverage < 1.0 and len(kinds) <= scaling.max_replicas:
        assert decision.desired >= len(kinds)


@settings(deadline=None)
@given(policies, st.lists(a_load, min_size=1, max_size=8), memories)
def test_never_lowered_inside_the_window_of_a_change(
    scaling: ScalingPolicy, loads: list[Any], memory: ScalingMemory
) -> None:
    changes = [t for t in (memory.last_scale_down, memory.last_scale_up) if t is not None]
    decision = decide(build(loads, len(loads)), memory, scaling)
    if decision.desired < min(len(loads), scaling.max_replicas):
        assert decision.desired == len(loads) - 1
        assert all((NOW - t).total_seconds() >= scaling.scale_down_stabilization_seconds for t in changes)


@settings(deadline=None)
@given(policies, st.lists(a_load, min_size=1, max_size=8), memories, st.data())
def test_more_load_never_gives_fewer_replicas(
    scaling: ScalingPolicy, loads: list[tuple[float, int]], memory: ScalingMemory, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(loads) - 1))
    usage, waiting = loads[index]
    heavier = list(loads)
    heavier[index] = (data.draw(st.floats(usage, 1.0)), waiting + data.draw(st.integers(0, 40)))
    before = decide(build(list(loads), len(loads)), memory, scaling)
    after = decide(build(heavier, len(loads)), memory, scaling)
    assert after.desired >= before.desired


@settings(deadline=None)
@given(policies, st.lists(a_replica, min_size=1, max_size=8), memories)
def test_deciding_again_after_applying_changes_nothing(
    scaling: ScalingPolicy, kinds: list[Any], memory: ScalingMemory
) -> None:
    observation = build(kinds, len(kinds))
    first = decide(observation, memory, scaling)
    assert decide(observation, memory, scaling) == first
    applied = replace(observation, replicas_wanted=first.desired)
    second = decide(applied, first.memory, scaling)
    if scaling.scale_down_stabilization_seconds > 0:
        assert second.desired == first.desired


@settings(deadline=None)
@given(memories)
def test_memory_survives_a_restart(memory: ScalingMemory) -> None:
    decision = decide(make_observation(*replicas((0.9, 3), (0.2, 0))), memory)
    assert parse_scaling_memory(decision.memory.to_dict()) == decision.memory
