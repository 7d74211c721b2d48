"""The families that are computed at scrape time from one reading of the engine, under our names and under vLLM's.

Pure: a reading in, metric families out. Whatever the engine's state, every family and every known label value is there
(0 where nothing happened), so that a board or an autoscaler never meets an absent series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from kvpilot_engine.core.memory_report import MemoryReport
from kvpilot_engine.core.scheduler_output import FinishReason
from kvpilot_engine.core.stats import EngineStats
from kvpilot_engine.errors import OOMCause, OOMPhase

PREFIX = "kvpilot_engine_"
VLLM = "vllm:"
ENGINE_STATES = ("loading", "ready", "draining", "held", "failed")
TUNING_STATES = ("none", "applied", "deferred", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """Everything that a scrape tells about the engine, at this moment."""

    model_name: str
    version: str
    state: str
    stats: EngineStats = field(default_factory=EngineStats)
    memory: MemoryReport | None = None
    """None while loading: the bytes are then 0."""
    snapshot_age_s: float | None = None
    tuning_revision: int = 0
    tuning_state: str = "none"
    enable_prefix_caching: bool = True
    oom_counts: Mapping[tuple[OOMPhase, OOMCause], int] = field(default_factory=dict)


def build_families(reading: EngineReading) -> Iterator[Metric]:
    yield from _own_gauges(reading)
    yield from _own_counters(reading)
    yield from _memory(reading)
    yield from _infos(reading)
    yield from _vllm(reading)


def _own_gauges(reading: EngineReading) -> Iterator[Metric]:
    stats = reading.stats
    yield _gauge("requests_running", "Sequences in the running batch.", stats.num_running)
    waiting = GaugeMetricFamily(
        PREFIX + "requests_waiting", "Sequences waiting, by what they wait for.", labels=["reason"]
    )
    waiting.add_metric(["capacity"], stats.num_waiting_capacity)
    waiting.add_metric(["budget"], stats.num_waiting_budget)
    yield waiting
    yield _gauge("requests_swapped_out", "Sequences waiting again after a preemption.", stats.num_swapped_out)
    yield _gauge("kv_usage_ratio", "Blocks held by live requests ÷ usable blocks, 0..1.", stats.kv_usage_ratio)
    yield _gauge(
        "kv_cached_ratio", "Unreferenced blocks with a reusable prefix ÷ usable blocks.", stats.kv_cached_ratio
    )
    yield _gauge("kv_blocks", "KV blocks that the cap allows now.", stats.num_blocks_total)
    yield _gauge("kv_blocks_used", "KV blocks held by live requests.", stats.num_blocks_used)
    yield _gauge("kv_blocks_free", "KV blocks neither referenced nor cached.", stats.num_blocks_free)
    yield _gauge("kv_blocks_cached", "KV blocks not referenced, with a reusable prefix.", stats.num_blocks_cached)
    yield _gauge("kv_blocks_held_out", "KV blocks kept out of use by the cap.", stats.num_blocks_held_out)
    yield _gauge("kv_block_size_tokens", "Tokens per KV block.", stats.block_size)
    advice = stats.block_size_advice
    yield _gauge(
        "kv_block_size_recommended_tokens",
        "Tokens per KV block that suit the newest requests.",
        advice.recommended.block_size,
    )
    yield _gauge(
        "kv_block_waste_ratio", "Slots in part-filled blocks ÷ slots held, newest requests.", advice.present.waste_ratio
    )
    yield _gauge(
        "kv_block_waste_recommended_ratio", "The same at the recommended block size.", advice.recommended.waste_ratio
    )
    yield _gauge("snapshot_age_seconds", "Age of the engine's newest snapshot.", reading.snapshot_age_s or 0.0)
    states = GaugeMetricFamily(PREFIX + "state", "1 for the state that the engine is in.", labels=["state"])
    for state in ENGINE_STATES:
        states.add_metric([state], float(state == reading.state))
    yield states
    revisions = GaugeMetricFamily(
        PREFIX + "tuning_revision", "Newest tuning revision, under the state that it is in.", labels=["state"]
    )
    for state in TUNING_STATES:
        revisions.add_metric([state], reading.tuning_revision if state == reading.tuning_state else 0)
    yield revisions


def _own_counters(reading: EngineReading) -> Iterator[Metric]:
    stats = reading.stats
    yield _counter("steps", "Engine steps run.", stats.num_steps_total)
    yield _counter("preemptions", "Sequences preempted for want of blocks.", stats.num_preemptions_total)
    yield _counter("recomputed_tokens", "Tokens computed again after preemptions.", stats.num_recomputed_tokens_total)
    yield _counter("prompt_tokens", "Prompt tokens of admitted sequences.", stats.num_prompt_tokens_total)
    yield _counter("generation_tokens", "Tokens generated.", stats.num_generation_tokens_total)
    yield _counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries_total
    )
    yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_prefix_hits_total)
    finished = CounterMetricFamily(PREFIX + "requests_finished", "Sequences ended, by reason.", labels=["reason"])
    for reason in FinishReason:
        finished.add_metric([reason.value], stats.finished_total.get(reason.value, 0))
    yield finished
    ooms = CounterMetricFamily(PREFIX + "oom_events", "Out-of-memory events.", labels=["phase", "cause"])
    for phase in OOMPhase:
        for cause in OOMCause:
            ooms.add_metric([phase.value, cause.value], reading.oom_counts.get((phase, cause), 0))
    yield ooms


def _memory(reading: EngineReading) -> Iterator[Metric]:
    report = reading.memory
    sizes = memory_bytes(report)
    family = GaugeMetricFamily(PREFIX + "memory_bytes", "Where the device's memory is, by kind.", labels=["kind"])
    for kind, size in sizes.items():
        family.add_metric([kind], size)
    yield family
    cap = 0.0 if report is None else report.utilization
    yield _gauge("memory_utilization_ratio", "The cap in force: this process's share of the device, 0..1.", cap)
    floor = 0.0 if report is None else report.min_utilization
    yield _gauge("memory_min_utilization_ratio", "Smallest share that holds one request of full length.", floor)
    yield _gauge("kv_tokens", "Tokens that the usable blocks hold.", 0 if report is None else report.kv_tokens)
    yield _gauge("max_model_len_tokens", "Longest sequence.", 0 if report is None else report.max_model_len)


def memory_bytes(report: MemoryReport | None) -> dict[str, int]:
    """The report's sizes by the label value that they are exported under."""
    kinds = {
        "weights": "weights_bytes",
        "activations_peak": "activations_peak_bytes",
        "kv_reserved": "kv_reserved_bytes",
        "kv_used": "kv_used_bytes",
        "graphs": "graphs_bytes",
        "allocator_idle": "allocator_idle_bytes",
        "process_base": "process_base_bytes",
        "process_total": "process_total_bytes",
        "limit": "limit_bytes",
        "device_total": "device_total_bytes",
        "device_free": "device_free_bytes",
        "other_processes": "other_processes_bytes",
    }
    return {kind: 0 if report is None else int(getattr(report, name)) for kind, name in kinds.items()}


