"""Conditions as Kubernetes' API conventions want them.

Knows how to keep them, not what they should say (`status` does). Invariant: `lastTransitionTime` moves only when the
status moves, whatever happens to reason and message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kvpilot_operator.core.timestamps import format_time, parse_time

MAX_MESSAGE_LENGTH = 1024
"""Kubernetes allows 32,768; a condition is read in a terminal."""


class ConditionType(StrEnum):
    READY = "Ready"
    PROGRESSING = "Progressing"
    METRICS_AVAILABLE = "MetricsAvailable"
    SCALING_ACTIVE = "ScalingActive"
    MEMORY_TUNED = "MemoryTuned"
    DEGRADED = "Degraded"
    UPDATE_AVAILABLE = "UpdateAvailable"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    type: str
    status: ConditionStatus
    reason: str
    message: str
    observed_generation: int
    last_transition_time: datetime

    def to_dict(self) -> dict[str, object]:
        return {
            "type": str(self.type),
            "status": str(self.status),
            "reason": str(self.reason),
            "message": self.message,
            "observedGeneration": self.observed_generation,
            "lastTransitionTime": format_time(self.last_transition_time),
        }


def parse_condition(raw: Mapping[str, object]) -> Condition | None:
    """None for what is not a condition."""
    moment = parse_time(raw.get("lastTransitionTime"))
    generation = raw.get("observedGeneration", 0)
    if moment is None or not raw.get("type") or not isinstance(generation, int):
        return None
    try:
        status = ConditionStatus(str(raw.get("status")))
    except ValueError:
        return None
    return Condition(
        type=str(raw["type"]),
        status=status,
        reason=str(raw.get("reason", "")),
        message=str(raw.get("message", "")),
        observed_generation=generation,
        last_transition_time=moment,
    )


def find_condition(conditions: Sequence[Condition], type_: str) -> Condition | None:
    return next((c for c in conditions if c.type == type_), None)


def is_true(conditions: Sequence[Condition], type_: str) -> bool:
    found = find_condition(conditions, type_)
    return found is not None and found.status is ConditionStatus.TRUE


def set_condition(
    conditions: Sequence[Condition],
    type_: str,
    status: ConditionStatus,
    *,
    reason: str,
    message: str,
    generation: int,
    now: datetime,
) -> tuple[Condition, ...]:
    """`conditions` with this one in its place; the order of the others is kept."""
    previous = find_condition(conditions, type_)
    kept = previous is not None and previous.status is status
    condition = Condition(
        type=type_,
        status=status,
        reason=reason,
        message=shorten(message),
        observed_generation=generation,
        last_transition_time=previous.last_transition_time if previous is not None and kept else now,
    )
    if previous is None:
        return (*conditions, condition)
    return tuple(condition if c.type == type_ else c for c in conditions)


def shorten(message: str, limit: int = MAX_MESSAGE_LENGTH) -> str:
    """One line of at most `limit` characters."""
    line = " ".join(message.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
