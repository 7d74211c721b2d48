"""From settings to a warm engine: open, check that it fits, load, warm up, lay out the KV pool.

What can't fit is refused before the weights are read: their size is known from the checkpoint's header. The pool is
laid out for the highest share that tuning may set, and the caller holds back the blocks above the present one
(usable_blocks_at): pages that no block has used yet take no memory, so the layout is free. A lowered cap therefore
stops growth at once, but pages once used stay resident until the process ends.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from kvpilot_engine.core.grammar import ConstraintCompiler
from kvpilot_engine.core.memory_report import MemoryReport
from kvpilot_engine.core.ports import ModelRunner
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import DeviceOutOfMemoryError, OOMPhase, SettingsError
from kvpilot_engine.execution.activation_peak import build_warmup_plan, measure_peak_growth
from kvpilot_engine.execution.allocation_failure import is_allocation_failure, to_device_oom
from kvpilot_engine.execution.compute_path import ComputePath
from kvpilot_engine.execution.contention import check_not_contended
from kvpilot_engine.execution.cpu_threads import container_cpus
from kvpilot_engine.execution.device_memory import DeviceMemory, HostMemory
from kvpilot_engine.execution.fault_injection import FaultInjection
from kvpilot_engine.execution.memory_budget import MemoryBudget
from kvpilot_engine.execution.settings import ExecutionSettings
from kvpilot_engine.execution.start_times import StartTimes
from kvpilot_engine.execution.token_budget import choose_token_budget, measure_tokens_per_s
from kvpilot_engine.kernels.compile_cache import NUMBA_VARIABLE
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.weights import open_weights

_LOG = logging.getLogger(__name__)
DEVICE_NAME = "cpu"

OnProgress = Callable[[str, int, int], None]
"""Called with (stage, done, of): stages are `weights`, `kernels` (when they are waited for) and `warmup`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """A warm model and the arithmetic of its memory."""

    runner: ModelRunner
    cache: CacheSettings
    """With the model's window."""
    scheduler: SchedulerSettings
    """With max_model_len and the token budget resolved."""
    num_blocks: int
    """Blocks that the storage holds, the null block not counted: as many as the highest share allows."""
    vocab_size: int
    cache_key: str
    """Model and arithmetic: what cached keys and values depend on besides tokens."""
    budget: MemoryBudget
    memory: DeviceMemory
    device_name: str = DEVICE_NAME
    constraints: ConstraintCompiler | None = None
    """Put in by the composition root, which alone knows the tokenizer."""

    @property
    def max_model_len(self) -> int:
        return self.scheduler.max_model_len

    def usable_blocks_at(self, utilization: float) -> int:
        """Blocks that a share allows, never more than exist."""
        return min(self.num_blocks, self.budget.num_blocks_at(utilization))

    def memory_report(self, *, utilization: float, num_usable_blocks: int, num_used_blocks: int) -> MemoryReport:
        """Where every byte is now; the caller knows the share and the blocks in force."""
        budget = self.budget
        total, process = self.memory.total_bytes(), self.memory.process_bytes()
        free = self.memory.free_bytes()
        return MemoryReport(
            device=self.device_name,
            device_total_bytes=total,
            device_free_bytes=free,
            utilization=utilization,
            limit_bytes=budget.limit_bytes(utilization),
            process_base_bytes=budget.process_base_bytes,
            weights_bytes=budget.weights_bytes,
            activations_peak_bytes=budget.activations_peak_bytes,
            kv_reserved_bytes=num_usable_blocks * budget.bytes_per_block,
            kv_used_bytes=num_used_blocks * budget.bytes_per_block,
            kv_bytes_per_block=budget.bytes_per_block,
            kv_tokens=num_usable_blocks * budget.block_size,
            max_model_len=self.max_model_len,
            min_utilization=budget.min_utilization(self.max_model_len),
            process_total_bytes=process,
            other_processes_bytes=max(0, total - free - process),
        )


