"""The float32 reference as a ModelRunner: torch decoder and float32 KV cache behind the step runner."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpilot_engine.execution.batch_inputs import BatchInputs, Integers
from kvpilot_engine.execution.device_memory import DeviceMemory
from kvpilot_engine.execution.fault_injection import FaultInjection
from kvpilot_engine.execution.kv_cache_tensors import KVCacheTensors
from kvpilot_engine.execution.step_runner import Logits, StepRunner
from kvpilot_engine.execution.torch_inputs import build_torch_inputs
from kvpilot_engine.layers.torch_attention import TorchAttention
from kvpilot_engine.models.torch_decoder import TorchDecoder, attention_shape


class _TorchStepDecoder:
    def __init__(self, model: TorchDecoder, kv_cache: KVCacheTensors) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._attention = TorchAttention(attention_shape(model.config))
        self._hidden: Tensor | None = None

    @property
    def block_size(self) -> int:
        return self._kv_cache.block_size

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    def forward(self, inputs: BatchInputs) -> None:
        self._hidden = None  # the last step's rows must not be held while this one computes
        with torch.inference_mode():
            tensors = build_torch_inputs(inputs)
            self._hidden = self._model.forward(
                tensors.token_ids,
                tensors.positions,
                self._kv_cache.layers,
                self._attention,
                self._attention.plan(tensors.attention),
            )

    def compute_logits(self, rows: Integers) -> Logits:
        assert self._hidden is not None, "compute_logits before forward"
        with torch.inference_mode():
            logits: Logits = self._model.compute_logits(self._hidden.index_select(0, torch.from_numpy(rows))).numpy()
            return logits


class TorchModelRunner(StepRunner):
    """Owns the KV storage; everything else of a step comes with its plan."""

    def __init__(
        self,
        model: TorchDecoder,
        kv_cache: KVCacheTensors,
        memory: DeviceMemory,
        faults: FaultInjection | None = None,
    ) -> None:
        super().__init__(_TorchStepDecoder(model, kv_cache), memory, faults)
