"""The advice on the block size as JSON, for /engine/memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvpilot_engine.core.block_size_advice import LENGTH_BUCKETS, BlockSizeCost
from kvpilot_engine.service.messages import EngineSnapshot


def describe_block_size(snapshot: EngineSnapshot) -> dict[str, object]:
    """What each block size costs on the newest requests; bytes are those of one running sequence."""
    stats = snapshot.stats
    advice = stats.block_size_advice
    bytes_per_token = snapshot.memory.kv_bytes_per_block / stats.block_size
    return {
        "present": advice.present.block_size,
        "recommended": advice.recommended.block_size,
        "saved_tokens": round(advice.saved_tokens, 2),
        "saved_bytes": round(advice.saved_tokens * bytes_per_token),
        "present_cost": _describe_cost(advice.present, bytes_per_token),
        "candidates": [_describe_cost(cost, bytes_per_token) for cost in advice.candidates],
        "requests": advice.num_requests,
        "prompt_lengths": _describe_lengths(advice.prompt_lengths),
        "output_lengths": _describe_lengths(advice.output_lengths),
    }


def _describe_cost(cost: BlockSizeCost, bytes_per_token: float) -> dict[str, object]:
    return {
        "block_size": cost.block_size,
        "waste_ratio": round(cost.waste_ratio, 5),
        "wasted_tokens": round(cost.wasted_tokens, 2),
        "wasted_bytes": round(cost.wasted_tokens * bytes_per_token),
        "table_len": round(cost.table_len, 2),
    }


def _describe_lengths(counts: Iterable[int]) -> dict[str, int]:
    """Requests by the longest length of their bucket; empty buckets are left out."""
    bounds = [*(str(bound) for bound in LENGTH_BUCKETS), "inf"]
    return {bound: count for bound, count in zip(bounds, counts, strict=True) if count}
