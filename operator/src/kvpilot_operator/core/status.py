"""The status of an LLMDeployment from what was seen and decided in one pass.

Writes nothing and decides nothing about the cluster. Invariants: Ready speaks of the current generation only, is never
true in a loop of memory kills, and is not lost by adding replicas to those that serve; a condition's time moves with
its status only; an unchanged world gives an equal status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from kvpilot_operator.core.api_status import LLMDeploymentStatus, LoadStatus, MemoryPlan
from kvpilot_operator.core.conditions import Condition, ConditionStatus, ConditionType, set_condition
from kvpilot_operator.core.decisions import append_decisions
from kvpilot_operator.core.diagnosis import Problem
from kvpilot_operator.core.load import LoadPicture
from kvpilot_operator.core.memory import MemoryDecision
from kvpilot_operator.core.observation import DeploymentObservation, EngineMemory
from kvpilot_operator.core.policy import POLICY, PolicyConstants
from kvpilot_operator.core.reasons import Phase, Reason
from kvpilot_operator.core.scaling import ScalingDecision
from kvpilot_operator.core.timestamps import seconds_since

_INACTIVE_SCALING = frozenset(
    {Reason.EXTERNAL_SCALER, Reason.METRICS_MISSING, Reason.METRICS_STALE, Reason.HELD_WHILE_UNREADY}
)
_WITH_FIGURES = frozenset({ConditionType.SCALING_ACTIVE, ConditionType.METRICS_AVAILABLE, ConditionType.MEMORY_TUNED})
"""Conditions whose message tells moving figures: its wording alone is no reason to write."""

_FICKLE = frozenset(
    {Reason.WITHIN_TARGETS, Reason.CONFIRMING, Reason.STABILIZING, Reason.LOAD_SKEWED, Reason.AT_MAX_REPLICAS}
)
"""Reasons that take turns while load hovers; those worth telling at once are decisions, and written as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """What the shell knows of the object beside its load."""

    selector: str
    image: str
    template: str
    """Hash of the pod template in use; pods with another one are yet to be replaced."""
    update: str = ""
    """Hash that the operator would render now; empty when it is the one in use."""
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: ConditionStatus
    reason: str
    message: str


def compute_status(
    observation: DeploymentObservation,
    scaling: ScalingDecision,
    memory: MemoryDecision,
    problems: Sequence[Problem],
    rendering: Rendering,
    previous: LLMDeploymentStatus,
    now: datetime,
) -> LLMDeploymentStatus:
    """`problems` in order of importance (`diagnosis.rank_problems`)."""
    readiness = _Readiness.of(observation, scaling, problems, rendering)
    verdicts = {
        ConditionType.READY: readiness.ready,
        ConditionType.PROGRESSING: readiness.progressing,
        ConditionType.METRICS_AVAILABLE: _metrics(scaling.picture),
        ConditionType.SCALING_ACTIVE: _scaling_active(scaling, rendering),
        ConditionType.MEMORY_TUNED: _memory_tuned(memory, observation),
        ConditionType.DEGRADED: _degraded(problems),
        ConditionType.UPDATE_AVAILABLE: _update_available(rendering),
    }
    records = [*memory.records, *([scaling.record] if scaling.record is not None else [])]
    return LLMDeploymentStatus(
        observed_generation=observation.generation,
        replicas=len(observation.live),
        ready_replicas=observation.num_ready,
        desired_replicas=scaling.desired,
        selector=rendering.selector,
        phase=readiness.phase,
        image=rendering.image,
        template=rendering.template,
        conditions=_set_all(previous.conditions, verdicts, observation.generation, now),
        load=_load(scaling.picture, now),
        tuning=memory.memory,
        applied_replicas=memory.applied,
        plan=_plan(observation) or previous.plan,
        scaling=scaling.memory,
        decisions=append_decisions(previous.decisions, records),
    )


def compute_invalid_status(
    previous: LLMDeploymentStatus, generation: int, message: str, now: datetime
) -> LLMDeploymentStatus:
    """The spec can't be understood: nothing is touched, and the object says so."""
    invalid = Reason.INVALID_SPEC
    verdicts = {
        ConditionType.READY: _Verdict(ConditionStatus.FALSE, invalid, message),
        ConditionType.PROGRESSING: _Verdict(ConditionStatus.FALSE, invalid, message),
        ConditionType.DEGRADED: _Verdict(ConditionStatus.TRUE, invalid, message),
    }
    conditions = _set_all(previous.conditions, verdicts, generation, now)
    return replace(previous, observed_generation=generation, phase=Phase.INVALID, conditions=conditions)


def should_write(
    previous: LLMDeploymentStatus, new: LLMDeploymentStatus, now: datetime, *, policy: PolicyConstants = POLICY
) -> bool:
    """Whether the object should be written: at once for what matters, rarely for what moves with the load."""
    if _what_matters(previous) != _what_matters(new):
        return True
    before, after = previous.scaling, new.scaling
    if any(
        _is_stamp_due(*stamps, now, policy)
        for stamps in ((before.above_since, after.above_since), (before.below_since, after.below_since))
    ):
        return True
    if previous.load is None or new.load is None:
        return previous.load != new.load
    if replace(previous, load=replace(previous.load, at=new.load.at)) == new:
        return False
    return seconds_since(previous.load.at, now) >= policy.load_only_write_s


