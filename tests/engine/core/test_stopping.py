"""When and why a sequence ends."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.scheduler_output import FinishReason
from kvpilot_engine.core.stopping import check_stop
from kvpilot_engine.testing import make_request, make_sequence


@pytest.mark.parametrize(
    ("output", "ignore_eos", "expected"),
    [
        ([5], False, None),
        ([5, 6, 7], False, FinishReason.LENGTH),
        ([5, 2], False, FinishReason.STOP),
        ([5, 2], True, None),
        ([5, 6, 2], False, FinishReason.STOP),
        ([5, 6, 2], True, FinishReason.LENGTH),
    ],
)
def test_reason_to_end(output: list[int], ignore_eos: bool, expected: FinishReason | None) -> None:
    request = make_request(prompt=(2, 2), max_tokens=3, stop_token_ids=(2,), ignore_eos=ignore_eos)
    sequence = make_sequence(request)
    sequence.token_ids.extend(TokenId(token) for token in output)
    assert check_stop(sequence) is expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [([2], None), ([5, 2], None), ([5, 6, 2], FinishReason.STOP), ([2, 2, 2, 5], FinishReason.LENGTH)],
)
def test_a_stop_token_among_the_first_min_tokens_does_not_stop(
    output: list[int], expected: FinishReason | None
) -> None:
    sequence = make_sequence(make_request(max_tokens=4, stop_token_ids=(2,), min_tokens=2))
    sequence.token_ids.extend(TokenId(token) for token in output)
    assert check_stop(sequence) is expected
