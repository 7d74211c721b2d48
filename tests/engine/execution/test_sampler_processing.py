"""What a request does to its own logits, field by field, and in what order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpilot_engine.core.ids import BlockId, RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence
from kvpilot_engine.execution.logit_processing import needs_processing, process
from kvpilot_engine.execution.sampler import sample
from kvpilot_engine.kernels.compile_sampling import SIGNATURES, compile_sampling

Row = npt.NDArray[np.float32]
BASE = np.array([2.0, -1.0, 0.5, 3.0, -2.0, 0.0, 1.0, -0.5], np.float32)
NEVER = -math.inf


def make_mask(*allowed: int, size: int = 8) -> npt.NDArray[np.uint32]:
    """One bit a token, the lowest bit of the first word for token 0."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def make_sequence(
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    *,
    mask: npt.NDArray[np.uint32] | None = None,
    name: str = "a",
    **params: Any,
) -> ScheduledSequence:
    sampling = SamplingParams(max_tokens=100, **{"temperature": 0.0, **params})
    history = tuple(map(TokenId, prompt + output))
    return ScheduledSequence(
        RequestId(name),
        len(history) - 1,
        history[-1:],
        (BlockId(1),),
        sampling,
        0,
        samples=True,
        history=history if sampling.needs_history else (),
        num_prompt_tokens=len(prompt),
        num_output_tokens=len(output),
        token_mask=mask,
    )


def processed(sequence: ScheduledSequence, base: Row = BASE) -> list[float]:
    row = np.empty_like(base)
    counts = np.zeros(base.size, np.int32)
    assert needs_processing(sequence)
    assert process(base, sequence, row, counts)
    assert not counts.any()
    return [float(value) for value in row]


def changed(changes: dict[int, float]) -> list[float]:
    return [changes.get(index, float(value)) for index, value in enumerate(BASE)]


BIAS = ((TokenId(0), -100.0), (TokenId(5), 7.5))
STOP = frozenset({TokenId(3), TokenId(6)})
WORDS = ((TokenId(3),), (TokenId(1), TokenId(0)), (TokenId(2), TokenId(1), TokenId(6)))

TABLE: dict[str, tuple[ScheduledSequence, dict[int, float]]] = {
    "a bias is added": (make_sequence((1,), logit_bias=BIAS), {0: -98.0, 5: 7.5}),
    "a repetition penalty divides positive and multiplies negative logits of prompt and output, once": (
        make_sequence((0, 1, 1), (3, 3), repetition_penalty=2.0),
        {0: 1.0, 1: -2.0, 3: 1.5},
    ),
    "a repetition penalty below 1 rewards": (make_sequence((0, 1), repetition_penalty=0.5), {0: 4.0, 1: -0.5}),
    "a presence penalty counts once and only in the output": (
        make_sequence((0, 3), (3, 1, 3), presence_penalty=0.5),
        {1: -1.5, 3: 2.5},
    ),
    "a frequency penalty counts each occurrence in the output": (
        make_sequence((0, 3), (3, 1, 3), frequency_penalty=0.5),
        {1: -1.5, 3: 2.0},
    ),
    "a negative penalty rewards": (make_sequence((0,), (3,), frequency_penalty=-1.0, presence_penalty=-0.5), {3: 4.5}),
    "repetition comes before frequency and presence": (
        make_sequence((0,), (3, 3), repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5),
        {0: 1.0, 3: 0.5},
    ),
    "a bias comes before the repetition penalty": (
        make_sequence((1,), logit_bias=((TokenId(1), 3.0),), repetition_penalty=2.0),
        {1: 1.0},
    ),
    "stop tokens are masked before min_tokens": (
        make_sequence((0,), (1,), min_tokens=2, stop_token_ids=STOP),
        {3: NEVER, 6: NEVER},
    ),
    "a single bad word is never allowed": (make_sequence((0,), bad_words=WORDS), {3: NEVER}),
    "the end of a bad word is forbidden after its beginning": (
        make_sequence((0,), (5, 1), bad_words=WORDS),
        {3: NEVER, 0: NEVER},
    ),
    "several bad words can end at once": (
        make_sequence((0,), (2, 1), bad_words=WORDS),
        {3: NEVER, 0: NEVER, 6: NEVER},
    ),
    "a bad word that began in the prompt is not in the output": (
        make_sequence((2, 1), (), bad_words=WORDS),
        {3: NEVER},
    ),
    "an output shorter than the bad word's beginning": (make_sequence((2,), (1,), bad_words=WORDS[2:]), {}),
    "a mask allows its tokens": (
        make_sequence((0,), mask=make_mask(1, 2, 7)),
        {0: NEVER, 3: NEVER, 4: NEVER, 5: NEVER, 6: NEVER},
    ),
    "a penalty does not revive a masked token": (
        make_sequence((0,), (0,), mask=make_mask(1), repetition_penalty=0.1, presence_penalty=-2.0),
        {0: NEVER, 2: NEVER, 3: NEVER, 4: NEVER, 5: NEVER, 6: NEVER, 7: NEVER, 1: -1.0},
    ),
    "min_tokens gives way where the grammar may only end": (
        make_sequence((0,), mask=make_mask(3), min_tokens=9, stop_token_ids=STOP),
        {index: NEVER for index in range(8) if index != 3},
    ),
    "bad words give way where the grammar allows nothing else": (
        make_sequence((0,), (1,), mask=make_mask(0), bad_words=WORDS),
        dict.fromkeys(range(1, 8), NEVER),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_processing(name: str) -> None:
    sequence, changes = TABLE[name]
    assert processed(sequence) == changed(changes)


@pytest.mark.parametrize(
    "sequence",
    [
        make_sequence((1,), temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, logprobs=2),
        make_sequence((0,), (1, 2), min_tokens=2, stop_token_ids=STOP),
        make_sequence((0,), (), min_tokens=2),
    ],
)
def test_rows_without_these_fields_are_not_copied(sequence: ScheduledSequence) -> None:
    assert not needs_processing(sequence)


def test_masks_shorter_than_the_vocabulary_forbid_the_rest() -> None:
    base = np.arange(70, dtype=np.float32)
    row = processed(make_sequence((0,), mask=make_mask(1, 31, 32, 63, size=64)), base)
    assert [index for index, value in enumerate(row) if value > NEVER] == [1, 31, 32, 63]


def test_signed_masks_are_read_as_bits() -> None:
    base = np.zeros(32, np.float32)
    row = processed(make_sequence((0,), mask=make_mask(31, size=32).view(np.int32)), base)
    assert row[31] == 0.0
    assert max(row[:31]) == NEVER


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e40, 1e300])
def test_no_penalty_makes_a_logit_infinite(penalty: float) -> None:  # B14
    sequence = make_sequence((0, 1, 2, 3, 4, 5, 6, 7), repetition_penalty=penalty, temperature=1.0)
    row = processed(sequence)
    assert np.isfinite(row).all()
    assert len(sample(BASE[None], [sequence]).sampled) == 1


