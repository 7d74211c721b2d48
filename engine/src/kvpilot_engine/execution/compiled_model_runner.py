"""The compiled path as a ModelRunner: compiled decoder and paged storage behind the step runner. Imports no torch."""

from __future__ import annotations

from kvpilot_engine.execution.compiled_decoder import CompiledDecoder
from kvpilot_engine.execution.compiled_weights import CompiledWeights
from kvpilot_engine.execution.compiled_workspace import CompiledWorkspace
from kvpilot_engine.execution.device_memory import DeviceMemory
from kvpilot_engine.execution.fault_injection import FaultInjection
from kvpilot_engine.execution.paged_kv_storage import PagedKVStorage
from kvpilot_engine.execution.step_runner import StepRunner


class CompiledModelRunner(StepRunner):
    """Owns the KV storage and uses a workspace; everything else of a step comes with its plan."""

    def __init__(
        self,
        weights: CompiledWeights,
        kv_cache: PagedKVStorage,
        workspace: CompiledWorkspace,
        memory: DeviceMemory,
        faults: FaultInjection | None = None,
    ) -> None:
        super().__init__(CompiledDecoder(weights, kv_cache, workspace), memory, faults)
