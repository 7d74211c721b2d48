"""The sampler is a function of row, parameters, choice and position; its draws follow the distribution asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence
from kvpilot_engine.errors import ModelExecutionError
from kvpilot_engine.execution.counter_random import philox4x32, uniform
from kvpilot_engine.execution.sampler import sample, sample_row


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 3


def draw(logits: torch.Tensor, count: int, **params: float) -> list[int]:
    sampling = SamplingParams(max_tokens=1, seed=5, **params)  # type: ignore[arg-type]
    return [int(sample_row(logits, sampling, choice=0, position=position)) for position in range(count)]


def test_philox_gives_the_published_vectors() -> None:
    zeros = philox4x32(np.zeros(4, dtype=np.uint64), (0, 0))
    assert [hex(int(word)) for word in zeros] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    ones = philox4x32(np.full(4, 0xFFFFFFFF, dtype=np.uint64), (0xFFFFFFFF, 0xFFFFFFFF))
    assert [hex(int(word)) for word in ones] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def test_uniform_depends_on_seed_choice_and_position() -> None:
    draws = {
        uniform(seed, choice, position) for seed in (0, 1, -1, 2**64 - 2) for choice in (0, 1) for position in (0, 1)
    }
    assert len(draws) == 16
    assert all(0.0 <= value < 1.0 for value in draws)
    assert uniform(2**64 + 3, 0, 0) == uniform(3, 0, 0)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"top_k": 1, "temperature": 2.0},
        {"temperature": 1e-4},
        {"temperature": 1e-6},
        {"temperature": 1e-300},
        {"top_p": 1e-9},
    ],
)
def test_greedy_in_every_spelling_is_the_largest_logit(logits: torch.Tensor, params: dict[str, float]) -> None:  # B15
    assert set(draw(logits, 20, **params)) == {int(logits.argmax())}


def test_equal_logits_choose_the_lowest_id() -> None:
    assert draw(torch.zeros(1000), 1, temperature=0.0) == [0]


def test_a_hot_neighbour_changes_nothing(logits: torch.Tensor) -> None:  # B15
    def sequence(name: str, temperature: float) -> ScheduledSequence:
        sampling = SamplingParams(max_tokens=1, temperature=temperature, seed=9, top_p=0.95)
        return ScheduledSequence(RequestId(name), 4, (TokenId(1),), (BlockId(1),), sampling, 0, samples=True)

    rows = [sequence("a", 1.0), sequence("hot", 2.0), sequence("tiny", 1e-4), sequence("b", 0.7)]
    together = sample(logits.expand(4, -1), rows)
    assert together == [sample(logits[None], [row])[0] for row in rows]


def test_draws_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = np.bincount(draw(probabilities.log(), 4000, temperature=1.0), minlength=4) / 4000
    assert np.abs(counts - probabilities.numpy()).max() < 0.03


def test_temperature_sharpens_and_flattens() -> None:
    row = torch.tensor([1.0, 0.0])
    cold, hot = (draw(row, 2000, temperature=t).count(0) / 2000 for t in (0.5, 2.0))
    assert abs(cold - 1 / (1 + np.exp(-2))) < 0.03
    assert abs(hot - 1 / (1 + np.exp(-0.5))) < 0.03


@pytest.mark.parametrize("top_k", [2, 7, 1500, 3000, 9999])
def test_top_k_keeps_exactly_the_k_largest(logits: torch.Tensor, top_k: int) -> None:
    flat = logits * 1e-3  # nearly equal chances, so that every kept token is drawn
    allowed = set(logits.topk(min(top_k, 3000)).indices.tolist())
    drawn = set(draw(flat, 300, top_k=top_k))
    assert drawn <= allowed
    assert top_k > 7 or drawn == allowed


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99999])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits: torch.Tensor, top_p: float, scale: float) -> None:
    """scale 1e-3 makes the distribution so flat that more than the first candidates are needed."""
    row = logits * scale
    probabilities, order = torch.softmax(row.double(), 0).sort(descending=True, stable=True)
    size = int((probabilities.cumsum(0) - probabilities < top_p).sum())
    assert set(draw(row, 200, top_p=top_p)) <= set(order[:size].tolist())
    if size > 1:
        assert len(set(draw(row, 200, top_p=top_p))) > 1


def test_top_p_applies_to_what_top_k_kept() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # of the two kept, the first has 0.57 of the weight: enough for 0.5, not for 0.6
    assert set(draw(row, 200, top_k=2, top_p=0.5)) == {0}
    assert set(draw(row, 200, top_k=2, top_p=0.6)) == {0, 1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(logits: torch.Tensor, bad: float) -> None:
    logits[7] = bad
    with pytest.raises(ModelExecutionError, match="not finite"):
        draw(logits, 1, temperature=1.0)
