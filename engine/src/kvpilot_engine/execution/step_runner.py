"""Runs planned steps with any decoder: forward, logits of the rows that need them, sampling, log-probabilities.

Not for planning and not for arithmetic. Invariant: it keeps nothing between steps but what its decoder stores in the KV
cache, so a failed step can be planned again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.scheduler_output import ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.errors import EngineError, ModelExecutionError, OOMPhase
from kvpilot_engine.execution.allocation_failure import is_allocation_failure, to_device_oom
from kvpilot_engine.execution.batch_inputs import BatchInputs, Integers, build_batch_inputs
from kvpilot_engine.execution.device_memory import DeviceMemory
from kvpilot_engine.execution.fault_injection import FaultInjection
from kvpilot_engine.execution.logprobs import compute_logprobs
from kvpilot_engine.execution.sampler import sample

LOGITS_BYTES = 16 * 2**20
"""Most bytes of logits at once (one row at least): a prompt's log-probabilities need a row for each of its tokens."""

Logits = npt.NDArray[np.float32]


class StepDecoder(Protocol):
    """A model with its KV cache."""

    @property
    def block_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, inputs: BatchInputs) -> None:
        """Write the rows' keys and values; the hidden rows are kept until the next forward."""
        ...

    def compute_logits(self, rows: Integers) -> Logits:
        """[rows, vocabulary] of some rows of the last forward; valid until the next call."""
        ...


class StepRunner:
    """The ModelRunner of every device."""

    def __init__(self, decoder: StepDecoder, memory: DeviceMemory, faults: FaultInjection | None = None) -> None:
        self._decoder = decoder
        self._memory = memory
        self._faults = faults or FaultInjection()
        self._rows_at_once = rows_of_logits(decoder.vocab_size)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the step. DeviceOutOfMemoryError says which phase; any other failure is a ModelExecutionError."""
        if not plan.scheduled:
            return ModelRunnerOutput({})
        phase = OOMPhase.PREFILL if plan.num_tokens > len(plan.scheduled) else OOMPhase.DECODE
        self._faults.pass_by(phase)
        try:
            inputs = build_batch_inputs(plan, self._decoder.block_size)
            self._decoder.forward(inputs)
            phase = OOMPhase.SAMPLE
            return self._finish(plan, inputs)
        except EngineError:
            raise
        except (RuntimeError, MemoryError, IndexError, ValueError) as error:
            if not is_allocation_failure(error):
                raise ModelExecutionError(f"a step failed during {phase}: {error}") from error
            failure = to_device_oom(error, phase, self._memory)
        # here, not above: inside the except block the traceback would keep the step's arrays alive
        raise failure

    def compute_logits(self, plan: SchedulerOutput) -> Logits:
        """Write the plan's keys and values; [sampled, vocabulary] logits in the order of the sampling sequences."""
        inputs = build_batch_inputs(plan, self._decoder.block_size)
        self._decoder.forward(inputs)
        parts = [self._decoder.compute_logits(inputs.sample_rows[part]).copy() for part in self._parts(inputs.sampled)]
        return np.concatenate(parts) if parts else np.empty((0, self._decoder.vocab_size), np.float32)

    def _finish(self, plan: SchedulerOutput, inputs: BatchInputs) -> ModelRunnerOutput:
        sampled: dict[RequestId, TokenId] = {}
        logprobs: dict[RequestId, TokenLogprobs] = {}
        failed: dict[RequestId, str] = {}
        for part in self._parts(inputs.sampled):
            chosen = sample(self._decoder.compute_logits(inputs.sample_rows[part]), inputs.sampled[part])
            sampled |= chosen.sampled
            logprobs |= chosen.logprobs
            failed |= chosen.failed
        prompt_logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        for sequence, first_row in zip(plan.scheduled, inputs.query_start.tolist(), strict=False):
            if not sequence.prompt_targets:
                continue
            rated = self._rate_prompt(sequence, first_row)
            if rated is None:
                failed[sequence.request_id] = (
                    f"the logits of the prompt between {sequence.start_position} and {sequence.end_position} "
                    "are not finite"
                )
                sampled.pop(sequence.request_id, None)
            else:
                prompt_logprobs[sequence.request_id] = rated
        return ModelRunnerOutput(sampled, logprobs=logprobs, prompt_logprobs=prompt_logprobs, failed=failed)

    def _rate_prompt(self, sequence: ScheduledSequence, first_row: int) -> tuple[TokenLogprobs, ...] | None:
        """The log-probabilities of the sequence's prompt targets; None when one can't be told."""
        found: list[TokenLogprobs] = []
        num_top = sequence.sampling.prompt_logprobs or 0
        for part in self._parts(sequence.prompt_targets):
            rows = np.arange(first_row + part.start, first_row + part.stop)
            logits = self._decoder.compute_logits(rows)
            for rated in compute_logprobs(logits, sequence.prompt_targets[part], num_top):
                if rated is None:
                    return None
                found.append(rated)
        return tuple(found)

    def _parts(self, items: tuple[object, ...]) -> Iterator[slice]:
        """Slices of so many items as have logits at once."""
        for start in range(0, len(items), self._rows_at_once):
            yield slice(start, min(start + self._rows_at_once, len(items)))


def rows_of_logits(vocab_size: int) -> int:
    """Rows of logits that are computed at once."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))