def load_engine(
    settings: ExecutionSettings,
    cache: CacheSettings,
    scheduler: SchedulerSettings,
    *,
    on_progress: OnProgress | None = None,
    memory: HostMemory | None = None,
    faults: FaultInjection | None = None,
    times: StartTimes | None = None,
) -> LoadedEngine:
    """Load a model for one process. What took how long is logged, with the parts that `times` has already.

    Raises SettingsError, ModelNotFoundError, DoesNotFitError, DeviceContendedError, or DeviceOutOfMemoryError (phase
    load or warmup).
    """
    check_settings(settings)
    memory = memory or HostMemory(override_bytes=settings.device_memory_bytes)
    faults = faults or FaultInjection.from_environ(os.environ)
    times = times or StartTimes()
    phase = OOMPhase.LOAD
    try:
        faults.pass_by(phase)
        with times.part("imports"):
            path = choose_path(settings, cache.block_size)
            path.open_thread_pools(settings.num_threads or container_cpus())
        base_bytes = memory.process_bytes()
        with open_weights(settings.model) as source:
            config = source.config
            path.check(config, cache.block_size)
            longest = settings.max_model_len or config.max_position_embeddings
            weights_bytes = path.weights_bytes(source, max_positions=longest)

            def build_budget(scheduler: SchedulerSettings, base_bytes: int, measured_peak: int) -> MemoryBudget:
                bound = path.activation_bound_bytes(config, scheduler, longest)
                return MemoryBudget(
                    total_bytes=memory.total_bytes(),
                    process_base_bytes=base_bytes,
                    weights_bytes=weights_bytes,
                    activations_peak_bytes=max(measured_peak, bound),
                    bytes_per_block=path.kv_bytes_per_block(config, cache.block_size),
                    block_size=cache.block_size,
                    num_blocks_limit=_limit_blocks(settings, path.kv_bytes_per_block(config, cache.block_size)),
                )

            early = build_budget(scheduler, base_bytes, 0)
            max_model_len = _resolve_length(settings, early, config)
            # as for the budget: with no length asked for, one block must at least fit
            needed = early.required_bytes(settings.max_model_len or cache.block_size)
            check_not_contended(memory, needed - base_bytes)
            with _Compilation(path.compile_kernels(source), times, on_progress), times.part("weights"):
                path.load_weights(
                    source,
                    max_positions=max_model_len,
                    on_progress=lambda done, of: _report(on_progress, "weights", done, of),
                )
        # compiling leaves its own memory behind: it belongs to the process, not to a step
        base_bytes = max(base_bytes, memory.process_bytes() - weights_bytes)
        phase = OOMPhase.WARMUP
        faults.pass_by(phase)
        _report(on_progress, "warmup", 0, 1)
        scheduler = replace(scheduler, max_model_len=max_model_len)

        def make_runner(num_blocks: int, faults: FaultInjection | None = None) -> ModelRunner:
            return path.make_runner(
                scheduler, num_blocks=num_blocks, block_size=cache.block_size, memory=memory, faults=faults
            )

        # the null block alone: steps before the pool exists
        with times.part("warm-up"):
            if settings.step_target_s is not None:
                scheduler = _set_token_budget(settings.step_target_s, scheduler, make_runner(0))
            plan = build_warmup_plan(scheduler, max_model_len)
            peak = measure_peak_growth(memory, partial(make_runner(0).execute, plan)) or 0
        _report(on_progress, "warmup", 1, 1)
        budget = build_budget(scheduler, base_bytes, peak)
        # a longer length than the early one would not have tables: the measured peak can only shorten it
        max_model_len = min(max_model_len, _resolve_length(settings, budget, config))
        num_blocks = budget.num_blocks_at(max(settings.memory_utilization, settings.max_memory_utilization))
        runner = make_runner(num_blocks, faults)
        _LOG.info("%s", times.describe())
        return LoadedEngine(
            runner=runner,
            cache=replace(cache, window=config.window),
            scheduler=replace(scheduler, max_model_len=max_model_len),
            num_blocks=num_blocks,
            vocab_size=config.vocab_size,
            cache_key=f"{settings.model} {path.arithmetic}",
            budget=budget,
            memory=memory,
        )
    except DeviceOutOfMemoryError as error:
        # the warm-up's own steps report their own phase; for the caller it is the start that failed
        error.phase = phase
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_allocation_failure(error):
            raise
        failure = to_device_oom(error, phase, memory)
    raise failure


