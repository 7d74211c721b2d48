"""What is wrong with a deployment, in one list, the most important first: from pods, containers, engines and children.

Repairs nothing. Invariants: every problem carries a sentence with the numbers and, where there is one, the advice; the
sentence stays the same while the problem does, so that status and events don't churn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from kvpilot_operator.core.api_types import LLMDeploymentSpec
from kvpilot_operator.core.classifier import (
    REASON_OF_ENDING,
    Ending,
    classify,
    classify_waiting,
    mentions_volume,
    parse_termination_message,
)
from kvpilot_operator.core.memory_messages import HOST_OOM_ADVICE
from kvpilot_operator.core.observation import DeploymentObservation, EngineState, ReplicaObservation, Termination
from kvpilot_operator.core.policy import POLICY, PolicyConstants
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.timestamps import seconds_since

_IMPORTANCE: tuple[Reason, ...] = (
    Reason.INVALID_SPEC,
    Reason.NAME_CONFLICT,
    Reason.POD_CREATION_REFUSED,
    Reason.WRITE_REFUSED,
    Reason.IMAGE_PULL_ERROR,
    Reason.CONTAINER_CONFIG_ERROR,
    Reason.VOLUME_UNAVAILABLE,
    Reason.INVALID_SETTINGS,
    Reason.MODEL_ACCESS_DENIED,
    Reason.MODEL_LOAD_FAILED,
    Reason.OOM_UNRESOLVED,
    Reason.MODEL_DOES_NOT_FIT,
    Reason.HOST_OOM_KILLED,
    Reason.DEVICE_OOM_AT_LOAD,
    Reason.DEVICE_OOM_WHILE_SERVING,
    Reason.DEVICE_MEMORY_CONTENDED,
    Reason.DEVICE_FAULT,
    Reason.CRASH_LOOP,
    Reason.EVICTED,
    Reason.ENGINE_KILLED,
    Reason.UNSCHEDULABLE,
    Reason.MODEL_LOAD_TIMEOUT,
)
"""What explains most comes first; a cause before its effects."""

_MEMORY_ENDINGS = frozenset(
    {Ending.HOST_OOM, Ending.DEVICE_OOM_AT_LOAD, Ending.DEVICE_OOM_SERVING, Ending.CONTENDED, Ending.DOES_NOT_FIT}
)
_TO_BE_CHECKED: Mapping[Reason, str] = {
    Reason.INVALID_SETTINGS: "check spec.engine.extraArgs",
    Reason.MODEL_ACCESS_DENIED: "check spec.model.accessTokenSecret and that its token may read the model",
    Reason.MODEL_LOAD_FAILED: "check spec.model.source",
    Reason.IMAGE_PULL_ERROR: "check spec.engine.image and imagePullSecrets",
    Reason.CONTAINER_CONFIG_ERROR: "check the Secrets and ConfigMaps that the pod names",
    Reason.DEVICE_MEMORY_CONTENDED: "the device is shared: give it up, or lower memory.utilization by hand",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    reason: Reason
    message: str
    stops_ready: bool = True
    """The deployment can't be Ready while this lasts, however many pods say they are."""


def find_problems(
    spec: LLMDeploymentSpec, observation: DeploymentObservation, now: datetime, *, policy: PolicyConstants = POLICY
) -> tuple[Problem, ...]:
    """All that can be seen; what a loop or the shell knows besides goes through `rank_problems`."""
    problems = [
        Problem(
            reason=Reason.NAME_CONFLICT,
            message=f"{c.kind} {c.name} exists and does not belong to this object: remove it, or rename this object",
        )
        for c in observation.children
        if not c.controlled
    ]
    problems.extend(
        Problem(reason=Reason.POD_CREATION_REFUSED, message=c.get("message", ""), stops_ready=False)
        for c in observation.deployment_conditions
        if c.get("type") == "ReplicaFailure" and c.get("status") == "True"
    )
    is_short = observation.num_ready < (observation.replicas_wanted or 0)
    problems.extend(
        Problem(reason=Reason.EVICTED, message=f"{r.name} was evicted from its node", stops_ready=False)
        for r in observation.replicas
        # Evicted pods stay as objects for good: they are news only while they are missed.
        if r.pod_reason == "Evicted" and not r.terminating and is_short
    )
    for replica in observation.live:
        problem = _examine(spec, replica, now, policy)
        if problem is not None:
            problems.append(problem)
    return rank_problems(problems)


def rank_problems(problems: list[Problem]) -> tuple[Problem, ...]:
    """One problem for each reason (the first seen speaks for it), the most important first."""
    by_reason: dict[Reason, Problem] = {}
    for problem in problems:
        known = by_reason.get(problem.reason)
        if known is None or (problem.stops_ready and not known.stops_ready):
            by_reason[problem.reason] = problem
    ranks = {reason: rank for rank, reason in enumerate(_IMPORTANCE)}
    return tuple(sorted(by_reason.values(), key=lambda p: ranks.get(p.reason, len(ranks))))


