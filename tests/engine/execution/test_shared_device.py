"""A device that others use too: the size of the cache comes from this process's own numbers, whatever others do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.execution.device_memory import HostMemory
from kvpilot_engine.execution.fault_injection import FaultInjection
from kvpilot_engine.execution.loading import LoadedEngine, load_engine
from kvpilot_engine.execution.settings import ExecutionSettings

GIB = 1 << 30
OWN = 100 << 20


@dataclass(frozen=True, slots=True)
class SharedDevice(HostMemory):
    """1 GiB; what others hold is asked anew at every look at the device."""

    others: Callable[[], int] = lambda: 0

    def total_bytes(self) -> int:
        return GIB

    def physical_bytes(self) -> int:
        return GIB

    def process_bytes(self) -> int:
        return OWN

    def family_bytes(self) -> int:
        return OWN

    def peak_process_bytes(self) -> int:
        return OWN

    def reset_peak(self) -> bool:
        return True

    def free_bytes(self) -> int:
        return GIB - OWN - self.others()

    def obtainable_bytes(self) -> int:
        return self.free_bytes()


def load(folder: Path, share: float, others: Callable[[], int]) -> LoadedEngine:
    settings = ExecutionSettings(model=folder, dtype="float32", num_threads=1, memory_utilization=share)
    scheduler = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    device = SharedDevice(others=others)
    return load_engine(settings, CacheSettings(), scheduler, memory=device, faults=FaultInjection())


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> dict[float, int]:
    return {share: load(tiny_folder, share, lambda: 0).usable_blocks_at(share) for share in (0.35, 0.2)}


@pytest.mark.parametrize("share", [0.35, 0.2])
def test_engines_that_start_together_get_what_they_get_one_after_the_other(  # A17
    tiny_folder: Path, alone: dict[float, int], share: float
) -> None:
    """The other one loads its weights while this one measures: between any two looks it holds more."""
    held = iter(range(0, GIB, 8 << 20))
    assert load(tiny_folder, share, lambda: next(held)).usable_blocks_at(share) == alone[share]


def test_a_neighbour_that_leaves_while_we_measure_changes_nothing(  # A18
    tiny_folder: Path, alone: dict[float, int]
) -> None:
    held = iter([*range(512 << 20, 0, -(64 << 20)), *[0] * 100])
    assert load(tiny_folder, 0.35, lambda: next(held)).usable_blocks_at(0.35) == alone[0.35]
