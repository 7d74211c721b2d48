"""Blocks for sequences: prefix lookup, allocation, publication."""

from __future__ import annotations

import copy

import pytest

from kvpilot_engine.core.kv_cache_manager import NO_PREFIX, KVCacheManager
from kvpilot_engine.core.scheduler_output import FinishReason
from kvpilot_engine.core.sequence import Sequence
from kvpilot_engine.core.settings import CacheSettings
from kvpilot_engine.testing import make_request, make_sequence


def make_manager(
    num_blocks: int = 8, *, caching: bool = True, model: str = "m", window: int | None = None, max_step_tokens: int = 64
) -> KVCacheManager:
    cache = CacheSettings(block_size=4, enable_prefix_caching=caching, window=window)
    return KVCacheManager(cache, num_blocks=num_blocks, max_step_tokens=max_step_tokens, model=model)


def make_waiting(*tokens: int, salt: str = "") -> Sequence:
    return make_sequence(make_request(prompt=tokens, cache_salt=salt), block_size=4)


def compute(manager: KVCacheManager, sequence: Sequence) -> int:
    """Start a sequence and compute all it has; the number of tokens that came from the cache."""
    match = manager.find_prefix(sequence)
    manager.admit(sequence, match)
    manager.commit(sequence, sequence.num_tokens - match.num_cached_tokens)
    return match.num_cached_tokens


def end(manager: KVCacheManager, sequence: Sequence) -> None:
    manager.free(sequence)
    sequence.finish(FinishReason.STOP)


def test_full_hit_leaves_a_token_to_compute() -> None:  # A8
    manager = make_manager()
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    first, second, longer = make_waiting(*prompt), make_waiting(*prompt), make_waiting(*prompt, 9)
    assert compute(manager, first) == 0
    end(manager, first)
    assert compute(manager, second) == 4
    end(manager, second)
    assert compute(manager, longer) == 8
    manager.check_invariants([longer])


def test_running_sequences_share_full_blocks_only() -> None:
    manager = make_manager()
    first, second = make_waiting(1, 2, 3, 4, 5, 6), make_waiting(1, 2, 3, 4, 5, 6)
    compute(manager, first)
    compute(manager, second)
    assert first.block_table.block_at(0) == second.block_table.block_at(0)
    assert first.block_table.block_at(1) != second.block_table.block_at(1)
    assert manager.pool.num_used == 3
    manager.check_invariants([first, second])


@pytest.mark.parametrize(("salt", "cached"), [("alice", 4), ("bob", 0), ("", 0)])
def test_only_the_same_salt_shares(salt: str, cached: int) -> None:  # A12
    manager = make_manager()
    compute(manager, make_waiting(1, 2, 3, 4, 5, salt="alice"))
    assert compute(manager, make_waiting(1, 2, 3, 4, 5, salt=salt)) == cached


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    manager = make_manager(caching=False)
    first = make_waiting(1, 2, 3, 4, 5)
    compute(manager, first)
    assert compute(manager, make_waiting(1, 2, 3, 4, 5)) == 0
    end(manager, first)
    assert manager.pool.num_cached == 0


def test_find_prefix_changes_nothing() -> None:
    manager = make_manager(num_blocks=3)
    first = make_waiting(1, 2, 3, 4, 5)
    compute(manager, first)
    end(manager, first)
    before = [copy.copy((b.block_id, b.block_hash, b.ref_count)) for b in manager.pool._free]
    sequence = make_waiting(1, 2, 3, 4, 5)
    assert manager.find_prefix(sequence) == manager.find_prefix(sequence)
    assert [(b.block_id, b.block_hash, b.ref_count) for b in manager.pool._free] == before
    assert len(sequence.block_table) == 0


def test_allocation_that_does_not_fit_leaves_the_prefix_where_it_was() -> None:
    manager = make_manager(num_blocks=3)
    first = make_waiting(1, 2, 3, 4, 5)
    compute(manager, first)
    end(manager, first)
    sequence = make_waiting(*range(1, 5), *range(20, 40))
    match = manager.find_prefix(sequence)
    assert match.num_cached_tokens == 4
    assert manager.allocate_slots(sequence, sequence.num_tokens, match) is None
    assert (manager.pool.num_free, manager.pool.num_cached, len(sequence.block_table)) == (2, 1, 0)
    manager.check_invariants([])


