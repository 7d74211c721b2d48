"""A ModelRunner around the real one that notes what the parent's histograms need: queue times, step kind and duration.

It changes nothing of the plan or the result, and is used by the engine thread only.
"""

from __future__ import annotations

from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.ports import Clock, ModelRunner
from kvpilot_engine.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class ObservedRunner:
    def __init__(self, runner: ModelRunner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._arrivals: dict[RequestId, float] = {}
        self.step_kind = ""
        self.step_s = 0.0
        self.queue_times_s: list[float] = []

    def note_arrival(self, request_id: RequestId) -> None:
        self._arrivals[request_id] = self._clock.monotonic()

    def forget(self, request_id: RequestId) -> None:
        """The request ended; it may never have been scheduled."""
        self._arrivals.pop(request_id, None)

    def reset(self) -> None:
        """Start the notes of the next step."""
        self.step_kind = ""
        self.step_s = 0.0
        self.queue_times_s = []

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        started = self._clock.monotonic()
        for scheduled in plan.scheduled:
            arrival = self._arrivals.pop(scheduled.request_id, None)
            if arrival is not None:
                self.queue_times_s.append(started - arrival)
        self.step_kind = _kind_of(plan)
        try:
            return self._runner.execute(plan)
        finally:
            self.step_s = self._clock.monotonic() - started


def _kind_of(plan: SchedulerOutput) -> str:
    """A sequence that computes one token and samples is decoding; everything else is prefill."""
    num_decodes = sum(1 for s in plan.scheduled if len(s.token_ids) == 1 and s.samples)
    if num_decodes == len(plan.scheduled):
        return "decode"
    return "mixed" if num_decodes else "prefill"
