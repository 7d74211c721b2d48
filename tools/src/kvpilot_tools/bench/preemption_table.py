"""Simulated preemptions under several reserves and victim rules: `python -m kvpilot_tools.bench.preemption_table`.

The real scheduler and cache with a runner that computes nothing. Steps, not seconds: a step that also recomputes is a
longer one, so read steps and recomputed tokens together. The first reserve and the first victim rule are the engine's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvpilot_engine.core.admission import ReserveRule, compute_reserve
from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.kv_cache_manager import KVCacheManager
from kvpilot_engine.core.preemption import VictimRule, choose_victim
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler import Scheduler
from kvpilot_engine.core.scheduler_output import ModelRunnerOutput
from kvpilot_engine.core.sequence import Sequence
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings

STOP = TokenId(1)
SEEDS = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests that arrive together; `outputs` are the real lengths, which the scheduler doesn't know."""

    name: str
    num_blocks: int
    budget: int
    prompts: tuple[int, ...]
    limits: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    num_steps: int
    num_preemptions: int
    most_of_one_request: int
    recomputed_share: float
    """Recomputed tokens ÷ tokens that had to be computed once."""


def make_mixed_trace(seed: int, *, end_early: bool) -> Trace:
    """64 requests of 16 to 512 tokens in and out; in half of the traces answers end anywhere before their limit."""
    source = random.Random(seed)  # noqa: S311  a repeatable trace, no secret
    prompts = tuple(source.randint(16, 512) for _ in range(64))
    limits = tuple(source.randint(16, 512) for _ in range(64))
    outputs = tuple(source.randint(1, limit) for limit in limits) if end_early else limits
    name = "64 mixed in 250 blocks, " + ("answers end early" if end_early else "answers as long as allowed")
    return Trace(name=name, num_blocks=250, budget=512, prompts=prompts, limits=limits, outputs=outputs)


def make_long_trace(seed: int) -> Trace:
    """Field case A4: eight long requests in a cache that holds two and a half of them."""
    lengths = (320 + seed,) * 8
    return Trace(
        name="8 long in 100 blocks", num_blocks=100, budget=64, prompts=lengths, limits=lengths, outputs=lengths
    )


def simulate(trace: Trace, *, reserve_rule: ReserveRule, victim_rule: VictimRule) -> Outcome:
    settings = SchedulerSettings(max_num_batched_tokens=trace.budget, max_model_len=trace.num_blocks * 16)
    kv_cache = KVCacheManager(CacheSettings(), num_blocks=trace.num_blocks, max_step_tokens=trace.budget, model="none")
    scheduler = Scheduler(settings, kv_cache, reserve_rule=reserve_rule, victim_rule=victim_rule)
    outputs = {RequestId(f"{i}"): length for i, length in enumerate(trace.outputs)}
    for i, (prompt, limit) in enumerate(zip(trace.prompts, trace.limits, strict=True)):
        scheduler.add(
            GenerationRequest(
                request_id=RequestId(f"{i}"),
                prompt_token_ids=tuple(TokenId(2 + i * 10_000 + k) for k in range(prompt)),
                sampling=SamplingParams(max_tokens=limit, stop_token_ids=frozenset((STOP,))),
            )
        )
    preemptions: Counter[RequestId] = Counter()
    while len(scheduler):
        plan = scheduler.schedule()
        preemptions.update(preemption.request_id for preemption in plan.preempted)
        sampled = {
            s.request_id: STOP if s.num_output_tokens + 1 == outputs[s.request_id] else TokenId(s.end_position + 2)
            for s in plan.scheduled
            if s.samples
        }
        scheduler.update_from_output(plan, ModelRunnerOutput(sampled))
    counters = scheduler.counters
    return Outcome(
        num_steps=counters.num_steps,
        num_preemptions=preemptions.total(),
        most_of_one_request=max(preemptions.values(), default=0),
        recomputed_share=counters.num_recomputed_tokens / (sum(trace.prompts) + sum(trace.outputs)),
    )


# The variants. None of them takes the blocks of the oldest: with that, two could take turns for ever.


def _by_arrival(running: Collection[Sequence]) -> list[Sequence]:
    return sorted(running, key=lambda sequence: sequence.arrival)


def youngest(running: Collection[Sequence], _needy: Sequence) -> Sequence | None:
    return max(_by_arrival(running)[1:], key=lambda s: s.arrival, default=None)


def least_work(running: Collection[Sequence], _needy: Sequence) -> Sequence | None:
    return min(_by_arrival(running)[1:], key=lambda s: s.num_computed_tokens, default=None)


def most_blocks(running: Collection[Sequence], _needy: Sequence) -> Sequence | None:
    return max(_by_arrival(running)[1:], key=lambda s: s.num_computed_tokens, default=None)


def least_work_of_younger_half(running: Collection[Sequence], _needy: Sequence) -> Sequence | None:
    ordered = _by_arrival(running)
    return min(ordered[max(1, len(ordered) // 2) :], key=lambda s: (s.num_computed_tokens, -s.arrival), default=None)


RESERVES: dict[str, ReserveRule] = {
    "a quarter of the outstanding output, running + 1 at least": compute_reserve,
    "none": lambda _running, _outstanding: 0,
    "running + 1": lambda running, _outstanding: running + 1,
    "half of the outstanding output": lambda running, outstanding: max(running + 1, outstanding // 2),
    "all of the outstanding output": lambda _running, outstanding: outstanding,
}
VICTIMS: dict[str, VictimRule] = {
    "least work in the younger half, spared after three": choose_victim,
    "least work in the younger half": least_work_of_younger_half,
    "youngest": youngest,
    "least work": least_work,
    "most blocks": most_blocks,
}


def build_table(title: str, traces: list[Trace], variants: Mapping[str, tuple[ReserveRule, VictimRule]]) -> Table:
    table = Table(title=title)
    for column in ("variant", "steps", "preemptions", "most of one request", "recomputed"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, (reserve, victim) in variants.items():
        outcomes = [simulate(trace, reserve_rule=reserve, victim_rule=victim) for trace in traces]
        table.add_row(
            name,
            f"{sum(o.num_steps for o in outcomes) / len(outcomes):,.0f}",
            f"{sum(o.num_preemptions for o in outcomes) / len(outcomes):.1f}",
            str(max(o.most_of_one_request for o in outcomes)),
            f"{sum(o.recomputed_share for o in outcomes) / len(outcomes):.1%}",
        )
    return table


def main() -> None:
    console = Console(width=120)
    families = [
        [make_mixed_trace(seed, end_early=False) for seed in SEEDS],
        [make_mixed_trace(seed, end_early=True) for seed in SEEDS],
        [make_long_trace(seed) for seed in SEEDS],
    ]
    reserves = {f"reserve: {name}": (rule, choose_victim) for name, rule in RESERVES.items()}
    victims = {f"victim: {name}": (RESERVES["none"], rule) for name, rule in VICTIMS.items()}
    for traces in families:
        console.print(build_table(f"{traces[0].name}: the reserve, with our victim rule", traces, reserves))
        console.print(build_table(f"{traces[0].name}: the victim, without a reserve", traces, victims))


if __name__ == "__main__":
    main()