def test_allocation_does_not_evict_what_it_has_just_matched() -> None:
    """With every other block taken, the matched blocks stand first in the queue that the new block comes from."""
    manager = make_manager(num_blocks=2)
    first = make_waiting(1, 2, 3, 4, 5, 6, 7, 8)
    compute(manager, first)
    end(manager, first)
    sequence = make_waiting(1, 2, 3, 4, 9)
    compute(manager, sequence)
    assert len(set(sequence.block_table.block_ids)) == 2
    manager.check_invariants([sequence])


def test_room_counts_matched_blocks_that_nobody_holds() -> None:
    manager = make_manager(num_blocks=3)
    first = make_waiting(1, 2, 3, 4, 5)
    compute(manager, first)
    end(manager, first)
    sequence = make_waiting(1, 2, 3, 4, 5)
    match = manager.find_prefix(sequence)
    assert manager.can_admit(sequence, match, num_reserved_blocks=1)
    assert not manager.can_admit(sequence, match, num_reserved_blocks=2)


def test_a_prefix_is_awaited_only_while_somebody_computes_it() -> None:
    manager = make_manager()
    leader, follower, stranger = make_waiting(*range(9)), make_waiting(*range(9)), make_waiting(*range(50, 59))
    assert not manager.will_be_cached(follower, NO_PREFIX)
    manager.admit(leader, NO_PREFIX)
    assert manager.will_be_cached(follower, NO_PREFIX)
    assert not manager.will_be_cached(stranger, NO_PREFIX)
    manager.commit(leader, 4)
    match = manager.find_prefix(follower)
    assert match.num_cached_tokens == 4
    assert manager.will_be_cached(follower, match)
    manager.commit(leader, 5)
    match = manager.find_prefix(follower)
    assert match.num_cached_tokens == 8
    assert not manager.will_be_cached(follower, match)


def test_a_last_block_that_has_to_be_recomputed_anyway_is_not_awaited() -> None:  # A8
    manager = make_manager()
    leader, follower = make_waiting(*range(8)), make_waiting(*range(8))
    manager.admit(leader, NO_PREFIX)
    manager.commit(leader, 4)
    match = manager.find_prefix(follower)
    assert match.num_cached_tokens == 4
    assert not manager.will_be_cached(follower, match)


def test_nobody_awaits_a_sequence_that_has_ended() -> None:
    manager = make_manager()
    leader, follower = make_waiting(*range(9)), make_waiting(*range(9))
    manager.admit(leader, NO_PREFIX)
    manager.commit(leader, 4)
    end(manager, leader)
    assert not manager.will_be_cached(follower, manager.find_prefix(follower))
    manager.check_invariants([])


def test_growth_takes_a_block_only_when_the_last_is_full() -> None:
    manager = make_manager()
    sequence = make_waiting(1, 2, 3)
    assert manager.allocate_slots(sequence, 3, NO_PREFIX) == [1]
    assert manager.allocate_slots(sequence, 4) == []
    assert manager.allocate_slots(sequence, 5) == [2]


def test_usage_counts_blocks_of_live_sequences_only() -> None:  # D16
    manager = make_manager(num_blocks=8)
    sequences = [make_waiting(*range(base, base + 5)) for base in (0, 10)]
    for sequence in sequences:
        compute(manager, sequence)
    assert manager.usage == 4 / 8
    for sequence in sequences:
        end(manager, sequence)
    assert manager.usage == 0
    assert manager.pool.num_cached == 2


def test_a_shared_block_that_is_still_written_is_noticed() -> None:
    manager = make_manager()
    first, second = make_waiting(1, 2, 3), make_waiting(1, 2, 3)
    compute(manager, first)
    second.block_table.extend(first.block_table.block_ids)
    second.start(num_cached_tokens=0)
    manager.pool.touch(first.block_table.block_ids)
    with pytest.raises(AssertionError, match="write"):
        manager.check_invariants([first, second])
