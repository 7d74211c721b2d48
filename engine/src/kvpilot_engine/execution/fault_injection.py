"""A hook for integration tests: an allocation failure at a chosen moment. Off unless KVPILOT_INJECT_OOM_AT is set.

    load | warmup            fails once, while weights load or the first step runs
    prefill:N | decode:N     fails once, in the N-th step of that kind (from 1)

It raises what a real failure becomes (DeviceOutOfMemoryError), so that everything above sees no difference.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpilot_engine.errors import DeviceOutOfMemoryError, OOMCause, OOMPhase, SettingsError

VARIABLE = "KVPILOT_INJECT_OOM_AT"
INJECTED_BYTES = 64 * 1024 * 1024
"""What the injected failure claims to have asked for."""

_PHASES = (OOMPhase.LOAD, OOMPhase.WARMUP, OOMPhase.PREFILL, OOMPhase.DECODE)


class FaultInjection:
    """Counts the passages of one phase and fails at the chosen one."""

    def __init__(self, phase: OOMPhase | None = None, at: int = 1) -> None:
        self._phase = phase
        self._steps_to_go = at

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> FaultInjection:
        """Parse the variable; SettingsError names a bad value."""
        value = environ.get(VARIABLE, "")
        if not value:
            return cls()
        name, _, count = value.partition(":")
        if name not in _PHASES or (count and not (count.isdecimal() and int(count) >= 1)):
            raise SettingsError(
                [f"{VARIABLE} is {value!r}; it must be load, warmup, prefill:N or decode:N with N from 1"]
            )
        return cls(OOMPhase(name), int(count or 1))

    def pass_by(self, phase: OOMPhase) -> None:
        """Called at the start of each phase and step; raises at the chosen moment, and once only."""
        if phase is not self._phase:
            return
        self._steps_to_go -= 1
        if self._steps_to_go == 0:
            raise DeviceOutOfMemoryError(
                f"injected by {VARIABLE}: can't allocate {INJECTED_BYTES} bytes",
                phase=phase,
                cause=OOMCause.OWN,
                requested_bytes=INJECTED_BYTES,
            )
