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
PROBE_TOKENS = 4 * ROW_TILE
PROBE_RUNS = 2
"""Timed runs after the first, which pays for pages and threads; the fastest counts."""


def measure_tokens_per_s(
    run: Callable[[SchedulerOutput], object], scheduler: SchedulerSettings, now: Callable[[], float]
) -> float:
    """Speed of computing a prompt, on plans that touch the null block alone."""
    probe = replace(scheduler, max_num_seqs=1, max_num_batched_tokens=PROBE_TOKENS)
    plan = build_warmup_plan(probe, scheduler.max_model_len)
    run(plan)
    seconds = []
    for _ in range(PROBE_RUNS):
        started = now()
        run(plan)
        seconds.append(now() - started)
    return plan.num_tokens / max(min(seconds), 1e-9)


def choose_token_budget(tokens_per_s: float, step_target_s: float, scheduler: SchedulerSettings) -> int:
    """Whole tiles; never above the scheduler's own budget, and enough for a full batch and a tile of prompt."""
    fast = int(min(tokens_per_s * step_target_s, scheduler.max_num_batched_tokens)) // ROW_TILE * ROW_TILE
    full_batch = -(-scheduler.max_num_seqs // ROW_TILE) * ROW_TILE + ROW_TILE
    return min(max(fast, full_batch), scheduler.max_num_batched_tokens)