class _Compilation:
    """Compiles on a thread of its own while the body runs; leaving waits for it and raises what it raised."""

    def __init__(self, compile_kernels: Callable[[], None], times: StartTimes, on_progress: OnProgress | None) -> None:
        self._compile_kernels = compile_kernels
        self._times = times
        self._on_progress = on_progress
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile-kernels")

    def __enter__(self) -> None:
        self._done = self._executor.submit(self._run)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and not self._done.done():
            _report(self._on_progress, "kernels", 0, 1)
            self._done.result()
            _report(self._on_progress, "kernels", 1, 1)
        self._executor.shutdown(wait=True)
        if error is None:
            self._done.result()

    def _run(self) -> None:
        from kvpilot_engine.execution.compile_count import count_compiled  # numba only when a path has been chosen

        with self._times.part("kernels"), count_compiled() as count:
            self._compile_kernels()
        _LOG.info("%s", count.describe(os.environ.get(NUMBA_VARIABLE, "numba's own folders")))


def check_settings(settings: ExecutionSettings) -> None:
    """Refuse what this build can't do; SettingsError lists everything."""
    problems = []
    for name, supported in (
        ("device", (DEVICE_NAME,)),
        ("dtype", ("auto", "float32")),
        ("quantization", ("auto", "none", "int8")),
        ("kv_cache_dtype", ("auto", "float16", "bfloat16", "float32")),
    ):
        value = getattr(settings, name)
        if value not in supported:
            where = "" if name == "device" else f" on {DEVICE_NAME}"
            problems.append(f"{name} is {value!r}; supported{where}: {', '.join(supported)}")
    if settings.dtype == "float32":
        problems += [
            f"{name} is {getattr(settings, name)!r}; with dtype float32 it must be {' or '.join(allowed)}"
            for name, allowed in (("quantization", ("auto", "none")), ("kv_cache_dtype", ("auto", "float32")))
            if getattr(settings, name) not in allowed
        ]
    for name in ("memory_utilization", "max_memory_utilization"):
        share = getattr(settings, name)
        if not 0.0 < share <= 1.0:
            problems.append(f"{name} is {share}; it must be greater than 0 and at most 1")
    for name in ("device_memory_bytes", "num_threads", "num_blocks_override", "kv_cache_memory_bytes", "max_model_len"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            problems.append(f"{name} is {value}; it must be at least 1")
    if problems:
        raise SettingsError(problems)


def choose_path(settings: ExecutionSettings, block_size: int) -> ComputePath:
    """The compiled kernels, or the float32 reference when it is asked for: only that one imports torch.

    SettingsError for keys and values in a form that can't be computed with here.
    """
    if settings.dtype == "float32":
        from kvpilot_engine.execution.torch_path import TorchPath

        return TorchPath()
    from kvpilot_engine.execution.compiled_path import CompiledPath

    return CompiledPath(
        kv_cache_dtype=settings.kv_cache_dtype,
        block_size=block_size,
        quantize_plain=settings.quantization == "int8",
    )


def _limit_blocks(settings: ExecutionSettings, bytes_per_block: int) -> int | None:
    """The user's own limit, as blocks or as bytes."""
    limits = [] if settings.num_blocks_override is None else [settings.num_blocks_override]
    if settings.kv_cache_memory_bytes is not None:
        limits.append(settings.kv_cache_memory_bytes // bytes_per_block)
    return min(limits) if limits else None


def _resolve_length(settings: ExecutionSettings, budget: MemoryBudget, config: DecoderConfig) -> int:
    limit = config.max_position_embeddings
    if settings.max_model_len is not None and settings.max_model_len > limit:
        raise SettingsError([f"max_model_len is {settings.max_model_len}; the model's limit is {limit}"])
    return budget.resolve_max_model_len(settings.memory_utilization, settings.max_model_len, limit)


def _set_token_budget(step_target_s: float, scheduler: SchedulerSettings, runner: ModelRunner) -> SchedulerSettings:
    speed = measure_tokens_per_s(runner.execute, scheduler, time.perf_counter)
    budget = choose_token_budget(speed, step_target_s, scheduler)
    _LOG.info("%.0f prompt tokens/s measured: token budget %d for steps of about %g s", speed, budget, step_target_s)
    return replace(scheduler, max_num_batched_tokens=budget)


def _report(on_progress: OnProgress | None, stage: str, done: int, of: int) -> None:
    if on_progress is not None:
        on_progress(stage, done, of)
