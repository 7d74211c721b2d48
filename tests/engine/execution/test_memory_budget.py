"""The arithmetic from share to blocks and back, and what a refusal suggests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_engine.core.memory_report import round_share_up
from kvpilot_engine.errors import DoesNotFitError
from kvpilot_engine.execution.memory_budget import MemoryBudget

MIB = 1 << 20


def make_budget(**changes: int | None) -> MemoryBudget:
    sizes: dict[str, int | None] = {
        "total_bytes": 2048 * MIB,
        "process_base_bytes": 560 * MIB,
        "weights_bytes": 514 * MIB,
        "activations_peak_bytes": 90 * MIB,
        "bytes_per_block": MIB,
        "block_size": 16,
    }
    return MemoryBudget(**(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "blocks"), [(0.95, 780), (0.9, 678), (0.8, 473), (0.6, 63), (0.57, 2), (0.56, 0), (0.1, 0)]
)
def test_each_step_of_the_share_changes_the_blocks(share: float, blocks: int) -> None:
    assert make_budget().num_blocks_at(share) == blocks


def test_the_users_limit_is_an_upper_bound() -> None:
    budget = make_budget(num_blocks_limit=100)
    assert [budget.num_blocks_at(share) for share in (0.9, 0.6)] == [100, 63]


@pytest.mark.parametrize(
    ("share", "wanted", "resolved"), [(0.9, None, 8192), (0.6, None, 1008), (0.6, 1008, 1008), (0.9, 512, 512)]
)
def test_the_length_is_what_was_asked_for_or_the_longest_that_fits(  # A1
    share: float, wanted: int | None, resolved: int
) -> None:
    assert make_budget().resolve_max_model_len(share, wanted, 8192) == resolved


@pytest.mark.parametrize(
    ("share", "wanted", "suggested"),
    [
        (0.6, 1009, {"utilization": 0.61, "max_model_len": 1008}),  # one token too long
        (0.1, 2048, {"utilization": 0.64}),  # does not even hold the weights  # A16
        (0.95, 16384, {"max_model_len": 12480}),  # the whole device is too small
        (0.5, None, {"utilization": 0.57}),
    ],
)
def test_a_refusal_tells_what_would_do(  # A1
    share: float, wanted: int | None, suggested: dict[str, float]
) -> None:
    budget = make_budget()
    with pytest.raises(DoesNotFitError) as caught:
        budget.resolve_max_model_len(share, wanted, 100_000)
    assert caught.value.suggested == suggested
    assert caught.value.available_bytes == budget.limit_bytes(share)
    assert caught.value.required_bytes > caught.value.available_bytes
    assert str(caught.value.required_bytes) in str(caught.value)
    assert str(caught.value.available_bytes) in str(caught.value)
    if "utilization" in suggested:
        budget.resolve_max_model_len(suggested["utilization"], wanted, 100_000)


def test_nothing_is_suggested_where_nothing_helps() -> None:
    with pytest.raises(DoesNotFitError, match="too small") as caught:
        make_budget(total_bytes=512 * MIB).resolve_max_model_len(0.9, None, 8192)
    assert caught.value.suggested == {}


def test_a_higher_share_is_not_suggested_against_the_users_own_limit() -> None:
    with pytest.raises(DoesNotFitError, match="limited to 10") as caught:
        make_budget(num_blocks_limit=10).resolve_max_model_len(0.9, 2048, 8192)
    assert caught.value.suggested == {"max_model_len": 160}


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_more_share_never_gives_fewer_blocks(one: float, other: float) -> None:
    budget = make_budget()
    assert budget.num_blocks_at(min(one, other)) <= budget.num_blocks_at(max(one, other))


@given(st.integers(1, 10_000))
def test_the_smallest_share_for_a_length_holds_it(length: int) -> None:
    budget = make_budget()
    share = budget.min_utilization(length)
    if share <= 1.0:
        assert budget.longest_at(round_share_up(share)) >= length
        assert budget.longest_at(share - 0.001) < length + 16


@pytest.mark.parametrize(("share", "rounded"), [(0.601, 0.61), (0.6, 0.6), (0.29, 0.29), (0.9999, 1.0)])
def test_suggested_shares_round_up(share: float, rounded: float) -> None:
    assert round_share_up(share) == rounded
