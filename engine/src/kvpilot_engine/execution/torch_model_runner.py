"""Runs planned steps of a model on the CPU: the ModelRunner that production uses.

Not for planning. Invariant: it keeps nothing between steps but the KV storage, so a failed step can be planned again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpilot_engine.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from kvpilot_engine.errors import EngineError, ModelExecutionError, OOMPhase
from kvpilot_engine.execution.allocation_failure import is_allocation_failure, to_device_oom
from kvpilot_engine.execution.batch_inputs import BatchInputs, build_batch_inputs
from kvpilot_engine.execution.device_memory import DeviceMemory
from kvpilot_engine.execution.fault_injection import FaultInjection
from kvpilot_engine.execution.kv_cache_tensors import KVCacheTensors
from kvpilot_engine.execution.sampler import sample
from kvpilot_engine.layers.torch_attention import TorchAttention
from kvpilot_engine.models.torch_decoder import TorchDecoder, attention_shape


class TorchModelRunner:
    """Owns the KV storage; everything else of a step comes with its plan."""

    def __init__(
        self,
        model: TorchDecoder,
        kv_cache: KVCacheTensors,
        memory: DeviceMemory,
        faults: FaultInjection | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._memory = memory
        self._faults = faults or FaultInjection()
        self._attention = TorchAttention(attention_shape(model.config))

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the step. DeviceOutOfMemoryError says which phase; any other failure is a ModelExecutionError."""
        if not plan.scheduled:
            return ModelRunnerOutput({})
        phase = OOMPhase.PREFILL if plan.num_tokens > len(plan.scheduled) else OOMPhase.DECODE
        self._faults.pass_by(phase)
        try:
            logits, inputs = self._forward(plan)
            phase = OOMPhase.SAMPLE
            chosen = sample(logits.numpy(), inputs.sampled)
            return ModelRunnerOutput(chosen.sampled, logprobs=chosen.logprobs, failed=chosen.failed)
        except EngineError:
            raise
        except (RuntimeError, MemoryError, IndexError, ValueError) as error:
            if not is_allocation_failure(error):
                raise ModelExecutionError(f"a step failed during {phase}: {error}") from error
            failure = to_device_oom(error, phase, self._memory)
        # here, not above: inside the except block the traceback would keep the step's tensors alive
        raise failure

    def compute_logits(self, plan: SchedulerOutput) -> Tensor:
        """Write the plan's keys and values; [sampled, vocabulary] logits in the order of the sampling sequences."""
        return self._forward(plan)[0]

    def _forward(self, plan: SchedulerOutput) -> tuple[Tensor, BatchInputs]:
        with torch.inference_mode():
            inputs = build_batch_inputs(plan, self._kv_cache.block_size)
            hidden = self._model.forward(
                inputs.token_ids,
                inputs.positions,
                self._kv_cache.layers,
                self._attention,
                self._attention.plan(inputs.attention),
            )
            return self._model.compute_logits(hidden.index_select(0, inputs.sample_rows)), inputs
