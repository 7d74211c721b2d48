"""The block pool: what is given out next, what is shared, what is held out."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.block_pool import BlockPool, FreeBlockQueue, KVBlock
from kvpilot_engine.core.ids import NULL_BLOCK, BlockHash, BlockId


def make_hash(name: str) -> BlockHash:
    return BlockHash(name.encode())


def allocate(pool: BlockPool, num_blocks: int) -> list[BlockId]:
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    return blocks


def test_free_queue_keeps_order_through_removal_from_the_middle() -> None:
    queue = FreeBlockQueue()
    blocks = [KVBlock(BlockId(i)) for i in range(1, 6)]
    for block in blocks[1:]:
        queue.append(block)
    queue.appendleft(blocks[0])
    queue.remove(blocks[2])
    assert [block.block_id for block in queue] == [1, 2, 4, 5]
    assert queue.popleft() is blocks[0]
    queue.append(blocks[2])
    assert [block.block_id for block in queue] == [2, 4, 5, 3]
    assert len(queue) == 4


def test_a_block_is_never_queued_twice_nor_removed_when_absent() -> None:
    queue = FreeBlockQueue()
    first, second = KVBlock(BlockId(1)), KVBlock(BlockId(2))
    queue.append(first)
    with pytest.raises(AssertionError, match="already in"):
        queue.append(first)
    with pytest.raises(AssertionError, match="not in"):
        queue.remove(second)


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert NULL_BLOCK not in allocate(pool, 4)
    assert pool.allocate(1) is None
    pool.check_invariants({BlockId(i): 1 for i in range(1, 5)})


def test_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3)
    held = allocate(pool, 2)
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_used) == (1, 2)
    pool.check_invariants(dict.fromkeys(held, 1))


def test_blocks_without_a_prefix_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, plain = allocate(pool, 2)
    pool.publish(cached, make_hash("a"))
    pool.free([cached])
    pool.free([plain])
    assert allocate(pool, 2) == [plain, 3]
    assert pool.lookup(make_hash("a")) == cached
    assert allocate(pool, 1) == [cached]
    assert pool.lookup(make_hash("a")) is None


def test_cached_blocks_are_evicted_tail_first_and_oldest_first() -> None:
    pool = BlockPool(4)
    old = allocate(pool, 2)
    new = allocate(pool, 2)
    for block_id in old + new:
        pool.publish(block_id, make_hash(str(block_id)))
    pool.free(old)
    pool.free(new)
    assert allocate(pool, 4) == [old[1], old[0], new[1], new[0]]


def test_a_touched_block_is_not_evicted_and_comes_back_as_the_newest() -> None:
    pool = BlockPool(2)
    first, second = allocate(pool, 2)
    pool.publish(first, make_hash("a"))
    pool.publish(second, make_hash("b"))
    pool.free([first])
    pool.free([second])
    pool.touch([first])
    assert (pool.num_cached, pool.num_used) == (1, 1)
    pool.free([first])
    assert allocate(pool, 1) == [second]


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(1)
    (block_id,) = allocate(pool, 1)
    pool.touch([block_id])
    pool.free([block_id])
    assert pool.num_used == 1
    pool.free([block_id])
    assert pool.num_free == 1


def test_a_block_can_not_be_freed_more_often_than_it_was_given_out() -> None:  # A6
    pool = BlockPool(2)
    held = allocate(pool, 1)
    pool.free(held)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(held)


def test_the_first_holder_of_a_hash_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = allocate(pool, 2)
    pool.publish(first, make_hash("a"))
    pool.publish(second, make_hash("a"))
    assert pool.lookup(make_hash("a")) == first
    pool.free([second])
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.check_invariants({first: 1})


def test_shrinking_holds_out_empty_blocks_first_then_cached_then_waits_for_used() -> None:
    pool = BlockPool(4)
    used, cached, _, _ = allocate(pool, 4)
    pool.publish(cached, make_hash("a"))
    pool.free([cached, BlockId(3), BlockId(4)])
    pool.set_target(2)
    assert (pool.num_free, pool.num_cached, pool.num_held_out, pool.num_to_hold_out) == (0, 1, 2, 0)
    pool.set_target(0)
    assert (pool.num_cached, pool.num_held_out, pool.num_to_hold_out) == (0, 3, 1)
    assert pool.lookup(make_hash("a")) is None
    pool.free([used])
    pool.hold_out_due()
    assert (pool.num_used, pool.num_held_out, pool.num_to_hold_out, pool.target_blocks) == (0, 4, 0, 0)
    pool.check_invariants({})


def test_growing_gives_held_out_blocks_back_and_cancels_what_was_deferred() -> None:
    pool = BlockPool(4)
    held = allocate(pool, 3)
    pool.set_target(1)
    assert (pool.num_held_out, pool.num_to_hold_out, pool.target_blocks) == (1, 2, 1)
    pool.set_target(4)
    assert (pool.num_held_out, pool.num_to_hold_out, pool.num_free) == (0, 0, 1)
    pool.check_invariants(dict.fromkeys(held, 1))
