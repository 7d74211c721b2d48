"""The record of what the two loops decided and why: the last twenty are kept on the object.

Decides nothing. Invariant: neither a hold that lasts nor holds that take turns push out what happened before them: the
list never holds two neighbours of one loop that say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from kvpilot_operator.core.conditions import shorten
from kvpilot_operator.core.timestamps import format_time, parse_time, seconds_since

MAX_DECISIONS = 20
MAX_DECISION_MESSAGE = 512
HOLD_AGAIN_S = 300.0
"""Holds that take turns are told this rarely: load at a threshold would fill the list within minutes."""

Input = float | int | str


class Loop(StrEnum):
    REPLICAS = "Replicas"
    MEMORY = "Memory"


class Action(StrEnum):
    """What a loop does with its number; Reset starts over from the spec, Hold says why nothing was done."""

    RAISE = "Raise"
    LOWER = "Lower"
    RESET = "Reset"
    HOLD = "Hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    time: datetime
    loop: Loop
    action: Action
    reason: str
    before: float | int
    after: float | int
    message: str
    inputs: Mapping[str, Input] = field(default_factory=dict)

    @property
    def is_change(self) -> bool:
        return self.action is not Action.HOLD

    def to_dict(self) -> dict[str, object]:
        return {
            "time": format_time(self.time),
            "loop": str(self.loop),
            "action": str(self.action),
            "reason": str(self.reason),
            "from": self.before,
            "to": self.after,
            "message": self.message,
            "inputs": dict(self.inputs),
        }


def parse_decision(raw: Mapping[str, object]) -> Decision | None:
    """None for what is not a decision."""
    moment = parse_time(raw.get("time"))
    before, after, inputs = raw.get("from"), raw.get("to"), raw.get("inputs", {})
    if moment is None or not isinstance(before, int | float) or not isinstance(after, int | float):
        return None
    try:
        loop, action = Loop(str(raw.get("loop"))), Action(str(raw.get("action")))
    except ValueError:
        return None
    numbers = inputs.items() if isinstance(inputs, Mapping) else ()
    return Decision(
        time=moment,
        loop=loop,
        action=action,
        reason=str(raw.get("reason", "")),
        before=before,
        after=after,
        message=str(raw.get("message", "")),
        inputs={str(k): v for k, v in numbers if isinstance(v, int | float | str)},
    )


def append_decisions(decisions: Sequence[Decision], new: Sequence[Decision]) -> tuple[Decision, ...]:
    """The newest last, at most `MAX_DECISIONS`; a hold that is told already is left out."""
    result = list(decisions)
    for decision in new:
        if decision.is_change or not _is_told(result, decision):
            result.append(_bounded(decision))
    return tuple(result[-MAX_DECISIONS:])


def _is_told(decisions: Sequence[Decision], hold: Decision) -> bool:
    """By the last record of its loop, or a short while ago and nothing has changed since."""
    own = [d for d in decisions if d.loop is hold.loop]
    for index, decision in enumerate(reversed(own)):
        if (decision.action, decision.reason, decision.after) == (hold.action, hold.reason, hold.after):
            return index == 0 or seconds_since(decision.time, hold.time) < HOLD_AGAIN_S
        if decision.is_change:
            return False
    return False


def _bounded(decision: Decision) -> Decision:
    return replace(decision, message=shorten(decision.message, MAX_DECISION_MESSAGE))