@pytest.mark.parametrize("mask", [None, make_mask(1, 2)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_seen_behind_a_mask(mask: npt.NDArray[np.uint32] | None, bad: float) -> None:
    base = BASE.copy()
    base[5] = bad
    sequence = make_sequence((0,), (5,), mask=mask, logit_bias=((TokenId(0), 1.0),))
    assert not process(base, sequence, np.empty_like(base), np.zeros(8, np.int32))


def test_the_choice_follows_the_processed_logits_and_its_logprob_the_model() -> None:
    sequence = make_sequence((0,), mask=make_mask(4, 1), logprobs=2)
    output = sample(BASE[None], [sequence])
    assert output.sampled == {"a": 1}
    logprobs = output.logprobs[RequestId("a")]
    total = np.log(np.exp(BASE.astype(np.float64)).sum())
    assert logprobs.logprob == pytest.approx(-1.0 - total, abs=1e-12)
    assert logprobs.rank == 7
    assert [token for token, _ in logprobs.top] == [3, 0]
    assert [value for _, value in logprobs.top] == pytest.approx([3.0 - total, 2.0 - total])


def test_a_mask_without_tokens_fails_its_row_alone() -> None:
    output = sample(np.stack([BASE, BASE]), [make_sequence((0,), mask=make_mask()), make_sequence((0,), name="b")])
    assert output.failed == {"a": "no token is allowed at position 1"}
    assert output.sampled == {"b": 3}


tokens = st.integers(0, 39)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(tokens, min_size=1, max_size=60),
    output=st.lists(tokens, max_size=60),
    repetition=st.floats(0.1, 3.0),
    frequency=st.floats(-2.0, 2.0),
    presence=st.floats(-2.0, 2.0),
)
def test_penalties_equal_the_reference(
    prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> None:
    base = (np.random.default_rng(4).standard_normal(40) * 3).astype(np.float32)
    expected = base.astype(np.float64)
    for token in set(prompt + output):
        expected[token] = expected[token] / repetition if base[token] > 0 else expected[token] * repetition
    expected = expected.astype(np.float32).astype(np.float64)
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    sequence = make_sequence(
        tuple(prompt),
        tuple(output),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    assume(needs_processing(sequence))
    np.testing.assert_allclose(processed(sequence, base), expected, rtol=1e-6, atol=1e-6)


def test_sampling_compiles_nothing_after_compile_sampling() -> None:
    """The signatures compiled ahead are those of the calls: a first request never waits for the compiler."""
    compile_sampling()
    everything = make_sequence(
        (0, 1), (2,), mask=make_mask(1, 2), repetition_penalty=2.0, presence_penalty=0.5, logprobs=2, temperature=1.0
    )
    mask_from_bytes = make_sequence((0,), mask=make_mask(1).view(np.int32).view(np.uint32), logprobs=0, name="b")
    assert len(sample(np.stack([BASE, BASE]), [everything, mask_from_bytes]).logprobs) == 2
    assert len(sample(BASE[None], [everything]).logprobs) == 1
    assert [len(kernel.signatures) for kernel, _ in SIGNATURES] == [1] * len(SIGNATURES)
