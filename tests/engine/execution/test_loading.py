"""From settings to a warm engine: sizes, refusals before any weight is read, and failures by phase."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import (
    DeviceContendedError,
    DeviceOutOfMemoryError,
    DoesNotFitError,
    ModelExecutionError,
    OOMPhase,
    SettingsError,
)
from kvpilot_engine.execution.contention import check_not_contended
from kvpilot_engine.execution.device_memory import HostMemory
from kvpilot_engine.execution.fault_injection import VARIABLE, FaultInjection
from kvpilot_engine.execution.loading import load_engine
from kvpilot_engine.execution.settings import ExecutionSettings
from kvpilot_engine.service.termination import describe_failure

GIB = 1 << 30
SCHEDULER = SchedulerSettings(max_num_batched_tokens=64, max_num_seqs=8)


@dataclass(frozen=True, slots=True)
class FixedMemory(HostMemory):
    """A device of 1 GiB on which this process holds 100 MiB, whatever it does."""

    def total_bytes(self) -> int:
        return GIB

    def process_bytes(self) -> int:
        return 100 << 20

    def free_bytes(self) -> int:
        return GIB - self.process_bytes()

    def reset_peak(self) -> bool:
        return False

    def physical_bytes(self) -> int:
        return self.total_bytes()

    def family_bytes(self) -> int:
        return self.process_bytes()

    def obtainable_bytes(self) -> int:
        return self.free_bytes()


@dataclass(frozen=True, slots=True)
class ContendedMemory(FixedMemory):
    """The same device, where others hold something too."""

    others_bytes: int = 0

    def obtainable_bytes(self) -> int:
        return self.free_bytes() - self.others_bytes


@dataclass(frozen=True, slots=True)
class DeviceOfNumbers:
    physical: int
    family: int
    free: int

    def physical_bytes(self) -> int:
        return self.physical

    def family_bytes(self) -> int:
        return self.family

    def obtainable_bytes(self) -> int:
        return self.free


@pytest.fixture
def settings(tiny_folder: Path) -> ExecutionSettings:
    return ExecutionSettings(model=tiny_folder, dtype="float32", num_threads=1)


def load(settings: ExecutionSettings, *, faults: FaultInjection | None = None, **changes: Any) -> Any:
    scheduler = replace(SCHEDULER, **changes)
    return load_engine(settings, CacheSettings(), scheduler, memory=FixedMemory(), faults=faults or FaultInjection())


def make_plan(token_ids: list[int]) -> SchedulerOutput:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    tokens = tuple(map(TokenId, token_ids))
    return SchedulerOutput((ScheduledSequence(RequestId("a"), 0, tokens, (BlockId(1),), sampling, 0, samples=True),))


def test_a_loaded_engine_serves_and_accounts_for_every_byte(settings: ExecutionSettings) -> None:
    progress: list[tuple[str, int, int]] = []
    engine = load_engine(
        settings,
        CacheSettings(),
        SCHEDULER,
        memory=FixedMemory(),
        faults=FaultInjection(),
        on_progress=lambda *what: progress.append(what),
    )
    assert engine.runner.execute(make_plan([1, 2, 3])).sampled.keys() == {"a"}
    assert [what for what in progress if what[0] != "kernels"] == [
        ("weights", 1, 2),
        ("weights", 2, 2),
        ("warmup", 0, 1),
        ("warmup", 1, 1),
    ]
    assert engine.max_model_len == 256  # the model's own limit
    assert engine.vocab_size == 301

    usable = engine.usable_blocks_at(0.9)
    assert engine.usable_blocks_at(0.8) < usable < engine.num_blocks == engine.usable_blocks_at(1.0)
    report = engine.memory_report(utilization=0.9, num_usable_blocks=usable, num_used_blocks=2)
    held = report.process_base_bytes + report.weights_bytes + report.activations_peak_bytes + report.kv_reserved_bytes
    assert 0 <= report.limit_bytes - held < 2 * report.kv_bytes_per_block  # the null block and a part of one
    assert report.kv_bytes_per_block == 2 * 2 * 2 * 16 * 16 * 4
    assert report.kv_used_bytes == 2 * report.kv_bytes_per_block
    assert report.weights_bytes > 150_000 * 4
    assert report.min_utilization < 0.9


def test_cached_prefixes_carry_model_and_arithmetic(settings: ExecutionSettings) -> None:
    assert load(settings).cache_key == f"{settings.model} float32"


def test_the_length_and_the_pool_follow_the_settings(settings: ExecutionSettings) -> None:
    assert load(replace(settings, max_model_len=77)).scheduler.max_model_len == 77
    limited = load(replace(settings, num_blocks_override=5))
    assert (limited.num_blocks, limited.max_model_len) == (5, 80)
    by_bytes = load(replace(settings, kv_cache_memory_bytes=7 * 8192 + 100))
    assert by_bytes.num_blocks == by_bytes.usable_blocks_at(0.9) == 7


def test_what_cannot_fit_is_refused_before_any_weight_is_read(  # A16
    settings: ExecutionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvpilot_engine.execution.torch_path.load_torch_decoder", lambda *_, **__: pytest.fail("weights were read")
    )
    with pytest.raises(DoesNotFitError) as caught:
        load(replace(settings, memory_utilization=0.05))
    assert 0.05 < caught.value.suggested["utilization"] < 0.3
    with pytest.raises(DoesNotFitError) as caught:
        load(replace(settings, num_blocks_override=5, max_model_len=81))
    assert caught.value.suggested == {"max_model_len": 80}


def test_two_reasons_not_to_start_can_be_told_apart(  # A16
    settings: ExecutionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reason 1: others hold what the share needs. Reason 2: the share is too small, whoever else is there."""
    monkeypatch.setattr(
        "kvpilot_engine.execution.torch_path.load_torch_decoder", lambda *_, **__: pytest.fail("weights were read")
    )
    crowded = ContendedMemory(others_bytes=GIB - (100 << 20))
    with pytest.raises(DeviceContendedError) as contended:
        load_engine(settings, CacheSettings(), SCHEDULER, memory=crowded)
    assert contended.value.free_bytes == 0
    assert contended.value.required_bytes > 0
    with pytest.raises(DoesNotFitError):
        load_engine(replace(settings, memory_utilization=0.05), CacheSettings(), SCHEDULER, memory=crowded)

    code, termination = describe_failure(contended.value, utilization=0.9)
    assert code == 73
    assert (termination["reason"], termination["phase"], termination["cause"]) == (
        "DeviceMemoryContended",
        "load",
        "neighbour",
    )
    assert (termination["limit_bytes"], termination["free_bytes"]) == (GIB, 0)
    assert termination["suggested"] == {"utilization": None, "max_model_len": None}


