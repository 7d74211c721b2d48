"""The memory report as JSON and as a small table for people. Pure."""

from __future__ import annotations

from dataclasses import asdict

from kvpilot_engine.core.memory_report import MemoryReport

_MIB = 1024 * 1024


def describe_memory(report: MemoryReport | None) -> dict[str, object] | None:
    if report is None:
        return None
    return {**asdict(report), "max_concurrency_at_max_len": round(report.max_concurrency_at_max_len, 3)}


def build_memory_lines(report: MemoryReport | None) -> list[str]:
    """What adds up to the cap, then what the cap is a part of."""
    if report is None:
        return ["the model is loading: no figures yet"]
    parts = [
        ("process base", report.process_base_bytes),
        ("weights", report.weights_bytes),
        ("activations (peak)", report.activations_peak_bytes),
        ("graphs", report.graphs_bytes),
        ("KV cache", report.kv_reserved_bytes),
    ]
    spare = report.limit_bytes - sum(size for _, size in parts)
    rows = [
        *parts,
        ("not a whole block", spare),
        (f"cap ({report.utilization:.0%} of {report.device})", report.limit_bytes),
        ("device, total", report.device_total_bytes),
        ("device, free", report.device_free_bytes),
        ("this process now", report.process_total_bytes),
        ("other processes", report.other_processes_bytes),
    ]
    lines = [f"{name:<32}{size / _MIB:>12,.1f} MiB" for name, size in rows]
    lines.append(
        f"KV cache: {report.kv_tokens} tokens, {report.max_concurrency_at_max_len:.1f} requests of "
        f"{report.max_model_len} tokens at once; smallest share that works: {report.min_utilization:.2f}"
    )
    return lines
