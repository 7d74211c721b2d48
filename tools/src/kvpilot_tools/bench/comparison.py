"""Ratios of ours to each peer from samples taken in rounds. Pure.

A ratio is above 1 where ours is better, whichever way the figure goes. It is made of the medians over all rounds; its
spread is made of the rounds one by one, each of which had both servers within minutes of each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OURS = "kvpilot"


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure of one server in one round."""

    round: int
    server: str
    case: str
    figure: str
    value: float


@dataclass(frozen=True, slots=True)
class RatioRule:
    """How one entry of the result is made."""

    name: str
    case: str
    figure: str
    aim: float | None = None
    less_is_better: bool = False


_DECODE, _PREFILL, _THROUGHPUT, _TTFT = "decode_tps", "prefill_tps", "throughput_tps", "ttft_s"
_LLAMACPP_RULES = (
    RatioRule("decode_tps_ratio_1", "single", _DECODE, 1.5),
    RatioRule("decode_tps_ratio_8", "streams_8", _DECODE, 3.0),
    RatioRule("decode_tps_ratio_32", "streams_32", _DECODE, 5.0),
    RatioRule("prefill_tps_ratio_512", "prompt_512", _PREFILL, 3.0),
    RatioRule("prefill_tps_ratio_2048", "prompt_2048", _PREFILL, 2.0),
    RatioRule("ttft_ratio_1", "single", _TTFT, 1.0, less_is_better=True),
    RatioRule("startup_ratio", "start", "startup_s", None, less_is_better=True),
)
RULES: Mapping[str, tuple[RatioRule, ...]] = {
    "llamacpp": _LLAMACPP_RULES,
    "llamacpp-no-amx": _LLAMACPP_RULES,
    "vllm": (
        RatioRule("throughput_ratio_1", "single", _THROUGHPUT, 4.0),
        RatioRule("throughput_ratio_8", "streams_8", _THROUGHPUT, 3.0),
        RatioRule("throughput_ratio_32", "streams_32", _THROUGHPUT, 3.0),
        RatioRule("ttft_ratio_512", "prompt_512", _TTFT, None, less_is_better=True),
        RatioRule("ttft_ratio_stress", "stress_21", _TTFT, 3.0, less_is_better=True),
        RatioRule("startup_ratio", "start", "startup_s", 10.0, less_is_better=True),
    ),
    "transformers": (
        RatioRule("throughput_ratio_1", "single", _THROUGHPUT),
        RatioRule("throughput_ratio_8", "mixed_8", _THROUGHPUT),
        RatioRule("throughput_ratio_32", "mixed_32", _THROUGHPUT, 4.0),
    ),
}


def needed_cases(server: str, peers: Iterable[str]) -> frozenset[str]:
    """The cases that a ratio is made of; ours takes part in those of all peers."""
    wanted = peers if server == OURS else (server,)
    return frozenset(rule.case for peer in wanted for rule in RULES[peer])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One entry of the result; None where a server has no sample."""

    peer: str
    rule: RatioRule
    ours: float | None
    theirs: float | None
    ratio: float | None
    spread: tuple[float, float] | None
    """Smallest and largest of the rounds."""

    @property
    def is_met(self) -> bool | None:
        """None without an aim or a figure."""
        return None if self.rule.aim is None or self.ratio is None else self.ratio >= self.rule.aim


def compute_ratios(samples: Iterable[Sample], peers: Iterable[str]) -> list[Ratio]:
    """Every rule of every peer, in their order."""
    values: dict[tuple[str, str, str], dict[int, float]] = {}
    for sample in samples:
        values.setdefault((sample.server, sample.case, sample.figure), {})[sample.round] = sample.value
    return [_compute(values, peer, rule) for peer in peers for rule in RULES[peer]]


def _compute(values: Mapping[tuple[str, str, str], Mapping[int, float]], peer: str, rule: RatioRule) -> Ratio:
    ours = values.get((OURS, rule.case, rule.figure), {})
    theirs = values.get((peer, rule.case, rule.figure), {})
    if not ours or not theirs:
        return Ratio(peer=peer, rule=rule, ours=_median(ours), theirs=_median(theirs), ratio=None, spread=None)
    rounds = sorted(set(ours) & set(theirs))
    by_round = [_divide(ours[turn], theirs[turn], rule) for turn in rounds]
    return Ratio(
        peer=peer,
        rule=rule,
        ours=_median(ours),
        theirs=_median(theirs),
        ratio=_divide(statistics.median(ours.values()), statistics.median(theirs.values()), rule),
        spread=(min(by_round), max(by_round)) if by_round else None,
    )


def _median(values: Mapping[int, float]) -> float | None:
    return statistics.median(values.values()) if values else None


def _divide(ours: float, theirs: float, rule: RatioRule) -> float:
    above, below = (theirs, ours) if rule.less_is_better else (ours, theirs)
    return above / below if below else float("inf")


def ratios_json(ratios: Iterable[Ratio]) -> dict[str, Any]:
    """`{"vs_PEER": {NAME: ratio, "detail": {NAME: {ours, theirs, spread, aim, met}}}}`; numbers are finite or null."""
    result: dict[str, Any] = {}
    for entry in ratios:
        group = result.setdefault(f"vs_{entry.peer.replace('-', '_')}", {"detail": {}})
        group[entry.rule.name] = _rounded(entry.ratio)
        group["detail"][entry.rule.name] = {
            "case": entry.rule.case,
            "figure": entry.rule.figure,
            "ours": _rounded(entry.ours),
            "theirs": _rounded(entry.theirs),
            "spread": None if entry.spread is None else [_rounded(entry.spread[0]), _rounded(entry.spread[1])],
            "aim": entry.rule.aim,
            "met": entry.is_met,
        }
    return result


def _rounded(value: float | None) -> float | None:
    return None if value is None or value == float("inf") else round(value, 4)
