"""How many replicas: facts and memory in, one decision with its reason out.

Writes nothing and reads no clock. Invariants: the result lies within the bounds of the spec; nothing unknown or
still coming ever lowers it; it never grows while what it asked for is coming; it shrinks one at a time, at most once
in a stabilization window. More load never gives fewer replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from kvpilot_operator.core.api_types import ScalingMode, ScalingPolicy
from kvpilot_operator.core.decisions import Action, Decision, Input, Loop
from kvpilot_operator.core.load import LoadPicture, measure_load, sample_preemptions
from kvpilot_operator.core.observation import DeploymentObservation
from kvpilot_operator.core.policy import POLICY, PolicyConstants
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.scaling_memory import ScalingMemory
from kvpilot_operator.core.timestamps import seconds_since

_NOT_RECORDED = frozenset({Reason.WITHIN_TARGETS, Reason.CONFIRMING, Reason.STARTING, Reason.HELD_WHILE_UNREADY})
"""Holds that are the normal course of things; recording them would push the telling ones out of the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    desired: int
    """What the load asks for: `status.desiredReplicas`. With External only a recommendation."""
    replicas: int | None
    """What to write to the Deployment's scale; None: leave it alone."""
    adopt: int | None
    """Write this to `spec.replicas` of the object before anything else: External was just switched on."""
    reason: Reason
    message: str
    inputs: Mapping[str, Input]
    picture: LoadPicture
    memory: ScalingMemory
    record: Decision | None
    """For `status.decisions`; None when there is nothing to tell."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    desired: int
    reason: Reason
    message: str
    above: bool = False
    """Load asks for more, whether or not it is given."""
    below: bool | None = False
    """One replica less would do; None: this pass can't tell, keep what was known."""


def decide_scaling(
    scaling: ScalingPolicy,
    observation: DeploymentObservation,
    memory: ScalingMemory,
    now: datetime,
    *,
    spec_replicas: int,
    startup_timeout_s: float,
    policy: PolicyConstants = POLICY,
) -> ScalingDecision:
    """`spec_replicas` is the object's own count (start value in Auto, the writer's word in External)."""
    memory = memory.not_after(now)
    samples = sample_preemptions(observation, memory.samples, now, policy)
    picture = measure_load(observation, scaling.targets, samples, policy)
    is_auto = scaling.mode is ScalingMode.AUTO
    current = observation.replicas_wanted
    if current is None:
        start = _clamp(memory.desired or spec_replicas, scaling) if is_auto else spec_replicas
        verdict = _Verdict(start, Reason.STARTING, f"starting with {start}")
        base = start
    else:
        base = current
        verdict = _Judge(scaling, observation, picture, memory, now, startup_timeout_s, policy, current).judge()
    inputs = _inputs(base, observation, picture)
    is_growing = memory.growing_from is not None and observation.num_ready < base
    next_memory = replace(
        memory,
        growing_from=memory.growing_from if is_growing else None,
        samples=samples,
        above_since=(memory.above_since or now) if verdict.above else None,
        below_since=_below_since(verdict, memory, now),
    )
    decision = ScalingDecision(
        desired=verdict.desired,
        replicas=verdict.desired,
        adopt=None,
        reason=verdict.reason,
        message=verdict.message,
        inputs=inputs,
        picture=picture,
        memory=next_memory,
        record=_record(verdict, base, inputs, now),
    )
    if is_auto and not observation.foreign_scaler:
        return _in_auto(decision, base, now)
    return _hands_off(decision, observation, spec_replicas, is_auto=is_auto)


def _in_auto(decision: ScalingDecision, base: int, now: datetime) -> ScalingDecision:
    memory = replace(decision.memory, mode=ScalingMode.AUTO, desired=decision.desired)
    if decision.desired > base:
        # New bounds are the user's word: less than they ask for is not all that was asked for.
        asked_by_load = decision.reason is not Reason.OUTSIDE_BOUNDS
        grown_from = base if memory.growing_from is None else memory.growing_from
        memory = replace(memory, growing_from=grown_from if asked_by_load else None)
        memory = replace(memory, last_scale_up=now, above_since=None, below_since=None)
    elif decision.desired < base:
        memory = replace(memory, last_scale_down=now, growing_from=None, above_since=None, below_since=None)
    return replace(decision, memory=memory)