def test_others_that_leave_enough_to_start_are_no_reason(settings: ExecutionSettings) -> None:  # A16
    """They hold a third of what the share would take."""
    shared = ContendedMemory(others_bytes=GIB // 3)
    assert load_engine(settings, CacheSettings(), SCHEDULER, memory=shared).num_blocks > 0


@pytest.mark.parametrize(
    ("physical", "family", "free", "is_contended"),
    [(1000, 100, 500, False), (1000, 100, 499, True), (1000, 500, 499, True), (1000, 501, 499, False)],
    ids=["enough is free", "others hold it", "all but ours would do", "our own parent holds it"],
)
def test_contended_means_that_it_would_fit_without_the_others(
    physical: int, family: int, free: int, is_contended: bool
) -> None:
    device = DeviceOfNumbers(physical, family, free)
    if not is_contended:
        check_not_contended(device, 500)
        return
    with pytest.raises(DeviceContendedError, match=f"others hold {physical - family - free} of {physical} bytes"):
        check_not_contended(device, 500)


def test_token_budget_is_measured_only_when_a_target_is_set(settings: ExecutionSettings) -> None:
    def budget(step_target_s: float | None) -> int:
        engine = load(replace(settings, step_target_s=step_target_s), max_num_batched_tokens=128)
        budget: int = engine.scheduler.max_num_batched_tokens
        return budget

    assert [budget(None), budget(1e-9), budget(1e9)] == [128, 32, 128]


def test_bad_settings_are_listed_all_at_once(settings: ExecutionSettings) -> None:
    with pytest.raises(SettingsError) as caught:
        load(replace(settings, dtype="float16", device="tpu", memory_utilization=1.5, num_threads=0))
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "device",
        "dtype",
        "memory_utilization",
        "num_threads",
    ]
    with pytest.raises(SettingsError, match="257"):
        load(replace(settings, max_model_len=257))


