"""What the memory loop remembers over a restart. Lives in the tuning ConfigMap, and in `status.memory` for people.

Both copies hold the same. The ConfigMap's is the truth: a cap and the events that led to it are written there in one
write, so that a crash between two writes never lowers twice; status serves when the ConfigMap was deleted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kvpilot_operator.core.memory_events import HandledMark, parse_mark
from kvpilot_operator.core.policy import PolicyConstants
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.shares import grid_down
from kvpilot_operator.core.timestamps import format_time, parse_time, seconds_since

MAX_LEARNED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedLimit:
    """What one device model showed with one engine shape. None: not seen yet."""

    device: str
    shape: str
    safe: float | None
    """Highest share at which an engine became ready and did not fail since."""
    failed: float | None
    """Lowest share that ran out of memory."""
    at: datetime

    def to_dict(self) -> dict[str, object]:
        raw: dict[str, object] = {"device": self.device, "shape": self.shape, "at": format_time(self.at)}
        if self.safe is not None:
            raw["safe"] = self.safe
        if self.failed is not None:
            raw["failed"] = self.failed
        return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningMemory:
    utilization: float
    """The share in force: what the tuning file's default says."""
    recommended: float
    """What tuning holds for right; in force only with mode Auto."""
    revision: int
    spec_utilization: float
    """memory.utilization of the spec when it was last taken over: an edit starts tuning anew."""
    shape: str
    """Hash of what decides an engine's memory use; another shape starts anew."""
    pods: Mapping[str, float] = field(default_factory=dict)
    """Own shares of single pods, by UID."""
    learned: tuple[LearnedLimit, ...] = ()
    handled: tuple[HandledMark, ...] = ()
    failed_starts: int = 0
    """Starts in a row that ended in an own OOM, at other shares each."""
    last_failed_start: datetime | None = None
    blocked_reason: str = ""
    """Why tuning has stopped until a start succeeds or the spec changes; empty: it has not."""
    blocked_message: str = ""

    def limit_of(self, device: str) -> LearnedLimit | None:
        return next((e for e in self.learned if e.device == device and e.shape == self.shape), None)

    def lowest_failed(self, now: datetime, expiry_s: float) -> float | None:
        """The lowest unexpired share that failed with this shape, on any device: all replicas share one cap."""
        failed = [
            e.failed
            for e in self.learned
            if e.shape == self.shape and e.failed is not None and seconds_since(e.at, now) < expiry_s
        ]
        return min(failed, default=None)

    def highest_allowed(self, now: datetime, constants: PolicyConstants) -> float:
        """The highest share that keeps its distance from what failed."""
        failed = self.lowest_failed(now, constants.failed_expiry_s)
        return 1.0 if failed is None else grid_down(failed - constants.failed_margin)

    @property
    def highest_safe(self) -> float | None:
        return max((e.safe for e in self.learned if e.shape == self.shape and e.safe is not None), default=None)

    def to_dict(self) -> dict[str, object]:
        raw: dict[str, object] = {
            "utilization": self.utilization,
            "recommendedUtilization": self.recommended,
            "revision": self.revision,
            "specUtilization": self.spec_utilization,
            "shape": self.shape,
        }
        if self.pods:
            raw["pods"] = dict(self.pods)
        if self.learned:
            raw["learned"] = [entry.to_dict() for entry in self.learned]
        if self.handled:
            raw["handled"] = [mark.to_dict() for mark in self.handled]
        if self.failed_starts:
            raw["failedStarts"] = self.failed_starts
        if self.last_failed_start is not None:
            raw["lastFailedStart"] = format_time(self.last_failed_start)
        if self.blocked_reason:
            raw["blockedReason"] = self.blocked_reason
            raw["blockedMessage"] = self.blocked_message
        return raw


def parse_tuning_memory(raw: Mapping[str, object]) -> TuningMemory | None:
    """None when the numbers that tuning needs are not there: it then starts from the spec."""
    utilization, recommended = _share(raw, "utilization"), _share(raw, "recommendedUtilization")
    spec_utilization, revision = _share(raw, "specUtilization"), raw.get("revision")
    if utilization is None or spec_utilization is None or not isinstance(revision, int):
        return None
    learned, handled, pods = raw.get("learned"), raw.get("handled"), raw.get("pods")
    failed_starts = raw.get("failedStarts", 0)
    blocked = next((str(reason) for reason in Reason if reason == raw.get("blockedReason")), "")
    entries = (_parse_limit(item) for item in learned) if isinstance(learned, list) else ()
    marks = (parse_mark(item) for item in handled) if isinstance(handled, list) else ()
    shares = pods.items() if isinstance(pods, Mapping) else ()
    return TuningMemory(
        utilization=utilization,
        recommended=recommended if recommended is not None else utilization,
        revision=revision,
        spec_utilization=spec_utilization,
        shape=str(raw.get("shape", "")),
        pods={str(uid): float(share) for uid, share in shares if isinstance(share, int | float)},
        learned=tuple(e for e in entries if e is not None),
        handled=tuple(m for m in marks if m is not None),
        failed_starts=failed_starts if isinstance(failed_starts, int) else 0,
        last_failed_start=parse_time(raw.get("lastFailedStart")),
        blocked_reason=blocked,
        blocked_message=str(raw.get("blockedMessage", "")) if blocked else "",
    )


def dump_tuning_memory(memory: TuningMemory) -> str:
    """For the ConfigMap: the same memory gives the same text."""
    return json.dumps(memory.to_dict(), sort_keys=True, separators=(",", ":"))


def load_tuning_memory(text: str) -> TuningMemory | None:
    """None for what was not written by `dump_tuning_memory`."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parse_tuning_memory(raw) if isinstance(raw, dict) else None


def build_tuning_file(memory: TuningMemory) -> dict[str, object]:
    """What engines read (docs/contracts/engine-http.md)."""
    shares: dict[str, object] = {"default": memory.utilization}
    if memory.pods:
        shares["pods"] = dict(memory.pods)
    return {"revision": memory.revision, "memory_utilization": shares}


def _share(raw: Mapping[str, object], key: str) -> float | None:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        return None
    return float(value)


def _parse_limit(raw: object) -> LearnedLimit | None:
    if not isinstance(raw, Mapping):
        return None
    at = parse_time(raw.get("at"))
    if at is None:
        return None
    return LearnedLimit(
        device=str(raw.get("device", "")),
        shape=str(raw.get("shape", "")),
        safe=_share(raw, "safe"),
        failed=_share(raw, "failed"),
        at=at,
    )
