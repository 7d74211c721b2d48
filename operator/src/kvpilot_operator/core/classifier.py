"""How a container run ended and why a container waits, from Kubernetes' words and the engine's own: one class for each.

Takes no action and knows no policy. Invariant: only the engine's own word (an exit code of the contract, not said to be
a neighbour's doing) makes a device OOM; a kill by the kernel or the node never does, the device cap has no part in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvpilot_operator.core.observation import Termination
from kvpilot_operator.core.reasons import Reason


class Ending(StrEnum):
    """The class of one ended container run."""

    DRAINED = "Drained"
    INVALID_SETTINGS = "InvalidSettings"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_ACCESS_DENIED = "ModelAccessDenied"
    INTERNAL_ERROR = "InternalError"
    DEVICE_OOM_AT_LOAD = "DeviceOOMAtLoad"
    DEVICE_OOM_SERVING = "DeviceOOMServing"
    DOES_NOT_FIT = "DoesNotFit"
    CONTENDED = "Contended"
    DEVICE_FAULT = "DeviceFault"
    HOST_OOM = "HostOOM"
    EVICTED = "Evicted"
    KILLED = "Killed"
    CRASHED = "Crashed"

    @property
    def is_own_device_oom(self) -> bool:
        """The only classes that may lower the device-memory cap."""
        return self in (Ending.DEVICE_OOM_AT_LOAD, Ending.DEVICE_OOM_SERVING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationReport:
    """The engine's last words. None: the engine did not say."""

    reason: str = ""
    phase: str = ""
    cause: str = ""
    message: str = ""
    requested_bytes: int | None = None
    limit_bytes: int | None = None
    free_bytes: int | None = None
    utilization: float | None = None
    suggested_utilization: float | None = None
    suggested_max_model_len: int | None = None
    oom_seq: int | None = None


_BY_EXIT_CODE: Mapping[int, Ending] = {
    0: Ending.DRAINED,
    64: Ending.INVALID_SETTINGS,
    66: Ending.MODEL_NOT_FOUND,
    70: Ending.INTERNAL_ERROR,
    71: Ending.DEVICE_OOM_AT_LOAD,
    72: Ending.DOES_NOT_FIT,
    73: Ending.CONTENDED,
    74: Ending.DEVICE_OOM_SERVING,
    75: Ending.DEVICE_FAULT,
    137: Ending.KILLED,
    143: Ending.KILLED,
}

REASON_OF_ENDING: Mapping[Ending, Reason] = {
    Ending.INVALID_SETTINGS: Reason.INVALID_SETTINGS,
    Ending.MODEL_NOT_FOUND: Reason.MODEL_LOAD_FAILED,
    Ending.MODEL_ACCESS_DENIED: Reason.MODEL_ACCESS_DENIED,
    Ending.INTERNAL_ERROR: Reason.CRASH_LOOP,
    Ending.DEVICE_OOM_AT_LOAD: Reason.DEVICE_OOM_AT_LOAD,
    Ending.DEVICE_OOM_SERVING: Reason.DEVICE_OOM_WHILE_SERVING,
    Ending.DOES_NOT_FIT: Reason.MODEL_DOES_NOT_FIT,
    Ending.CONTENDED: Reason.DEVICE_MEMORY_CONTENDED,
    Ending.DEVICE_FAULT: Reason.DEVICE_FAULT,
    Ending.HOST_OOM: Reason.HOST_OOM_KILLED,
    Ending.EVICTED: Reason.EVICTED,
    Ending.KILLED: Reason.ENGINE_KILLED,
    Ending.CRASHED: Reason.CRASH_LOOP,
}
"""What each ending is called on the object; a drained run is no problem and has no entry."""

_NOT_OURS = frozenset({"neighbour", "host"})
_HOST = "host"


def classify(termination: Termination, *, pod_reason: str = "") -> Ending:
    """The class of an ended run; `pod_reason` is the pod's own (`Evicted`)."""
    if pod_reason == "Evicted":
        return Ending.EVICTED
    if termination.reason == "OOMKilled":
        return Ending.HOST_OOM
    ending = _BY_EXIT_CODE.get(termination.exit_code, Ending.CRASHED)
    report = parse_termination_message(termination.message)
    if ending is Ending.MODEL_NOT_FOUND and report.reason == Reason.MODEL_ACCESS_DENIED:
        return Ending.MODEL_ACCESS_DENIED
    if ending.is_own_device_oom and report.cause in _NOT_OURS:
        return Ending.HOST_OOM if report.cause == _HOST else Ending.CONTENDED
    return ending


_IMAGE = frozenset(
    {
        "ImagePullBackOff",
        "ErrImagePull",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreStartHookError"})
_VOLUME_WORDS = (
    "persistentvolumeclaim",
    "mountvolume",
    "failedmount",
    "volume node affinity",
    "attachvolume",
    "unbound immediate",
)


def classify_waiting(reason: str, message: str = "") -> Reason | None:
    """Why a container waits, or None when waiting is normal (`ContainerCreating`, `PodInitializing`)."""
    if reason in _IMAGE:
        return Reason.IMAGE_PULL_ERROR
    if mentions_volume(message):
        return Reason.VOLUME_UNAVAILABLE
    if reason in _CONFIG:
        return Reason.CONTAINER_CONFIG_ERROR
    if reason == "CrashLoopBackOff":
        return Reason.CRASH_LOOP
    return None


def mentions_volume(message: str) -> bool:
    """The scheduler and the kubelet tell missing volumes in prose only."""
    lowered = message.lower()
    return any(word in lowered for word in _VOLUME_WORDS)


def parse_termination_message(message: str) -> TerminationReport:
    """The engine's JSON line; anything else (a cut line, a log tail) keeps its text as the message and nothing more."""
    raw = _last_json_object(message)
    if raw is None:
        return TerminationReport(message=message.strip())
    suggested = raw.get("suggested")
    hints: Mapping[str, object] = suggested if isinstance(suggested, dict) else {}
    return TerminationReport(
        reason=_text(raw, "reason"),
        phase=_text(raw, "phase"),
        cause=_text(raw, "cause"),
        message=_text(raw, "message"),
        requested_bytes=_count(raw, "requested_bytes"),
        limit_bytes=_count(raw, "limit_bytes"),
        free_bytes=_count(raw, "free_bytes"),
        utilization=_share(raw, "utilization"),
        suggested_utilization=_positive(hints, "utilization"),
        suggested_max_model_len=_count(hints, "max_model_len"),
        oom_seq=_count(raw, "oom_seq"),
    )


def _last_json_object(message: str) -> Mapping[str, object] | None:
    # The file may hold more than our line (a library that writes there too); ours is the last.
    for line in reversed(message.strip().splitlines()):
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(raw, dict):
            return raw
    return None


def _text(raw: Mapping[str, object], key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def _number(raw: Mapping[str, object], key: str) -> float | None:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _count(raw: Mapping[str, object], key: str) -> int | None:
    value = _number(raw, key)
    return int(value) if value is not None and value >= 0 else None


def _share(raw: Mapping[str, object], key: str) -> float | None:
    value = _number(raw, key)
    return value if value is not None and 0.0 < value <= 1.0 else None


def _positive(raw: Mapping[str, object], key: str) -> float | None:
    # May be above 1: "the whole device would not do" is an answer too.
    value = _number(raw, key)
    return value if value is not None and value > 0.0 else None
