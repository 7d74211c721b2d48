"""What scaling saw in its latest passes, object by object: fresher than status, which is not worth a write each time.

Load that hovers at its target begins and ends being above it with every look. Status gets what has lasted, and each end
at once (`core.status.should_write`), so that a restart finds less than is true and never more: at worst it waits anew.
"""

from __future__ import annotations

from dataclasses import replace

from kvpilot_operator.core.policy import POLICY, PolicyConstants
from kvpilot_operator.core.ports import Clock
from kvpilot_operator.core.scaling_memory import ScalingMemory
from kvpilot_operator.core.timestamps import seconds_since


class ScalingRecall:
    """One entry for each object, by UID. It may be lost at any time."""

    def __init__(self, clock: Clock, *, policy: PolicyConstants = POLICY) -> None:
        self._clock = clock
        self._policy = policy
        self._entries: dict[str, ScalingMemory] = {}

    def note(self, uid: str, memory: ScalingMemory) -> None:
        self._entries[uid] = memory

    def forget(self, uid: str) -> None:
        self._entries.pop(uid, None)

    def forget_all(self) -> None:
        """Another operator has the objects: from now on status knows better."""
        self._entries.clear()

    def complete(self, uid: str, written: ScalingMemory) -> ScalingMemory:
        """What status tells, with what was seen since it was written."""
        seen = self._entries.get(uid)
        if seen is not None:
            return replace(written, above_since=seen.above_since, below_since=seen.below_since, samples=seen.samples)
        # A counter that was read long ago does not tell when it moved, so there is no rate to be had from it.
        now, limit_s = self._clock.now(), 2 * self._policy.preemption_sample_s
        return replace(written, samples=tuple(s for s in written.samples if seconds_since(s.at, now) <= limit_s))
