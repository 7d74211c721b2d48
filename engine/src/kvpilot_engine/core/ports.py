"""What the core needs from outside, as protocols. `execution` implements ModelRunner; tests bring fakes."""

from __future__ import annotations

from typing import Protocol

from kvpilot_engine.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class ModelRunner(Protocol):
    """Runs one planned step on the device."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Write the planned tokens' keys and values and sample where asked.

        A sequence whose own logits are unusable is named in `failed`, and the others get their tokens.
        Raises DeviceOutOfMemoryError (nothing the plan reserved is committed then) or ModelExecutionError.
        """
        ...


class Clock(Protocol):
    """Seconds that never go back."""

    def monotonic(self) -> float: ...
