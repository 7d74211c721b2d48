"""Which Kubernetes Events a change of status is worth: state changes only, short, with stable texts that aggregate.

Posts nothing. Invariant: an unchanged state gives no event, however often it is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvpilot_operator.core.api_status import LLMDeploymentStatus
from kvpilot_operator.core.conditions import ConditionStatus, ConditionType, find_condition, shorten
from kvpilot_operator.core.decisions import Decision, Loop
from kvpilot_operator.core.reasons import Reason

MAX_EVENT_MESSAGE = 512
"""The API allows 1,024; an event is read in a table."""


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEvent:
    type: EventType
    reason: str
    action: str
    message: str


_TROUBLE = frozenset(
    {
        Reason.DEVICE_OOM_AT_LOAD,
        Reason.DEVICE_OOM_WHILE_SERVING,
        Reason.OOM_UNRESOLVED,
        Reason.MODEL_DOES_NOT_FIT,
        Reason.AT_MEMORY_FLOOR,
    }
)


def compute_events(previous: LLMDeploymentStatus, new: LLMDeploymentStatus) -> tuple[ObjectEvent, ...]:
    """What changed from one written status to the next, as events."""
    events = [_of_decision(d) for d in new.decisions if d.is_change and d not in previous.decisions]
    degraded = _of_degraded(previous, new)
    if degraded is not None:
        events.append(degraded)
    if _became_ready(previous, new):
        message = f"{new.ready_replicas} replicas are ready"
        events.append(
            ObjectEvent(type=EventType.NORMAL, reason=Reason.ALL_REPLICAS_READY, action="Serve", message=message)
        )
    return tuple(events)


def _of_decision(decision: Decision) -> ObjectEvent:
    what = "replicas" if decision.loop is Loop.REPLICAS else "memory cap"
    message = f"{what} {decision.before:g} to {decision.after:g}: {decision.message}"
    return ObjectEvent(
        type=EventType.WARNING if decision.reason in _TROUBLE else EventType.NORMAL,
        reason=decision.reason,
        action=str(decision.action),
        message=shorten(message, MAX_EVENT_MESSAGE),
    )


def _of_degraded(previous: LLMDeploymentStatus, new: LLMDeploymentStatus) -> ObjectEvent | None:
    before = find_condition(previous.conditions, ConditionType.DEGRADED)
    after = find_condition(new.conditions, ConditionType.DEGRADED)
    if after is None or after.status is not ConditionStatus.TRUE:
        return None
    if before is not None and (before.status, before.reason) == (after.status, after.reason):
        return None
    return ObjectEvent(
        type=EventType.WARNING,
        reason=after.reason,
        action="Diagnose",
        message=shorten(after.message, MAX_EVENT_MESSAGE),
    )


def _became_ready(previous: LLMDeploymentStatus, new: LLMDeploymentStatus) -> bool:
    before = find_condition(previous.conditions, ConditionType.READY)
    after = find_condition(new.conditions, ConditionType.READY)
    is_ready = after is not None and after.status is ConditionStatus.TRUE
    return is_ready and (before is None or before.status is not ConditionStatus.TRUE)
