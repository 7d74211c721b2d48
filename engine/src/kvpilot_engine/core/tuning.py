"""The tuning file: which share of the device this process may use, by pod, device or default.

Parsing only; `service` watches the file and applies the value. A file that can't be read as meant is an error as a
whole: half of a tuning is never applied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


class TuningError(ValueError):
    """The text is not a tuning file; the message says what is wrong and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """One revision of the file. Shares are 0 < share <= 1 of the device's total memory."""

    revision: int
    default: float | None = None
    devices: Mapping[str, float] = field(default_factory=dict)
    pods: Mapping[str, float] = field(default_factory=dict)

    def value_for(self, pod_uid: str, device: str) -> float | None:
        """The share meant for this process: the pod's own, else its device's, else the default; None when none is."""
        if pod_uid and pod_uid in self.pods:
            return self.pods[pod_uid]
        return self.devices.get(device, self.default)


def parse_tuning(text: str) -> Tuning:
    """Read the JSON text; raises TuningError. Unknown keys are ignored, so that a newer writer does no harm."""
    try:
        raw: object = json.loads(text)
    except ValueError as error:
        raise TuningError(f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise TuningError(f"a JSON object is needed, not {type(raw).__name__}")
    revision = raw.get("revision")
    if not isinstance(revision, int) or isinstance(revision, bool) or revision < 0:
        raise TuningError(f"revision is {revision!r}; an integer of at least 0 is needed")
    shares = raw.get("memory_utilization", {})
    if not isinstance(shares, dict):
        raise TuningError("memory_utilization must be an object")
    default = shares.get("default")
    return Tuning(
        revision=revision,
        default=None if default is None else _parse_share("memory_utilization.default", default),
        devices=_parse_shares("memory_utilization.devices", shares.get("devices")),
        pods=_parse_shares("memory_utilization.pods", shares.get("pods")),
    )


def _parse_shares(name: str, raw: object) -> dict[str, float]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise TuningError(f"{name} must be an object")
    return {key: _parse_share(f"{name}[{key!r}]", value) for key, value in raw.items()}


def _parse_share(name: str, raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw) or not 0.0 < raw <= 1.0:
        raise TuningError(f"{name} is {raw!r}; a number above 0 and at most 1 is needed")
    return float(raw)
