"""The sampler is a function of row, parameters, choice and position; its draws follow the distribution asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence
from kvpilot_engine.execution.activation_peak import measure_peak_growth
from kvpilot_engine.execution.device_memory import HostMemory
from kvpilot_engine.execution.sampler import SamplerOutput, sample
from kvpilot_engine.kernels.counter_random import philox4x32, uniforms
from kvpilot_engine.kernels.logit_rows import ordered
from kvpilot_engine.kernels.sampling import choose_tokens

Row = npt.NDArray[np.float32]


def make_sequence(
    name: str = "a", *, position: int = 5, choice: int = 0, seed: int = 5, **params: Any
) -> ScheduledSequence:
    sampling = SamplingParams(max_tokens=1, seed=seed, **params)
    return ScheduledSequence(
        RequestId(name), position - 1, (TokenId(1),), (BlockId(1),), sampling, choice, samples=True
    )


def draw(row: Row, count: int, **params: Any) -> list[int]:
    """One token at each of `count` positions."""
    sequences = [make_sequence(str(position), position=position, **params) for position in range(1, count + 1)]
    return [int(token) for token in sample(np.tile(row, (count, 1)), sequences).sampled.values()]


def chi_square_is_plausible(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> bool:
    """Whether the counts are within four standard deviations of what the probabilities lead to expect."""
    expected = probabilities * counts.sum()
    assert expected.min() > 5
    freedom = counts.size - 1
    return bool(((counts - expected) ** 2 / expected).sum() < freedom + 4 * np.sqrt(2 * freedom))


def kept_by_reference(
    row: Row, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.int64] | None:
    """The ids that the filters keep, in order of id, by sorting everything; None where rounding decides."""
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    order = np.lexsort((np.arange(row.size), -row.astype(np.float64)))
    order = order[weights[order] >= min_p]
    order = order[: top_k or row.size]
    if top_p < 1.0:
        before = weights[order].cumsum() - weights[order]
        wanted = top_p * weights[order].sum()
        if np.abs(before - wanted).min() <= 1e-9 * wanted:
            return None
        order = order[before < wanted]
    return np.sort(order)


def draws_equal_reference(row: Row, *, temperature: float, top_k: int, top_p: float, min_p: float) -> bool | None:
    """Whether each of many evenly spread draws gives the token of the reference; None where rounding decides."""
    filters = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    kept = kept_by_reference(row, top_k=top_k, **filters)
    if kept is None:
        return None
    cumulative = np.exp((row[kept].astype(np.float64) - row.max()) / temperature).cumsum()
    draws = (np.arange(5000) + 0.5) / 5000
    wanted = draws * cumulative[-1]
    clear = np.abs(cumulative[:, None] - wanted).min(0) > 1e-9 * cumulative[-1]
    expected = kept[np.searchsorted(cumulative, wanted[clear], side="right")]
    full = {name: np.full(draws.size, value) for name, value in filters.items()}
    tokens = choose_tokens(
        row[None],
        np.zeros(draws.size, np.int64),
        full["temperature"],
        np.full(draws.size, top_k),
        full["top_p"],
        full["min_p"],
        draws,
    )
    return bool((tokens[clear] == expected).all())


@pytest.fixture
def row() -> Row:
    return (np.random.default_rng(1).standard_normal(3000) * 3).astype(np.float32)


def test_philox_gives_the_published_vectors() -> None:
    zero, ones = np.uint64(0), np.uint64(0xFFFFFFFF)
    words = philox4x32(*[zero] * 6)
    assert [hex(int(word)) for word in words] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    words = philox4x32(*[ones] * 6)
    assert [hex(int(word)) for word in words] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def test_draws_depend_on_seed_choice_and_position() -> None:
    keys = [(seed, choice, at) for seed in (0, 1, 2**64 - 1, 2**64 - 2) for choice in (0, 1) for at in (0, 1)]
    draws = uniforms(*np.array(keys, np.uint64).T.copy())
    assert len(set(draws.tolist())) == 16
    assert draws.min() >= 0.0
    assert draws.max() < 1.0


def test_draws_stay_what_they_were() -> None:
    """Stored answers are reproduced from their seed: another generator would be a break of the contract."""
    keys = np.array([(0, 0, 1), (7, 1, 2**33 + 4), (2**64 - 1, 3, 77)], np.uint64)
    assert uniforms(*keys.T.copy()).tolist() == [0.9722412015223156, 0.09280391978600755, 0.6573466426609813]


def test_the_seed_counts_modulo_two_to_the_64(row: Row) -> None:
    assert draw(row, 20, seed=2**64 + 3) == draw(row, 20, seed=3)
    assert draw(row, 20, seed=-1) == draw(row, 20, seed=2**64 - 1)


def test_ordered_bits_follow_the_floats() -> None:
    values = np.array([-np.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.0, np.inf], np.float32)
    keys = [int(ordered(bits)) for bits in values.view(np.int32)]
    assert keys == sorted(keys)
    assert keys[4] == keys[5] == 0
    assert len(set(keys)) == values.size - 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"top_k": 1, "temperature": 2.0},
        {"temperature": 1e-4},
        {"temperature": 1e-6},
        {"temperature": 1e-300},
        {"temperature": 5e-324},
        {"top_p": 1e-9},
        {"min_p": 1.0},
    ],
)
def test_greedy_in_every_spelling_is_the_largest_logit(row: Row, params: dict[str, float]) -> None:  # B15
    assert set(draw(row, 20, **params)) == {int(row.argmax())}


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 1024, 1025])
def test_equal_logits_choose_the_lowest_id(size: int) -> None:
    assert draw(np.zeros(size, np.float32), 1, temperature=0.0) == [0]


def test_both_zeros_are_equal() -> None:
    assert draw(np.array([-1.0, -0.0, 0.0], np.float32), 1, temperature=0.0) == [1]


MIXED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 2.0, "top_p": 0.95},  # B15
    {"temperature": 1e-4, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 0.0},
    {"min_p": 0.1, "logit_bias": ((TokenId(3), 4.0),)},
    {"top_k": 7, "top_p": 0.5, "min_p": 0.01, "logprobs": 3},
]


def test_a_neighbour_changes_nothing(row: Row) -> None:
    sequences = [make_sequence(str(index), seed=9, **MIXED[index % len(MIXED)]) for index in range(40)]
    logits = np.stack([np.roll(row, index) for index in range(40)])
    together = sample(logits, sequences)
    for index, sequence in enumerate(sequences):
        alone = sample(logits[index : index + 1], [sequence])
        name = sequence.request_id
        assert together.sampled[name] == alone.sampled[name]
        assert together.logprobs.get(name) == alone.logprobs.get(name)
        assert (name in alone.logprobs) == (sequence.sampling.logprobs is not None)


def test_the_logits_are_only_read(row: Row) -> None:
    logits = np.stack([row] * len(MIXED))
    before = logits.copy()
    sample(logits, [make_sequence(str(index), **params) for index, params in enumerate(MIXED)])
    np.testing.assert_array_equal(logits, before)


def test_more_rows_than_one_chunk_of_copies(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [make_sequence(str(index), seed=index, logit_bias=((TokenId(index), 2.0),)) for index in range(5)]
    at_once = sample(np.stack([row] * 5), sequences)
    monkeypatch.setattr("kvpilot_engine.execution.sampler._PROCESSED_BYTES", 2 * row.nbytes)
    assert sample(np.stack([row] * 5), sequences) == at_once


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    row = np.array([1.5, -0.5, 0.0, 1.0, -1.0], np.float32)
    probabilities = np.exp(row.astype(np.float64) / temperature)
    counts = np.bincount(draw(row, 6000, temperature=temperature), minlength=5)
    assert chi_square_is_plausible(counts, probabilities / probabilities.sum())


def test_draws_follow_the_softmax_over_many_blocks() -> None:
    row = (np.random.default_rng(3).standard_normal(5000)).astype(np.float32)
    probabilities = np.exp(row.astype(np.float64))
    counts = np.bincount(np.array(draw(row, 6000)) // 500, minlength=10)
    assert chi_square_is_plausible(counts, (probabilities / probabilities.sum()).reshape(10, 500).sum(1))


def test_filtered_draws_follow_the_kept_tokens_weights() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    counts = np.bincount(draw(row, 6000, top_p=0.8), minlength=4)
    assert counts[3] == 0
    assert chi_square_is_plausible(counts[:3], np.array([0.4, 0.3, 0.2]) / 0.9)


def test_seeds_and_choices_give_independent_draws() -> None:
    row = np.zeros(8, np.float32)
    sequences = [make_sequence(f"{s}-{c}", seed=s, choice=c) for s in range(500) for c in range(8)]
    tokens = list(sample(np.broadcast_to(row, (4000, 8)), sequences).sampled.values())
    assert chi_square_is_plausible(np.bincount(tokens, minlength=8), np.full(8, 1 / 8))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 20.0])
@pytest.mark.parametrize("top_k", [0, 2, 7, 1500, 3000, 9999])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.99999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_draws_equal_the_reference(row: Row, scale: float, top_k: int, top_p: float, min_p: float) -> None:
    """Scale 1e-3 is so flat that nearly all tokens are kept; 20 leaves a handful with any weight."""
    assert draws_equal_reference(row * np.float32(scale), temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8), min_size=1, max_size=200),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 210),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)
def test_draws_equal_the_reference_with_many_ties(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    assume(top_k != 1)
    row = (np.array(logits) / 4).astype(np.float32)
    equal = draws_equal_reference(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(equal is not None)
    assert equal


def test_filters_apply_to_what_the_earlier_ones_kept() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # of the two kept, the first has 0.57 of the weight: enough for 0.5, not for 0.6
    for filters in ({"top_k": 2}, {"min_p": 0.6}):
        assert set(draw(row, 200, top_p=0.5, **filters)) == {0}
        assert set(draw(row, 200, top_p=0.6, **filters)) == {0, 1}
    assert set(draw(row, 200, min_p=0.45)) == {0, 1, 2}


def test_minus_infinity_is_never_drawn() -> None:
    row = np.full(300, -np.inf, np.float32)
    row[[5, 200]] = (1.0, 1.5)
    for params in ({}, {"top_p": 0.99}, {"top_k": 50}, {"min_p": 1e-9}, {"temperature": 0.0}):
        assert set(draw(row, 60, **params)) <= {5, 200}


def unusable(row: Row, value: float) -> Row:
    changed = row.copy()
    changed[7] = value
    return changed


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"logit_bias": ((TokenId(7), 1.0),)}, {"logprobs": 2}, {"top_p": 0.5}]
)
def test_a_row_that_is_not_finite_fails_alone(row: Row, bad: float, params: dict[str, Any]) -> None:  # B9
    sequences = [make_sequence(name, **params) for name in ("good", "bad", "fine")]
    output = sample(np.stack([row, unusable(row, bad), row]), sequences)
    assert output.failed == {"bad": "the logits at position 5 are not finite"}
    assert set(output.sampled) == {"good", "fine"}
    assert "bad" not in output.logprobs


def test_a_row_without_an_allowed_token_fails_alone(row: Row) -> None:
    output = sample(np.stack([np.full_like(row, -np.inf), row]), [make_sequence("none"), make_sequence("some")])
    assert output.failed == {"none": "no token is allowed at position 5"}
    assert set(output.sampled) == {"some"}


def test_no_rows_give_nothing() -> None:
    assert sample(np.empty((0, 10), np.float32), []) == SamplerOutput()


def test_rows_and_sequences_must_match(row: Row) -> None:
    with pytest.raises(ValueError, match="1 rows of logits for 2 sequences"):
        sample(row[None], [make_sequence("a"), make_sequence("b")])


def test_workspace_does_not_grow_with_the_batch() -> None:  # A15
    """A large vocabulary, all with top_p: were there a workspace for each row, 64 of them would be 154 MB."""
    row = (np.random.default_rng(2).standard_normal((1, 150_000))).astype(np.float32)

    def choose(count: int) -> None:
        ones = np.ones(count)
        choose_tokens(row, np.zeros(count, np.int64), ones, np.zeros(count, np.int64), ones * 0.9, ones * 0, ones * 0.5)

    choose(2)
    growth = measure_peak_growth(HostMemory(), lambda: choose(64))
    if growth is None:
        pytest.skip("this kernel keeps no peak of the resident set that can be reset")
    assert growth < 32 * 2**20
