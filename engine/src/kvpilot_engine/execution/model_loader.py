"""What the composition root hands to the engine child: settings that know how to become a loaded model there.

Picklable and light: torch is imported when `load` runs, in the child, and never in the HTTP parent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.execution.settings import ExecutionSettings

if TYPE_CHECKING:
    from kvpilot_engine.execution.loading import LoadedEngine, OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuModelLoader:
    """Loads for the CPU."""

    settings: ExecutionSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    on_progress: OnProgress | None = None
    """A module-level function, so that it can be pickled."""
    device_name: str = "cpu"

    def load(self, utilization: float) -> LoadedEngine:
        """Load at that share of the device; errors as load_engine."""
        from kvpilot_engine.execution.loading import load_engine

        settings = replace(self.settings, memory_utilization=utilization)
        return load_engine(settings, self.cache, self.scheduler, on_progress=self.on_progress)
