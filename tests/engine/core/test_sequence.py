"""The sequence: its legal transitions and what it counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpilot_engine.core.ids import BlockId, TokenId
from kvpilot_engine.core.scheduler_output import FinishReason
from kvpilot_engine.core.sequence import Sequence, SequenceStatus
from kvpilot_engine.testing import make_request, make_sequence


def make_running() -> Sequence:
    sequence = make_sequence(make_request(prompt=(1, 2, 3)))
    sequence.start(num_cached_tokens=0)
    return sequence


def test_a_sequence_runs_goes_back_and_ends() -> None:
    sequence = make_running()
    sequence.advance(2)
    sequence.return_to_queue()
    assert (sequence.status, sequence.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    assert sequence.num_ever_computed_tokens == 2
    sequence.start(num_cached_tokens=0)
    sequence.finish(FinishReason.ABORT)
    assert sequence.is_finished
    assert sequence.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    "follow",
    [lambda s: s.start(num_cached_tokens=0), lambda s: s.finish(FinishReason.STOP), lambda s: s.return_to_queue()],
    ids=["start", "finish", "return_to_queue"],
)
def test_nothing_follows_the_end(follow: Callable[[Sequence], None]) -> None:
    sequence = make_running()
    sequence.finish(FinishReason.STOP)
    with pytest.raises(AssertionError):
        follow(sequence)


def test_a_running_sequence_does_not_start_again() -> None:
    with pytest.raises(AssertionError, match="starts while RUNNING"):
        make_running().start(num_cached_tokens=0)


def test_a_sequence_does_not_end_or_wait_with_blocks() -> None:
    sequence = make_running()
    sequence.block_table.extend([BlockId(1)])
    with pytest.raises(AssertionError, match="ends with blocks"):
        sequence.finish(FinishReason.STOP)
    with pytest.raises(AssertionError, match="put back with blocks"):
        sequence.return_to_queue()


def test_no_token_is_sampled_from_an_incomplete_prefix() -> None:
    sequence = make_running()
    sequence.advance(2)
    with pytest.raises(AssertionError, match="incomplete prefix"):
        sequence.append_token(TokenId(9))
    sequence.advance(1)
    sequence.append_token(TokenId(9))
    assert (sequence.num_tokens, sequence.num_output_tokens) == (4, 1)
