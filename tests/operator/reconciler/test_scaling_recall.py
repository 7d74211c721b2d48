"""What scaling saw and did not write: used while this process looks, and never made up after a pause or a restart."""

from __future__ import annotations

from datetime import timedelta

from kvpilot_operator.core.scaling_memory import PreemptionSample, ScalingMemory
from kvpilot_operator.scaling_recall import ScalingRecall
from kvpilot_operator.testing import START, ManualClock

SAMPLE = PreemptionSample(pod_uid="a", total=7, at=START, per_minute=2.0)
SEEN = ScalingMemory(desired=9, above_since=START, samples=(SAMPLE,))
WRITTEN = ScalingMemory(desired=3, below_since=START, last_scale_up=START)


def test_what_was_seen_last_goes_before_what_was_written() -> None:
    recall = ScalingRecall(ManualClock())
    recall.note("uid", SEEN)
    memory = recall.complete("uid", WRITTEN)
    assert (memory.above_since, memory.below_since, memory.samples) == (START, None, (SAMPLE,))
    assert (memory.desired, memory.last_scale_up) == (3, START)  # these are always written first


def test_another_object_of_that_name_starts_anew() -> None:
    recall = ScalingRecall(ManualClock())
    recall.note("uid", SEEN)
    assert recall.complete("other", WRITTEN) == WRITTEN
    recall.forget("uid")
    assert recall.complete("uid", WRITTEN) == WRITTEN


def test_after_another_operator_status_counts() -> None:  # C7
    recall = ScalingRecall(ManualClock())
    recall.note("uid", SEEN)
    recall.forget_all()
    assert recall.complete("uid", WRITTEN) == WRITTEN


def test_an_old_counter_gives_no_rate_after_a_restart() -> None:  # D3
    clock = ManualClock(START + timedelta(seconds=20))
    written = ScalingMemory(samples=(SAMPLE,))
    assert ScalingRecall(clock).complete("uid", written) == written
    clock.advance(20)
    assert ScalingRecall(clock).complete("uid", written).samples == ()
