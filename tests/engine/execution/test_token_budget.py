"""The default token budget follows the measured speed, within what the batch needs and the scheduler allows."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.scheduler_output import SchedulerOutput
from kvpilot_engine.core.settings import SchedulerSettings
from kvpilot_engine.execution.token_budget import choose_token_budget, measure_tokens_per_s

SCHEDULER = SchedulerSettings(max_num_batched_tokens=512, max_num_seqs=16, max_model_len=1000)


@pytest.mark.parametrize(
    ("tokens_per_s", "max_num_seqs", "budget"),
    [(600, 16, 80), (1000, 16, 144), (3270, 16, 512), (50, 16, 32), (50, 64, 80), (1e6, 16, 512), (50, 4096, 512)],
    ids=[
        "whole tiles",
        "faster",
        "a round number",
        "slow: a batch and a tile",
        "slow: a larger batch",
        "at most the bound",
        "at most",
    ],
)
def test_budget_is_what_fits_into_the_target(tokens_per_s: float, max_num_seqs: int, budget: int) -> None:
    scheduler = SchedulerSettings(max_num_batched_tokens=512, max_num_seqs=max_num_seqs)
    assert choose_token_budget(tokens_per_s, 0.15, scheduler) == budget


@pytest.mark.parametrize(("max_model_len", "tokens"), [(1000, 64), (40, 40)])
def test_speed_is_that_of_the_fastest_run_after_the_first(max_model_len: int, tokens: int) -> None:
    plans: list[SchedulerOutput] = []
    moment = 0.0

    def run(plan: SchedulerOutput) -> None:
        nonlocal moment
        plans.append(plan)
        moment += (0.01, 2.0, 0.5)[len(plans) - 1]

    scheduler = SchedulerSettings(max_num_seqs=16, max_model_len=max_model_len)
    assert measure_tokens_per_s(run, scheduler, lambda: moment) == pytest.approx(tokens / 0.5)
    assert [plan.num_tokens for plan in plans] == [tokens] * 3


@pytest.mark.parametrize(
    ("budget", "probes"), [(512, [64] * 3 + [256] * 3), (128, [64] * 3 + [128] * 3), (64, [64] * 3)]
)
def test_a_fast_machine_is_measured_on_more_rows(budget: int, probes: list[int]) -> None:
    plans: list[SchedulerOutput] = []
    moment = 0.0

    def run(plan: SchedulerOutput) -> None:
        nonlocal moment
        plans.append(plan)
        moment += 0.01 + 1e-4 * plan.num_tokens

    scheduler = SchedulerSettings(max_num_seqs=16, max_model_len=1000, max_num_batched_tokens=budget)
    speed = measure_tokens_per_s(run, scheduler, lambda: moment)
    assert [plan.num_tokens for plan in plans] == probes
    assert speed == pytest.approx(probes[-1] / (0.01 + 1e-4 * probes[-1]))
