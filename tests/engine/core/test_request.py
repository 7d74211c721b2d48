"""Requests and sampling settings are valid by construction, and say what is wrong with which field."""

from __future__ import annotations

import math

import pytest

from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.testing import make_request


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 1") as caught:
        make_request(prompt=())
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("value", [0, -1])
def test_max_tokens_below_one_is_refused(value: int) -> None:
    with pytest.raises(InvalidRequestError, match=str(value)) as caught:
        SamplingParams(max_tokens=value)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("value", [-0.1, 2.1, math.nan, math.inf])
def test_temperature_out_of_bounds_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=str(value)) as caught:
        SamplingParams(max_tokens=1, temperature=value)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("value", [0.0, 1.1, -1.0, math.nan])
def test_top_p_out_of_bounds_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=str(value)) as caught:
        SamplingParams(max_tokens=1, top_p=value)
    assert caught.value.param == "top_p"


def test_negative_top_k_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="-1") as caught:
        SamplingParams(max_tokens=1, top_k=-1)
    assert caught.value.param == "top_k"


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplingParams(max_tokens=1, temperature=0.0), True),
        (SamplingParams(max_tokens=1, top_k=1), True),
        (SamplingParams(max_tokens=1, temperature=2.0, top_p=1.0, top_k=0), False),
    ],
)
def test_greedy_is_no_choice_at_all(params: SamplingParams, is_greedy: bool) -> None:
    assert params.is_greedy is is_greedy
