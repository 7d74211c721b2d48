"""One way of computing a model on a device, as loading.py sees it: sizes before, weights, runners after.

The implementations (torch_path, compiled_path) import what they compute with; this module imports neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvpilot_engine.core.ports import ModelRunner
from kvpilot_engine.core.settings import SchedulerSettings
from kvpilot_engine.execution.device_memory import DeviceMemory
from kvpilot_engine.execution.fault_injection import FaultInjection
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.weight_source import WeightSource

OnCount = Callable[[int, int], None]
"""Called with (done, of)."""


class ComputePath(Protocol):
    """Made once per process, before the model is opened."""

    @property
    def arithmetic(self) -> str:
        """Names all that cached keys and values depend on besides model and tokens."""
        ...

    def open_thread_pools(self, num_threads: int) -> None:
        """Start the threads now: a first parallel region at a memory limit ends the process without an exception."""
        ...

    def check(self, config: DecoderConfig, block_size: int) -> None:
        """SettingsError for a model or block size that has no kernels here."""
        ...

    def weights_bytes(self, source: WeightSource, *, max_positions: int) -> int:
        """What the weights will take, told without reading them."""
        ...

    def kv_bytes_per_block(self, config: DecoderConfig, block_size: int) -> int: ...

    def activation_bound_bytes(self, config: DecoderConfig, scheduler: SchedulerSettings, max_model_len: int) -> int:
        """The most that a step takes beside weights and KV cache."""
        ...

    def compile_kernels(self, source: WeightSource) -> Callable[[], None]:
        """What to run, on another thread while the weights are read, so that no step has to compile.

        The header is read now: the source may be closed before the work is done.
        """
        ...

    def load_weights(self, source: WeightSource, *, max_positions: int, on_progress: OnCount) -> None:
        """Read all weights; they are kept here. Called once."""
        ...

    def make_runner(
        self,
        scheduler: SchedulerSettings,
        *,
        num_blocks: int,
        block_size: int,
        memory: DeviceMemory,
        faults: FaultInjection | None = None,
    ) -> ModelRunner:
        """A runner with a pool of its own, on the loaded weights; one is used at a time."""
        ...