def _what_matters(status: LLMDeploymentStatus) -> LLMDeploymentStatus:
    return replace(
        status,
        load=None,
        plan=None,
        scaling=replace(status.scaling, above_since=None, below_since=None, samples=()),
        conditions=tuple(_without_figures(condition) for condition in status.conditions),
    )


def _without_figures(condition: Condition) -> Condition:
    if condition.type not in _WITH_FIGURES:
        return condition
    return replace(condition, reason="" if condition.reason in _FICKLE else condition.reason, message="")


def _is_stamp_due(before: datetime | None, after: datetime | None, now: datetime, policy: PolicyConstants) -> bool:
    """An end at once, or a restart would count a time that was interrupted; a beginning when it has lasted."""
    if before is not None:
        return after != before
    return after is not None and seconds_since(after, now) >= policy.stamp_write_s


@dataclass(frozen=True, slots=True)
class _Readiness:
    ready: _Verdict
    progressing: _Verdict
    phase: Phase

    @classmethod
    def of(
        cls,
        observation: DeploymentObservation,
        scaling: ScalingDecision,
        problems: Sequence[Problem],
        rendering: Rendering,
    ) -> _Readiness:
        wanted = scaling.replicas if scaling.replicas is not None else (observation.replicas_wanted or 0)
        live = observation.live
        updated = [r for r in live if not rendering.template or r.template_hash == rendering.template]
        num_updated_ready = sum(1 for r in updated if r.ready)
        is_rolling = len(updated) < len(live) or not observation.deployment_observed_generation_is_current
        # What we add to replicas that serve takes nothing from anybody: growth is told by Progressing. It ends as one:
        # a new replica that crashes, or can't start in time, is a failure like any other.
        served = scaling.memory.growing_from
        is_growing = served is not None and len(updated) == len(live) and served <= num_updated_ready < wanted
        harmless = {Reason.UNSCHEDULABLE} if is_growing else set()
        blocker = next((p for p in problems if p.stops_ready and p.reason not in harmless), None)
        is_complete = wanted > 0 and num_updated_ready >= wanted and not is_rolling
        count = f"{num_updated_ready} of {wanted} replicas are ready"

        if is_complete and blocker is None:
            ready = _Verdict(ConditionStatus.TRUE, Reason.ALL_REPLICAS_READY, count)
            is_settled = len(live) == wanted
            moving = _Verdict(ConditionStatus.TRUE, Reason.SCALING_DOWN, f"{len(live)} pods, {wanted} wanted")
            progressing = _Verdict(ConditionStatus.FALSE, Reason.SETTLED, count) if is_settled else moving
            phase = Phase.READY
        elif is_growing and blocker is None:
            ready = _Verdict(ConditionStatus.TRUE, Reason.SCALING_UP, f"{count}; the load asked for more than {served}")
            reason = _why_incomplete(observation, problems, is_rolling=False, wanted=wanted)
            told = count if not problems else f"{count}; {problems[0].message}"
            is_stuck = any(p.reason in harmless for p in problems)
            progressing = _Verdict(ConditionStatus.FALSE if is_stuck else ConditionStatus.TRUE, reason, told)
            phase = _phase_of_progress(reason, num_pods=len(live))
        elif wanted == 0:
            ready = _Verdict(ConditionStatus.FALSE, Reason.NO_REPLICAS, "no replicas are asked for")
            progressing, phase = _Verdict(ConditionStatus.FALSE, Reason.NO_REPLICAS, ready.message), Phase.PENDING
        elif blocker is not None:
            told = blocker.message if is_complete else f"{count}; {blocker.message}"
            ready = _Verdict(ConditionStatus.FALSE, blocker.reason, told)
            progressing = _Verdict(ConditionStatus.FALSE, blocker.reason, told)
            phase = _phase_of_problem(blocker, observation.num_ready)
        else:
            reason = _why_incomplete(observation, problems, is_rolling=is_rolling, wanted=wanted)
            told = count if not problems else f"{count}; {problems[0].message}"
            ready = _Verdict(ConditionStatus.FALSE, reason, told)
            progressing = _Verdict(ConditionStatus.TRUE, reason, told)
            phase = _phase_of_progress(reason, num_pods=len(live))
        if rendering.is_paused:
            stopped = "the annotation kvpilot.dev/paused stops all changes"
            progressing, phase = _Verdict(ConditionStatus.FALSE, Reason.PAUSED, stopped), Phase.PAUSED
        return cls(ready, progressing, phase)


def _why_incomplete(
    observation: DeploymentObservation, problems: Sequence[Problem], *, is_rolling: bool, wanted: int
) -> Reason:
    if problems:
        return problems[0].reason
    if observation.num_ready == 0:
        return Reason.STARTING
    if is_rolling:
        return Reason.ROLLOUT_IN_PROGRESS
    starting = any(not r.ready and r.restart_count == 0 for r in observation.live)
    return Reason.SCALING_UP if starting or len(observation.live) < wanted else Reason.REPLICAS_NOT_READY