def _hands_off(
    decision: ScalingDecision, observation: DeploymentObservation, spec_replicas: int, *, is_auto: bool
) -> ScalingDecision:
    """Somebody else sets the replicas: follow the object (External) or nobody (an HPA on our Deployment)."""
    decision = replace(decision, memory=replace(decision.memory, growing_from=None))
    current = observation.replicas_wanted
    advice = f"the load asks for {decision.desired} ({decision.message})"
    if observation.foreign_scaler:
        message = f"HorizontalPodAutoscaler {observation.foreign_scaler} writes the Deployment's replicas; {advice}"
        return replace(decision, replicas=None, reason=Reason.EXTERNAL_SCALER, message=message, record=None)
    message = f"spec.replicas is set from outside; {advice}"
    decision = replace(decision, reason=Reason.EXTERNAL_SCALER, message=message, record=None)
    was_auto = decision.memory.mode == ScalingMode.AUTO and not is_auto
    if was_auto and current is not None and current != spec_replicas:
        # The object still holds the start value: obeying it now would drop what runs.
        return replace(decision, replicas=None, adopt=current)
    memory = replace(decision.memory, mode=ScalingMode.EXTERNAL, desired=decision.desired)
    return replace(decision, replicas=spec_replicas, memory=memory)


@dataclass(frozen=True, slots=True)
class _Judge:
    """One pass over one Deployment; a class only to name the facts that each rule looks at."""

    scaling: ScalingPolicy
    observation: DeploymentObservation
    picture: LoadPicture
    memory: ScalingMemory
    now: datetime
    startup_timeout_s: float
    policy: PolicyConstants
    current: int

    def judge(self) -> _Verdict:
        bounded = _clamp(self.current, self.scaling)
        if bounded != self.current:
            low, high = self.scaling.min_replicas, self.scaling.max_replicas
            return _Verdict(bounded, Reason.OUTSIDE_BOUNDS, f"scaling allows {low} to {high} replicas")
        if not self.picture.known:
            return self._blind()
        if (wanted := self._wanted_growth()) is not None:
            return self._grow(wanted)
        return self._rest()

    @property
    def _coming(self) -> int:
        return max(self.current, len(self.observation.live)) - self.observation.num_ready

    @property
    def _unschedulable(self) -> str:
        """What the scheduler says of a pod that it has been unable to place for long enough."""
        for replica in self.observation.live:
            if replica.scheduled or not replica.unschedulable_message:
                continue
            if replica.created_at is None:
                continue
            if seconds_since(replica.created_at, self.now) >= self.policy.unschedulable_after_s:
                return replica.unschedulable_message
        return ""

    def _blind(self) -> _Verdict:
        if self.observation.num_ready == 0:
            if message := self._unschedulable:
                return _Verdict(self.current, Reason.UNSCHEDULABLE, f"no replica is ready; {message}")
            return _Verdict(self.current, Reason.HELD_WHILE_UNREADY, "no replica is ready, so the load is unknown")
        reasons = {reason for _, reason in self.picture.unknown}
        reason = Reason.METRICS_STALE if reasons == {Reason.METRICS_STALE} else Reason.METRICS_MISSING
        count = len(self.picture.unknown)
        message = f"the load of all {count} ready replicas is unknown: {', '.join(sorted(reasons))}"
        return _Verdict(self.current, reason, message, below=None)

    def _wanted_growth(self) -> int | None:
        """Replicas that the load asks for when that is more than there are, the coming ones counted as idle."""
        picture, hot = self.picture, self.picture.hot
        if picture.demand > self.current:
            if len(hot) == 1 and len(picture.known) > 1:
                return self.current + 1  # one hot replica among calm ones: more replicas may not relieve it
            return min(math.ceil(picture.demand), self.current * self.policy.max_growth)
        # The mean hides hot replicas; two or more, half of them at least, are not bad luck of routing.
        if len(hot) >= 2 and 2 * len(hot) >= self.observation.num_ready and self._coming == 0:
            return self.current + 1
        return None

    def _grow(self, wanted: int) -> _Verdict:
        load = self._tell_load()
        if self.current >= self.scaling.max_replicas:
            message = f"{load}; {self.current} replicas are all that scaling.maxReplicas allows"
            return _Verdict(self.current, Reason.AT_MAX_REPLICAS, message, above=True)
        if message := self._unschedulable:
            message = f"{load}; a replica can't be placed: {message}"
            return _Verdict(self.current, Reason.UNSCHEDULABLE, message, above=True)
        if self._is_expecting:
            message = f"{load}; {self._coming} more replicas were asked for and are not ready yet"
            return _Verdict(self.current, Reason.HELD_WHILE_PENDING, message, above=True)
        since = self.memory.above_since
        if since is None or seconds_since(since, self.now) < self.policy.confirm_up_s:
            message = f"{load}; waiting {self.policy.confirm_up_s:g} s to see it last"
            return _Verdict(self.current, Reason.CONFIRMING, message, above=True)
        desired = _clamp(wanted, self.scaling)
        return _Verdict(desired, self.picture.dominant, load, above=True)

    @property
    def _is_expecting(self) -> bool:
        """Replicas that we asked for are on their way; others that are not ready (a restart) don't hold growth back."""
        asked = self.memory.last_scale_up
        return self._coming > 0 and asked is not None and seconds_since(asked, self.now) < self.startup_timeout_s

    def _rest(self) -> _Verdict:
        """Not to grow: whether one less would do, and if not lowered, why."""
        load, coming = self._tell_load(), self._coming
        if self.picture.unknown:
            names = ", ".join(f"{name} ({reason})" for name, reason in self.picture.unknown)
            message = f"{load}; replicas are not lowered while some are unknown: {names}"
            return _Verdict(
                self.current, Reason.HELD_ON_PARTIAL_METRICS, message, below=None if self._is_low else False
            )
        blocked = self._unschedulable
        if coming > 0 and not blocked:
            message = f"{load}; {coming} of {self.current} replicas are not ready yet"
            return _Verdict(self.current, Reason.HELD_WHILE_PENDING, message)
        if blocked and (not self._is_low or self._window_left > 0):
            message = f"{load}; a replica can't be placed: {blocked}"
            return _Verdict(self.current, Reason.UNSCHEDULABLE, message, below=self._is_low)
        if not self._is_low:
            if self.picture.hot:
                hottest = max(self.picture.hot, key=lambda r: r.highest)
                message = f"{load}; only {hottest.name} is above target: requests are unevenly spread"
                return _Verdict(self.current, Reason.LOAD_SKEWED, message)
            return _Verdict(self.current, Reason.WITHIN_TARGETS, load)
        left = self._window_left
        if left > 0:
            message = f"{load}; one replica less would do, lowered once this has held for the stabilization window"
            return _Verdict(self.current, Reason.STABILIZING, message, below=True)
        message = f"{load}; the rest stays below target with one replica less"
        return _Verdict(self.current - 1, Reason.LOW_LOAD, message, below=True)

    @property
    def _is_low(self) -> bool:
        rest = self.current - 1
        if rest < max(1, self.scaling.min_replicas) or self.picture.hot:
            return False
        # What is not ready counts as at target. It holds the number anyway, unless it can't be placed at all: such a
        # replica serves nobody and would hold idle ones for ever.
        return (self.picture.demand + self._coming) / rest <= self.policy.down_headroom

    @property
    def _window_left(self) -> float:
        starts = [self.memory.below_since or self.now, self.memory.last_scale_up, self.memory.last_scale_down]
        waited = min(seconds_since(start, self.now) for start in starts if start is not None)
        return self.scaling.scale_down_stabilization_seconds - waited

    def _tell_load(self) -> str:
        picture, targets = self.picture, self.scaling.targets
        mean, highest = picture.kv_usage_mean or 0.0, picture.kv_usage_max or 0.0
        text = (
            f"KV usage {mean:.2f}, highest {highest:.2f} (target {targets.kv_usage:g}),"
            f" {picture.waiting} waiting (target {targets.waiting_per_replica} each)"
        )
        if picture.preemptions_per_minute > 0:
            text += f", {picture.preemptions_per_minute:.1f} preemptions a minute"
        return text