@pytest.mark.parametrize("phase", ["load", "warmup"])
def test_an_injected_failure_at_the_start_names_its_phase(settings: ExecutionSettings, phase: str) -> None:
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        load(settings, faults=FaultInjection.from_environ({VARIABLE: phase}))
    assert caught.value.phase == phase


def test_an_injected_failure_while_serving_happens_once(settings: ExecutionSettings) -> None:
    engine = load(settings, faults=FaultInjection.from_environ({VARIABLE: "prefill:2"}))
    undisturbed = engine.runner.execute(make_plan([1, 2, 3]))
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        engine.runner.execute(make_plan([1, 2, 3]))
    assert caught.value.phase is OOMPhase.PREFILL
    assert engine.runner.execute(make_plan([1, 2, 3])) == undisturbed


@pytest.mark.parametrize("value", ["later", "prefill:0", "prefill:x", "decode:-1"])
def test_a_bad_injection_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match=VARIABLE):
        FaultInjection.from_environ({VARIABLE: value})


@pytest.mark.parametrize(
    ("error", "requested"),
    [
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
            ),
            4096,
        ),
        (MemoryError("Unable to allocate 1.50 GiB for an array with shape (1,)"), 3 * GIB // 2),
        (MemoryError(), None),
    ],
)
@pytest.mark.parametrize(
    ("tokens", "place", "phase"),
    [
        ([1, 2], "build_batch_inputs", OOMPhase.PREFILL),
        ([1], "build_batch_inputs", OOMPhase.DECODE),
        ([1], "sample", OOMPhase.SAMPLE),
    ],
)
def test_every_kind_of_failed_allocation_becomes_one_error(
    settings: ExecutionSettings,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    requested: int | None,
    tokens: list[int],
    place: str,
    phase: OOMPhase,
) -> None:
    engine = load(settings)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"kvpilot_engine.execution.step_runner.{place}", fail)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        engine.runner.execute(make_plan(tokens))
    assert (caught.value.phase, caught.value.requested_bytes) == (phase, requested)
    assert caught.value.limit_bytes == GIB


def test_any_other_failure_is_not_taken_for_memory(settings: ExecutionSettings) -> None:
    engine = load(settings)
    with pytest.raises(ModelExecutionError, match="prefill") as caught:
        engine.runner.execute(make_plan([1, 100_000]))
    assert not isinstance(caught.value, DeviceOutOfMemoryError)


def test_settings_and_sources_import_no_torch() -> None:
    """The HTTP parent uses both."""
    script = (
        "import sys, kvpilot_engine.execution.settings, kvpilot_engine.models.source; print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


REAL_LIMIT = """
import resource, sys
from pathlib import Path
import torch
from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import DeviceOutOfMemoryError
from kvpilot_engine.execution.loading import load_engine
from kvpilot_engine.execution.settings import ExecutionSettings

settings = ExecutionSettings(model=Path(sys.argv[1]), dtype="float32", num_threads=2, num_blocks_override=100)
engine = load_engine(settings, CacheSettings(), SchedulerSettings(max_num_batched_tokens=64, max_num_seqs=8))
sampling = SamplingParams(max_tokens=1, temperature=0.0)
table = tuple(map(BlockId, range(1, 17)))

def plan(sequences):
    return SchedulerOutput(tuple(
        ScheduledSequence(RequestId(str(i)), 0, (TokenId(3),) * 256, table, sampling, 0, True)
        for i in range(sequences)
    ))

before = engine.runner.execute(plan(1))
status = Path("/proc/self/status").read_text().splitlines()
used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + (24 << 20), resource.RLIM_INFINITY))
try:
    engine.runner.execute(plan(400))
except DeviceOutOfMemoryError as error:
    print(error.phase, error.requested_bytes is None or error.requested_bytes > 0)
print(engine.runner.execute(plan(1)) == before)
"""


def test_a_real_failed_allocation_is_survived(tiny_folder: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", REAL_LIMIT, str(tiny_folder)], capture_output=True, text=True, check=False
    )
    assert answer.stdout.split() == ["prefill", "True", "True"], answer.stderr
