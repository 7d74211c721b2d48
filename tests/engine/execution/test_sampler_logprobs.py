"""Log-probabilities equal those of a float64 softmax, with rank and the most probable tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.execution.logprobs import compute_logprobs

Rows = npt.NDArray[np.float32]


def reference(row: Rows, target: int, num_top: int) -> TokenLogprobs:
    exact = row.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = np.lexsort((np.arange(row.size), -exact)).tolist()
    top = tuple((token, float(logprobs[token])) for token in order[:num_top])
    return TokenLogprobs(target, float(logprobs[target]), order.index(target) + 1, top)  # type: ignore[arg-type]


def assert_equal(found: TokenLogprobs | None, expected: TokenLogprobs) -> None:
    assert found is not None
    assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-12)
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    assert [value for _, value in found.top] == pytest.approx([value for _, value in expected.top], abs=1e-12)


@pytest.fixture
def logits() -> Rows:
    return (np.random.default_rng(8).standard_normal((6, 5000)) * 4).astype(np.float32)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 200, 5000, 9999])
def test_logprobs_equal_the_reference(logits: Rows, num_top: int) -> None:
    targets = [0, 17, 4999, 2500, int(logits[4].argmax()), int(logits[5].argmin())]
    for row, target, found in zip(logits, targets, compute_logprobs(logits, targets, num_top), strict=True):
        assert_equal(found, reference(row, target, num_top))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=150), st.integers(0, 160), st.integers(0, 149))
def test_equal_logits_are_ranked_by_id(values: list[int], num_top: int, target: int) -> None:
    row = np.array(values, np.float32)
    target %= row.size
    assert_equal(compute_logprobs(row[None], [target], num_top)[0], reference(row, target, num_top))


def test_each_row_has_its_own_number_of_top_tokens(logits: Rows) -> None:
    found = compute_logprobs(logits, [1] * 3, np.array([0, 4, 2]), rows=np.array([5, 0, 5]))
    for result, row, num_top in zip(found, (5, 0, 5), (0, 4, 2), strict=True):
        assert_equal(result, reference(logits[row], 1, num_top))


def test_a_row_alone_gives_the_same_bits(logits: Rows) -> None:
    together = compute_logprobs(logits, [3] * 6, 7)
    assert together == [compute_logprobs(row[None], [3], 7)[0] for row in logits]


def test_minus_infinity_is_a_value(logits: Rows) -> None:  # B9
    logits[0, 3] = -np.inf
    found = compute_logprobs(logits[:1], [3], 2)[0]
    assert found is not None
    assert found.logprob == -np.inf
    assert found.rank == 5000
    assert np.isfinite([value for _, value in found.top]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_unusable_row_has_none(logits: Rows, bad: float) -> None:  # B9
    logits[1, 77] = bad
    found = compute_logprobs(logits, [0] * 6, 3)
    assert [result is None for result in found] == [False, True, False, False, False, False]


def test_huge_logits_do_not_overflow() -> None:
    row = np.array([3e38, -3e38, 2.9e38], np.float32)
    found = compute_logprobs(row[None], [0], 2)[0]
    assert found is not None
    assert found.logprob == 0.0
    assert np.isfinite(found.top[1][1])


def test_no_targets() -> None:
    assert compute_logprobs(np.empty((0, 10), np.float32), [], 3) == []
