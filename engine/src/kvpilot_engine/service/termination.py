"""The last words of a process: one JSON line where Kubernetes reads a container's termination message.

Never fails: a message that can't be written must not change how the process ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from kvpilot_engine.errors import (
    DeviceContendedError,
    DeviceOutOfMemoryError,
    DoesNotFitError,
    ExitCode,
    OOMCause,
    OOMPhase,
    StartupError,
)

_LOG = logging.getLogger(__name__)
MAX_MESSAGE_CHARS = 1024
"""The kubelet keeps 4096 bytes of a termination message; a cut JSON line would be no JSON."""
OOM_STEP_RATIO = 0.02
"""The least by which a share is lowered after an out-of-memory event."""
LOAD_PHASES = (OOMPhase.LOAD, OOMPhase.WARMUP)


def build_termination(
    reason: str,
    message: str,
    *,
    phase: str | None = None,
    cause: str | None = None,
    requested_bytes: int | None = None,
    limit_bytes: int | None = None,
    free_bytes: int | None = None,
    utilization: float | None = None,
    suggested: Mapping[str, float | int] | None = None,
    oom_seq: int | None = None,
) -> dict[str, object]:
    """Every key of the contract, None where unknown."""
    advice = suggested or {}
    return {
        "reason": reason,
        "phase": phase,
        "cause": cause,
        "message": message[:MAX_MESSAGE_CHARS],
        "requested_bytes": requested_bytes,
        "limit_bytes": limit_bytes,
        "free_bytes": free_bytes,
        "utilization": utilization,
        "suggested": {"utilization": advice.get("utilization"), "max_model_len": advice.get("max_model_len")},
        "oom_seq": oom_seq,
    }


def describe_failure(
    error: BaseException, *, utilization: float, oom_seq: int | None = None
) -> tuple[ExitCode, dict[str, object]]:
    """How the child's end is told: the exit code and the termination message of what was raised."""
    if isinstance(error, DeviceOutOfMemoryError):
        at_load = error.phase in LOAD_PHASES
        code = ExitCode.DEVICE_OOM_AT_LOAD if at_load else ExitCode.DEVICE_OOM_SERVING
        return code, build_termination(
            "DeviceOOMAtLoad" if at_load else "DeviceOOMWhileServing",
            str(error),
            phase=error.phase.value,
            cause=error.cause.value,
            requested_bytes=error.requested_bytes,
            limit_bytes=error.limit_bytes,
            free_bytes=error.free_bytes,
            utilization=utilization,
            suggested={"utilization": suggest_after_oom(utilization, error.requested_bytes, error.limit_bytes)},
            oom_seq=oom_seq,
        )
    if isinstance(error, DoesNotFitError):
        return error.exit_code, build_termination(
            error.reason,
            str(error),
            phase=OOMPhase.LOAD.value,
            requested_bytes=error.required_bytes,
            limit_bytes=error.available_bytes,
            utilization=utilization,
            suggested=error.suggested,
        )
    if isinstance(error, DeviceContendedError):
        return error.exit_code, build_termination(
            error.reason,
            str(error),
            phase=OOMPhase.LOAD.value,
            cause=OOMCause.NEIGHBOUR.value,
            requested_bytes=error.required_bytes,
            limit_bytes=error.total_bytes,
            free_bytes=error.free_bytes,
            utilization=utilization,
        )
    if isinstance(error, StartupError):
        return error.exit_code, build_termination(error.reason, str(error), utilization=utilization)
    message = f"{type(error).__name__}: {error}"
    return ExitCode.INTERNAL, build_termination("InternalError", message, utilization=utilization)


def suggest_after_oom(utilization: float, requested_bytes: int | None, limit_bytes: int | None) -> float:
    """A smaller share after an own out-of-memory event: down by the bytes that were asked for, at least 2 points.

    limit = utilization x device total, so requested ÷ limit x utilization is the request as a share of the device.
    """
    step = OOM_STEP_RATIO
    if requested_bytes and limit_bytes:
        step = max(step, min(requested_bytes / limit_bytes * utilization, utilization / 4))
    return round(max(utilization - step, OOM_STEP_RATIO), 4)


def write_termination(path: Path | None, termination: Mapping[str, object]) -> None:
    """Write the line; a failure is logged, never raised."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(termination, allow_nan=False) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        _LOG.warning("termination message not written to %s: %s", path, error)
