"""Percentiles and summaries of measured samples. Pure; an empty sample has no summary, and says so by None."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is told of a sample; in the sample's own unit."""

    count: int
    mean: float
    median: float
    p95: float
    p99: float
    smallest: float
    largest: float

    def as_json(self) -> dict[str, float]:
        return {key: round(value, 6) for key, value in asdict(self).items()}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of a sorted, non-empty sample lies, linear between neighbours."""
    if not ordered:
        raise ValueError("a percentile of nothing")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share}; it must be between 0 and 1")
    position = share * (len(ordered) - 1)
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(sample: Iterable[float]) -> Summary | None:
    """None for an empty sample."""
    ordered = sorted(sample)
    if not ordered:
        return None
    return Summary(
        count=len(ordered),
        mean=statistics.fmean(ordered),
        median=percentile(ordered, 0.5),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        smallest=ordered[0],
        largest=ordered[-1],
    )
