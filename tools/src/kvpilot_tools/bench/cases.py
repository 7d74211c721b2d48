"""The cases that every server is measured in, and the figures that are taken from each. Pure.

Invariant: a case is the same texts, lengths and order for every server of a round, and other texts in the next round,
so that no server finds a prompt in its cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from kvpilot_tools.bench.load import LoadPlan, LoadResult

MIXED_PROMPTS = (32, 256, 64, 128)
MIXED_OUTPUTS = (128, 16, 96, 48)
STRESS_PROMPTS = (128, 512, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load. `kind` says which figures are told of it."""

    name: str
    kind: str
    num_requests: int
    concurrency: int
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    def plan(self, seed: int) -> LoadPlan:
        return LoadPlan(
            num_requests=self.num_requests,
            concurrency=self.concurrency,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            seed=seed,
        )


def build_cases(*, is_quick: bool) -> tuple[Case, ...]:
    """All cases; quick ones have the same shapes with shorter answers and fewer repetitions."""
    share = 4 if is_quick else 1
    repeats = 1 if is_quick else 3
    output = (128 // share,)
    mixed = tuple(size // share for size in MIXED_OUTPUTS)
    return (
        Case(name="single", kind="streams", num_requests=2 if repeats > 1 else 1, concurrency=1,
             prompt_tokens=(128,), output_tokens=output),
        Case(name="prompt_512", kind="prompt", num_requests=repeats, concurrency=1,
             prompt_tokens=(512,), output_tokens=(1,)),
        Case(name="prompt_2048", kind="prompt", num_requests=max(1, repeats - 1), concurrency=1,
             prompt_tokens=(2048,), output_tokens=(1,)),
        Case(name="streams_8", kind="streams", num_requests=8, concurrency=8,
             prompt_tokens=(128,), output_tokens=output),
        Case(name="streams_32", kind="streams", num_requests=32, concurrency=32,
             prompt_tokens=(128,), output_tokens=output),
        Case(name="mixed_8", kind="streams", num_requests=8, concurrency=8,
             prompt_tokens=MIXED_PROMPTS, output_tokens=mixed),
        Case(name="mixed_32", kind="streams", num_requests=32, concurrency=32,
             prompt_tokens=MIXED_PROMPTS, output_tokens=mixed),
        Case(name="stress_21", kind="streams", num_requests=21, concurrency=21,
             prompt_tokens=STRESS_PROMPTS, output_tokens=(50 // share,)),
    )  # fmt: skip


def take_figures(case: Case, result: LoadResult) -> Mapping[str, float]:
    """The figures of a case in which every request succeeded; raises ValueError when one did not."""
    if result.errors:
        first = next(record for record in result.records if record.error is not None)
        raise ValueError(f"{case.name}: {dict(result.errors)}; the first: {first.detail}")
    ttft = result.ttft
    if ttft is None:
        raise ValueError(f"{case.name}: no text came")
    figures = {"ttft_s": ttft.median, "ttft_p95_s": ttft.p95, "duration_s": result.duration_s}
    if case.kind == "prompt":
        rates = [(r.prompt_tokens or 0) / r.ttft_s for r in result.successes if r.ttft_s]
        return {**figures, "prefill_tps": statistics.median(rates)}
    figures["throughput_tps"] = result.output_tokens_per_s
    if case.concurrency == 1:
        # one after the other: the pauses between requests are not decoding
        steps = [r.time_per_output_token_s for r in result.successes if r.time_per_output_token_s]
        figures |= {"decode_tps": 1 / statistics.median(steps)} if steps else {}
    elif (rate := result.decode_tokens_per_s) is not None:
        figures["decode_tps"] = rate
    return figures