def _examine(
    spec: LLMDeploymentSpec, replica: ReplicaObservation, now: datetime, policy: PolicyConstants
) -> Problem | None:
    if replica.ready:
        return _recent_memory_kill(spec, replica, now, policy)
    return (
        _unplaced(replica, now, policy)
        or _waiting(replica)
        or _held(replica)
        or _ended(spec, replica, now)
        or _slow(spec, replica, now)
    )


def _recent_memory_kill(
    spec: LLMDeploymentSpec, replica: ReplicaObservation, now: datetime, policy: PolicyConstants
) -> Problem | None:
    """A pod that is ready between two memory kills is not in order: C22."""
    ended = replica.last_termination
    if (
        ended is None
        or ended.finished_at is None
        or classify(ended, pod_reason=replica.pod_reason) not in _MEMORY_ENDINGS
    ):
        return None
    if seconds_since(ended.finished_at, now) > policy.oom_loop_window_s:
        return None
    is_loop = replica.restart_count >= policy.max_restarts_in_loop
    problem = _tell_end(spec, replica, ended)
    return None if problem is None else Problem(reason=problem.reason, message=problem.message, stops_ready=is_loop)


def _unplaced(replica: ReplicaObservation, now: datetime, policy: PolicyConstants) -> Problem | None:
    message = replica.unschedulable_message
    if replica.scheduled or not message:
        return None
    if mentions_volume(message):
        return Problem(reason=Reason.VOLUME_UNAVAILABLE, message=f"{replica.name}: {message}")
    if replica.created_at is None or seconds_since(replica.created_at, now) < policy.unschedulable_after_s:
        return None
    return Problem(reason=Reason.UNSCHEDULABLE, message=f"{replica.name} can't be placed on a node: {message}")


def _waiting(replica: ReplicaObservation) -> Problem | None:
    reason = classify_waiting(replica.waiting_reason, replica.waiting_message)
    if reason is None or reason is Reason.CRASH_LOOP:  # how the container ended says more
        return None
    return Problem(reason=reason, message=_tell(replica, replica.waiting_message or replica.waiting_reason, reason))


def _held(replica: ReplicaObservation) -> Problem | None:
    """The engine gave up starting and waits; it knows why better than its exit codes do."""
    state = replica.engine
    if not isinstance(state, EngineState) or state.state != "held":
        return None
    last = state.start_failures[-1] if state.start_failures else None
    is_misfit = last is not None and last.reason == Reason.MODEL_DOES_NOT_FIT
    detail = f"{len(state.start_failures)} failed starts, the last: {last.message}" if last else state.state_reason
    reason = Reason.MODEL_DOES_NOT_FIT if is_misfit else Reason.OOM_UNRESOLVED
    return Problem(reason=reason, message=f"{replica.name} waits for another cap after {detail}")


def _ended(spec: LLMDeploymentSpec, replica: ReplicaObservation, now: datetime) -> Problem | None:
    ended = replica.last_termination
    if ended is None:
        return None
    is_waiting = replica.waiting_reason == "CrashLoopBackOff"
    if not is_waiting and ended.finished_at and seconds_since(ended.finished_at, now) > spec.startup.timeout_seconds:
        return None  # the run after it has lasted longer than any start: it is not ready for another reason
    return _tell_end(spec, replica, ended)


def _tell_end(spec: LLMDeploymentSpec, replica: ReplicaObservation, ended: Termination) -> Problem | None:
    ending = classify(ended, pod_reason=replica.pod_reason)
    if ending is Ending.HOST_OOM:
        limit = spec.resources.limits.get("memory")
        told = f" (now {limit})" if limit is not None else ""
        return Problem(reason=Reason.HOST_OOM_KILLED, message=f"{replica.name}: {HOST_OOM_ADVICE}{told}")
    if ending is Ending.DRAINED:
        if replica.waiting_reason != "CrashLoopBackOff":
            return None
        return Problem(reason=Reason.CRASH_LOOP, message=f"{replica.name} ends with exit code 0 again and again")
    reason = REASON_OF_ENDING[ending]
    said = parse_termination_message(ended.message).message
    return Problem(
        reason=reason, message=_tell(replica, said or f"exit code {ended.exit_code} ({ended.reason})", reason)
    )


def _slow(spec: LLMDeploymentSpec, replica: ReplicaObservation, now: datetime) -> Problem | None:
    since = replica.started_at or replica.created_at
    if not replica.scheduled or since is None or seconds_since(since, now) < spec.startup.timeout_seconds:
        return None
    state = replica.engine.state if isinstance(replica.engine, EngineState) else f"unknown ({replica.engine.reason})"
    message = (
        f"{replica.name} is not ready after spec.startup.timeoutSeconds ({spec.startup.timeout_seconds});"
        f" its engine is {state}"
    )
    return Problem(reason=Reason.MODEL_LOAD_TIMEOUT, message=message)


def _tell(replica: ReplicaObservation, what: str, reason: Reason) -> str:
    advice = _TO_BE_CHECKED.get(reason)
    return f"{replica.name}: {what.rstrip('. ')}" + (f"; {advice}" if advice else "")
