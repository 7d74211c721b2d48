"""The scheduling benchmark: everybody runs in every measured step, and the summary reads the right rows."""

from __future__ import annotations

import pytest

from kvpilot_tools.bench.scheduling import CASES, STEPS, Case, Result, measure, measure_step_s, prepare, summarize


def test_all_sequences_run_in_every_measured_step_and_the_others_wait() -> None:
    engine = prepare(Case(name="x", num_running=5, num_waiting=3))
    before = engine.stats()
    assert measure_step_s(engine) > 0
    after = engine.stats()
    assert after.num_steps_total - before.num_steps_total == STEPS
    assert after.num_generation_tokens_total - before.num_generation_tokens_total == 5 * STEPS
    assert (after.num_running, after.num_waiting_capacity, after.num_preemptions_total) == (5, 3, 0)


def test_a_result_says_what_was_measured() -> None:
    (result,) = measure((Case(name="x", num_running=2),), num_rounds=1)
    assert (result.case, result.num_running) == ("x", 2)
    assert result.us_per_sequence * 2 == result.step_us
    assert round(result.step_us * result.steps_per_s) == 1_000_000


def test_the_summary_compares_last_with_first_of_each_question() -> None:
    results = [
        Result(
            case=case.name,
            num_running=case.num_running,
            num_waiting=case.num_waiting,
            num_blocks=case.num_blocks,
            prompt_tokens=case.prompt_tokens,
            step_us=case.num_running * 2.0 + case.num_waiting,
            steps_per_s=1.0,
            us_per_sequence=2.0,
        )
        for case in CASES
    ]
    summary = summarize(results)
    assert summary["us_per_sequence_ratio_1024_to_64"] == 1
    assert summary["waiting_ratio"] == (512 + 10_000) / 512
    assert summary["cache_size_ratio"] == summary["length_ratio"] == 1
    assert summary["share_of_40_ms_step_at_32"] == pytest.approx(64e-6 / 0.04)