def _phase_of_problem(problem: Problem, num_ready: int) -> Phase:
    if problem.reason is Reason.INVALID_SPEC:
        return Phase.INVALID
    if num_ready:
        return Phase.DEGRADED
    return Phase.PENDING if problem.reason is Reason.UNSCHEDULABLE else Phase.FAILED


def _phase_of_progress(reason: Reason, *, num_pods: int) -> Phase:
    phases = {
        Reason.STARTING: Phase.STARTING if num_pods else Phase.PENDING,
        Reason.ROLLOUT_IN_PROGRESS: Phase.UPDATING,
        Reason.SCALING_UP: Phase.SCALING,
    }
    return phases.get(reason, Phase.DEGRADED)


def _metrics(picture: LoadPicture) -> _Verdict:
    known, unknown = len(picture.known), len(picture.unknown)
    if not known and not unknown:
        return _Verdict(ConditionStatus.UNKNOWN, Reason.REPLICAS_NOT_READY, "no replica is ready")
    if not unknown:
        return _Verdict(ConditionStatus.TRUE, Reason.METRICS_FRESH, f"the load of all {known} ready replicas is known")
    names = ", ".join(f"{name} ({reason})" for name, reason in sorted(picture.unknown))
    is_stale = all(reason == Reason.METRICS_STALE for _, reason in picture.unknown)
    reason = Reason.METRICS_STALE if is_stale else Reason.METRICS_MISSING
    return _Verdict(
        ConditionStatus.FALSE, reason, f"{unknown} of {known + unknown} ready replicas are unknown: {names}"
    )


def _scaling_active(scaling: ScalingDecision, rendering: Rendering) -> _Verdict:
    if rendering.is_paused:
        return _Verdict(ConditionStatus.FALSE, Reason.PAUSED, f"paused; {scaling.message}")
    status = ConditionStatus.FALSE if scaling.reason in _INACTIVE_SCALING else ConditionStatus.TRUE
    return _Verdict(status, scaling.reason, scaling.message)


def _memory_tuned(memory: MemoryDecision, observation: DeploymentObservation) -> _Verdict:
    if memory.reason is not Reason.TUNED:
        return _Verdict(ConditionStatus.FALSE, memory.reason, memory.message)
    if observation.num_ready == 0:
        message = f"{memory.utilization:g} is set; no replica is ready"
        return _Verdict(ConditionStatus.UNKNOWN, Reason.REPLICAS_NOT_READY, message)
    return _Verdict(ConditionStatus.TRUE, memory.reason, memory.message)


def _degraded(problems: Sequence[Problem]) -> _Verdict:
    if not problems:
        return _Verdict(ConditionStatus.FALSE, Reason.HEALTHY, "nothing is wrong")
    first, *others = problems
    also = f" (also: {', '.join(p.reason for p in others)})" if others else ""
    return _Verdict(ConditionStatus.TRUE, first.reason, first.message + also)


def _update_available(rendering: Rendering) -> _Verdict:
    if not rendering.update:
        return _Verdict(ConditionStatus.FALSE, Reason.UP_TO_DATE, "the pods are as this operator renders them")
    accept = f'kvpilot.dev/accept-update: "{rendering.update}"'
    message = f"this operator would render the pods anew; the annotation {accept} accepts it"
    return _Verdict(ConditionStatus.TRUE, Reason.TEMPLATE_OUTDATED, message)


def _set_all(
    conditions: tuple[Condition, ...], verdicts: dict[ConditionType, _Verdict], generation: int, now: datetime
) -> tuple[Condition, ...]:
    for type_, verdict in verdicts.items():
        conditions = set_condition(
            conditions,
            type_,
            verdict.status,
            reason=str(verdict.reason),
            message=verdict.message,
            generation=generation,
            now=now,
        )
    return conditions


def _load(picture: LoadPicture, now: datetime) -> LoadStatus:
    return LoadStatus(
        kv_usage=None if picture.kv_usage_mean is None else round(picture.kv_usage_mean, 2),
        kv_usage_max=None if picture.kv_usage_max is None else round(picture.kv_usage_max, 2),
        running=picture.running,
        waiting=picture.waiting,
        preemptions_per_minute=round(picture.preemptions_per_minute, 1),
        unknown_replicas=len(picture.unknown),
        at=now,
    )


def _plan(observation: DeploymentObservation) -> MemoryPlan | None:
    """Of the first replica that can tell: they are alike."""
    told = [r for r in observation.live if isinstance(r.memory, EngineMemory)]
    chosen = min(told, key=lambda r: (not r.ready, r.name), default=None)
    if chosen is None or not isinstance(chosen.memory, EngineMemory):
        return None
    memory = chosen.memory
    return MemoryPlan(
        weights_bytes=memory.weights_bytes,
        activations_bytes=memory.activations_peak_bytes,
        kv_bytes=memory.kv_reserved_bytes,
        kv_tokens=memory.kv_tokens,
        max_concurrency_at_max_len=round(memory.max_concurrency_at_max_len, 2),
    )
