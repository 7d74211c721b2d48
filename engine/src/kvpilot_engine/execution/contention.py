"""Whether others hold so much of the device that this process can't start, though its share would do.

Asked once, before the weights are read. Not for what is too big by itself: that is the budget's refusal, or the
kernel's. Memory that others hold and that leaves room enough is no reason to stay away.
"""

from __future__ import annotations

from typing import Protocol

from kvpilot_engine.errors import DeviceContendedError


class SharedMemory(Protocol):
    """The device as all its users see it, in bytes; a total set by the user changes none of it."""

    def physical_bytes(self) -> int: ...

    def obtainable_bytes(self) -> int:
        """What could be allocated now, with what the kernel would take back first."""
        ...

    def family_bytes(self) -> int:
        """What this process and the parent that serves its requests hold."""
        ...


def check_not_contended(memory: SharedMemory, missing_bytes: int) -> None:
    """Raise DeviceContendedError when `missing_bytes` more can't be had now, and could be without the others."""
    free = memory.obtainable_bytes()
    if free >= missing_bytes:
        return
    without_others = memory.physical_bytes() - memory.family_bytes()
    if without_others < missing_bytes:
        return
    raise DeviceContendedError(
        f"the start needs {missing_bytes} bytes more and {free} are free: others hold {without_others - free} of "
        f"{memory.physical_bytes()} bytes; without them the share would do",
        required_bytes=missing_bytes,
        free_bytes=free,
        total_bytes=memory.physical_bytes(),
    )