def _infos(reading: EngineReading) -> Iterator[Metric]:
    yield InfoMetricFamily(PREFIX + "build", "Version of the engine.", value={"version": reading.version})
    yield InfoMetricFamily(
        PREFIX + "model",
        "What is served, and on what.",
        value={"model_name": reading.model_name, "device": "" if reading.memory is None else reading.memory.device},
    )


def _vllm(reading: EngineReading) -> Iterator[Metric]:
    stats = reading.stats
    waiting = stats.num_waiting_capacity + stats.num_waiting_budget
    labels = {"model_name": reading.model_name, "engine": "0"}
    gauges: list[tuple[str, str, float]] = [
        ("num_requests_running", "Requests in the running batch.", stats.num_running),
        ("num_requests_waiting", "Requests waiting.", waiting),
        ("kv_cache_usage_perc", "KV cache in use, 1 is full.", stats.kv_usage_ratio),
    ]
    for name, text, value in gauges:
        yield _labelled(GaugeMetricFamily(VLLM + name, text, labels=list(labels)), labels, value)
    by_reason = GaugeMetricFamily(
        VLLM + "num_requests_waiting_by_reason", "Requests waiting, by reason.", labels=[*labels, "reason"]
    )
    by_reason.add_metric([*labels.values(), "capacity"], stats.num_waiting_capacity)
    by_reason.add_metric([*labels.values(), "deferred"], stats.num_waiting_budget)
    yield by_reason
    counters: list[tuple[str, str, float]] = [
        ("num_preemptions", "Preemptions.", stats.num_preemptions_total),
        ("prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens_total),
        ("generation_tokens", "Generated tokens.", stats.num_generation_tokens_total),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries_total),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_prefix_hits_total),
        ("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", stats.num_prefix_hits_total),
    ]
    for name, text, value in counters:
        yield _labelled(CounterMetricFamily(VLLM + name, text, labels=list(labels)), labels, value)
    success = CounterMetricFamily(
        VLLM + "request_success", "Requests ended, by reason.", labels=[*labels, "finished_reason"]
    )
    for reason in FinishReason:
        success.add_metric([*labels.values(), reason.value], stats.finished_total.get(reason.value, 0))
    yield success
    config = {
        **labels,
        "block_size": str(stats.block_size),
        "num_gpu_blocks": str(stats.num_blocks_total),
        "gpu_memory_utilization": f"{0.0 if reading.memory is None else reading.memory.utilization:g}",
        "enable_prefix_caching": str(reading.enable_prefix_caching),
    }
    family = GaugeMetricFamily(VLLM + "cache_config_info", "Settings of the KV cache.", labels=list(config))
    yield _labelled(family, config, 1)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, labels: Mapping[str, str], value: float) -> Metric:
    values: Iterable[str] = labels.values()
    family.add_metric(list(values), value)
    return family