def _clamp(replicas: int, scaling: ScalingPolicy) -> int:
    return max(scaling.min_replicas, min(replicas, scaling.max_replicas))


def _below_since(verdict: _Verdict, memory: ScalingMemory, now: datetime) -> datetime | None:
    if verdict.below is None:
        return memory.below_since
    return (memory.below_since or now) if verdict.below else None


def _inputs(current: int, observation: DeploymentObservation, picture: LoadPicture) -> dict[str, Input]:
    inputs: dict[str, Input] = {
        "current": current,
        "ready": observation.num_ready,
        "unknown": len(picture.unknown),
        "running": picture.running,
        "waiting": picture.waiting,
        "preemptionsPerMinute": round(picture.preemptions_per_minute, 1),
        "demand": round(picture.demand, 2),
    }
    if picture.kv_usage_mean is not None and picture.kv_usage_max is not None:
        inputs |= {"kvUsage": round(picture.kv_usage_mean, 2), "kvUsageMax": round(picture.kv_usage_max, 2)}
    return inputs


def _record(verdict: _Verdict, base: int, inputs: Mapping[str, Input], now: datetime) -> Decision | None:
    if verdict.desired == base and verdict.reason in _NOT_RECORDED:
        return None
    action = Action.HOLD if verdict.desired == base else Action.RAISE if verdict.desired > base else Action.LOWER
    return Decision(
        time=now,
        loop=Loop.REPLICAS,
        action=action,
        reason=verdict.reason,
        before=base,
        after=verdict.desired,
        message=verdict.message,
        inputs=inputs,
    )
