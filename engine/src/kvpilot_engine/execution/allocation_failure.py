"""Recognizes a failed allocation among the exceptions of torch, numpy and Python, and names its bytes and phase."""

from __future__ import annotations

import re

from kvpilot_engine.errors import DeviceOutOfMemoryError, OOMCause, OOMPhase
from kvpilot_engine.execution.device_memory import DeviceMemory

_BYTES = re.compile(r"tried to allocate (\d+) bytes")
# numpy says it in rounded units
_NUMPY_SIZE = re.compile(r"Unable to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def is_allocation_failure(error: BaseException) -> bool:
    """torch raises a plain RuntimeError on the CPU; only its text tells."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def requested_bytes(error: BaseException) -> int | None:
    """The size that was asked for; None where the text does not say."""
    text = str(error)
    if found := _BYTES.search(text):
        return int(found.group(1))
    if found := _NUMPY_SIZE.search(text):
        return int(float(found.group(1)) * _UNITS[found.group(2)])
    return None


def to_device_oom(error: BaseException, phase: OOMPhase, memory: DeviceMemory) -> DeviceOutOfMemoryError:
    """Our error for it. Raise it outside the except block: the traceback there pins the step's tensors."""
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DeviceOutOfMemoryError(
        f"out of memory during {phase}: {first_line}",
        phase=phase,
        cause=OOMCause.OWN,
        requested_bytes=requested_bytes(error),
        limit_bytes=memory.total_bytes(),
        free_bytes=memory.free_bytes(),
    )
