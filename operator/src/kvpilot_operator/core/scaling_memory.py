"""What the scaling loop remembers over a restart: time stamps, never counts of passes. Lives in `status.scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from kvpilot_operator.core.timestamps import format_time, parse_time


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSample:
    """A pod's counter at a time, and the rate that was measured last; None before there was an interval to measure."""

    pod_uid: str
    total: int
    at: datetime
    per_minute: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingMemory:
    mode: str = ""
    """scaling.mode of the last pass; a change to External hands the running count over first."""
    desired: int | None = None
    """What was last asked for; the start value when the Deployment has to be made anew."""
    last_scale_up: datetime | None = None
    last_scale_down: datetime | None = None
    growing_from: int | None = None
    """Replicas before the growth that is under way; None once all that were asked for are ready."""
    above_since: datetime | None = None
    """Since when load has been above target in every pass."""
    below_since: datetime | None = None
    """Since when one replica less would have done in every pass."""
    samples: tuple[PreemptionSample, ...] = ()

    def not_after(self, now: datetime) -> ScalingMemory:
        """Time stamps of the future (another machine's clock) moved to `now`, or they would hold until then."""
        return replace(
            self,
            last_scale_up=_earlier(self.last_scale_up, now),
            last_scale_down=_earlier(self.last_scale_down, now),
            above_since=_earlier(self.above_since, now),
            below_since=_earlier(self.below_since, now),
            samples=tuple(replace(s, at=min(s.at, now)) for s in self.samples),
        )

    def to_dict(self) -> dict[str, object]:
        raw: dict[str, object] = {}
        if self.mode:
            raw["mode"] = self.mode
        if self.desired is not None:
            raw["desired"] = self.desired
        if self.growing_from is not None:
            raw["growingFrom"] = self.growing_from
        for key, moment in (
            ("lastScaleUp", self.last_scale_up),
            ("lastScaleDown", self.last_scale_down),
            ("aboveSince", self.above_since),
            ("belowSince", self.below_since),
        ):
            if moment is not None:
                raw[key] = format_time(moment)
        if self.samples:
            raw["preemptionSamples"] = [
                {"pod": s.pod_uid, "total": s.total, "at": format_time(s.at)}
                | ({} if s.per_minute is None else {"perMinute": s.per_minute})
                for s in self.samples
            ]
        return raw


def parse_scaling_memory(raw: Mapping[str, object]) -> ScalingMemory:
    """Whatever can't be read is as if never remembered."""
    desired, growing_from, mode = raw.get("desired"), raw.get("growingFrom"), raw.get("mode", "")
    samples = raw.get("preemptionSamples")
    parsed = (_parse_sample(item) for item in samples) if isinstance(samples, list) else ()
    return ScalingMemory(
        mode=mode if isinstance(mode, str) else "",
        desired=desired if isinstance(desired, int) else None,
        growing_from=growing_from if isinstance(growing_from, int) else None,
        last_scale_up=parse_time(raw.get("lastScaleUp")),
        last_scale_down=parse_time(raw.get("lastScaleDown")),
        above_since=parse_time(raw.get("aboveSince")),
        below_since=parse_time(raw.get("belowSince")),
        samples=tuple(s for s in parsed if s is not None),
    )


def _earlier(moment: datetime | None, now: datetime) -> datetime | None:
    return None if moment is None else min(moment, now)


def _parse_sample(raw: object) -> PreemptionSample | None:
    if not isinstance(raw, Mapping):
        return None
    at, total, rate = parse_time(raw.get("at")), raw.get("total"), raw.get("perMinute")
    if at is None or not isinstance(total, int) or not raw.get("pod"):
        return None
    per_minute = float(rate) if isinstance(rate, int | float) else None
    return PreemptionSample(pod_uid=str(raw["pod"]), total=total, at=at, per_minute=per_minute)
