"""The default token budget of a step: as many tokens as this device computes in a given time.

A step longer than that delays the next token of everybody in it; a shorter one computes prompts less efficiently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvpilot_engine.core.scheduler_output import SchedulerOutput
from kvpilot_engine.core.settings import SchedulerSettings
from kvpilot_engine.execution.activation_peak import build_warmup_plan

ROW_TILE = 16
"""Budgets are multiples of this: the float32 path computes whole tiles of rows."""
ROUND_STEP = 64
ROUND_FROM = 256
"""From here on budgets are rounded to the nearest 64: prompts have round lengths, and one of 496 tokens would read all
weights again for the last 16 of 512."""
PROBE_TOKENS = 4 * ROW_TILE
LONG_PROBE_TOKENS = 16 * ROW_TILE
LONG_PROBE_BELOW_S = 0.04
"""A machine that computes the short probe sooner than this is measured on the long one: few rows don't show what tiles
of many rows make of it, while on a slow machine the long one would delay the start."""
PROBE_RUNS = 2
"""Timed runs after the first, which pays for pages and threads; the fastest counts."""


def measure_tokens_per_s(
    run: Callable[[SchedulerOutput], object], scheduler: SchedulerSettings, now: Callable[[], float]
) -> float:
    """Speed of computing a prompt, on plans that touch the null block alone."""
    num_tokens, seconds = _time_probe(run, scheduler, now, PROBE_TOKENS)
    if seconds < LONG_PROBE_BELOW_S and num_tokens < scheduler.max_num_batched_tokens:
        num_tokens, seconds = _time_probe(run, scheduler, now, LONG_PROBE_TOKENS)
    return num_tokens / max(seconds, 1e-9)


def _time_probe(
    run: Callable[[SchedulerOutput], object], scheduler: SchedulerSettings, now: Callable[[], float], num_tokens: int
) -> tuple[int, float]:
    """Tokens of the plan, at most so many, and the seconds of its fastest run."""
    budget = min(num_tokens, scheduler.max_num_batched_tokens)
    probe = replace(scheduler, max_num_seqs=1, max_num_batched_tokens=budget)
    plan = build_warmup_plan(probe, scheduler.max_model_len)
    run(plan)
    seconds = []
    for _ in range(PROBE_RUNS):
        started = now()
        run(plan)
        seconds.append(now() - started)
    return plan.num_tokens, min(seconds)


def choose_token_budget(tokens_per_s: float, step_target_s: float, scheduler: SchedulerSettings) -> int:
    """Whole tiles, a round number of many; at most the scheduler's own budget, and enough for a full batch and a tile
    of prompt."""
    fits = min(tokens_per_s * step_target_s, scheduler.max_num_batched_tokens)
    fast = round(fits / ROUND_STEP) * ROUND_STEP if fits >= ROUND_FROM else int(fits) // ROW_TILE * ROW_TILE
    full_batch = -(-scheduler.max_num_seqs // ROW_TILE) * ROW_TILE + ROW_TILE
    return min(max(fast, full_batch), scheduler.max_num_batched_tokens)
