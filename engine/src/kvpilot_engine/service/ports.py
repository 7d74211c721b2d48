"""What the engine child needs from the composition root: how to load a model, and what the loaded model offers.

`execution` provides the real one and tests bring fakes; `service` knows neither.
"""

from __future__ import annotations

from typing import Protocol

from kvpilot_engine.core.grammar import ConstraintCompiler
from kvpilot_engine.core.memory_report import MemoryReport
from kvpilot_engine.core.ports import ModelRunner
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings


class ServingModel(Protocol):
    """A loaded, warm model and the arithmetic of its memory."""

    @property
    def runner(self) -> ModelRunner: ...

    @property
    def cache(self) -> CacheSettings: ...

    @property
    def scheduler(self) -> SchedulerSettings:
        """With max_model_len and the token budget resolved for this model and device."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that exist, without the null block; usable_blocks_at never answers more."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def cache_key(self) -> str:
        """Names all that cached keys and values depend on besides tokens: the model's files and its arithmetic."""
        ...

    @property
    def constraints(self) -> ConstraintCompiler | None:
        """Makes grammars followable over this model's vocabulary; None: requests with a grammar are refused."""
        ...

    def usable_blocks_at(self, utilization: float) -> int:
        """Blocks that a share of the device allows."""
        ...

    def memory_report(self, *, utilization: float, num_usable_blocks: int, num_used_blocks: int) -> MemoryReport:
        """Where every byte is now."""
        ...


class ModelLoader(Protocol):
    """Picklable: it crosses into the child, where `load` runs. Constructing it imports nothing heavy."""

    @property
    def device_name(self) -> str:
        """The device as the tuning file names it."""
        ...

    def load(self, utilization: float) -> ServingModel:
        """Raises StartupError, or DeviceOutOfMemoryError with a phase of load or warmup."""
        ...
