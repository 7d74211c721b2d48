"""Times as Kubernetes writes them: UTC, whole seconds, `2026-01-01T00:00:00Z`.

Reads no clock. Invariant: `parse_time(format_time(t)) == t` for every aware `t` of whole seconds.
"""

from __future__ import annotations

from datetime import UTC, datetime


def format_time(moment: datetime) -> str:
    """RFC 3339 in UTC, fractions of a second cut off."""
    return moment.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z"


def parse_time(text: object) -> datetime | None:
    """None for whatever is not a time: status may have been edited by hand."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.astimezone(UTC) if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def seconds_since(moment: datetime, now: datetime) -> float:
    """Never negative."""
    return max(0.0, (now - moment).total_seconds())
