"""The blocks of the KV cache: who may be given out next, who is shared, who still holds a reusable prefix.

Not its job: which sequence gets how many blocks (kv_cache_manager) and what the blocks contain (execution).
Invariant: every block but the null block is in exactly one state, and free + cached + used + held out == total.

    free      ref_count 0, no hash        ┐ in the free queue,
    cached    ref_count 0, has a hash     ┘ in the order in which they will be given out
    used      ref_count > 0
    held out  ref_count 0, no hash, kept from use by the cap
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvpilot_engine.core.ids import NULL_BLOCK, BlockHash, BlockId


class KVBlock:
    """One block's bookkeeping; changed by the pool only."""

    __slots__ = ("block_hash", "block_id", "next_free", "previous_free", "ref_count")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.previous_free: KVBlock | None = None
        self.next_free: KVBlock | None = None


class FreeBlockQueue:
    """Intrusive doubly linked list in eviction order, so that a prefix hit leaves the middle of it in O(1)."""

    __slots__ = ("_first", "_last", "_len")

    def __init__(self) -> None:
        # Sentinels at both ends spare every operation the question whether a neighbour exists.
        self._first = KVBlock(NULL_BLOCK)
        self._last = KVBlock(NULL_BLOCK)
        self._first.next_free = self._last
        self._last.previous_free = self._first
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[KVBlock]:
        block = self._first.next_free
        while block is not None and block is not self._last:
            yield block
            block = block.next_free

    def append(self, block: KVBlock) -> None:
        """To be given out last."""
        before = self._last.previous_free
        assert before is not None
        self._link(before, block, self._last)

    def appendleft(self, block: KVBlock) -> None:
        """To be given out next."""
        after = self._first.next_free
        assert after is not None
        self._link(self._first, block, after)

    def popleft(self) -> KVBlock:
        block = self._first.next_free
        assert block is not None
        assert block is not self._last, "popleft on an empty free queue"
        self.remove(block)
        return block

    def remove(self, block: KVBlock) -> None:
        before, after = block.previous_free, block.next_free
        assert before is not None, f"block {block.block_id} is not in the free queue"
        assert after is not None
        before.next_free = after
        after.previous_free = before
        block.previous_free = block.next_free = None
        self._len -= 1

    def _link(self, before: KVBlock, block: KVBlock, after: KVBlock) -> None:
        assert block.next_free is None, f"block {block.block_id} is already in the free queue"
        block.previous_free, block.next_free = before, after
        before.next_free = after.previous_free = block
        self._len += 1


class BlockPool:
    """Blocks 1..num_blocks, given out and taken back by reference count. Block 0 is the null block and never moves."""

    def __init__(self, num_blocks: int) -> None:
        """All blocks start free. The storage behind the pool needs num_blocks + 1 places."""
        self.num_blocks = num_blocks
        self._blocks = [KVBlock(BlockId(i)) for i in range(num_blocks + 1)]
        self._blocks[NULL_BLOCK].ref_count = 1
        self._free = FreeBlockQueue()
        for block in self._blocks[1:]:
            self._free.append(block)
        self._by_hash: dict[BlockHash, KVBlock] = {}
        self._num_cached = 0
        self._held_out: list[KVBlock] = []
        self._num_to_hold_out = 0

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can give now: free and cached ones."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free) - self._num_cached

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._held_out) - len(self._free)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    @property
    def num_to_hold_out(self) -> int:
        """Blocks that the cap forbids and that are still in use."""
        return self._num_to_hold_out

    @property
    def target_blocks(self) -> int:
        """Blocks that the cap allows once every deferred one is held out."""
        return self.num_blocks - len(self._held_out) - self._num_to_hold_out

    def is_available(self, block_id: BlockId) -> bool:
        """True when nobody references the block."""
        return self._blocks[block_id].ref_count == 0

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Give out blocks in eviction order, or None and no change when there are too few."""
        if num_blocks > len(self._free):
            return None
        allocated = []
        for _ in range(num_blocks):
            block = self._free.popleft()
            self._evict(block)
            block.ref_count = 1
            allocated.append(block.block_id)
        return allocated

    def touch(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference to each; a cached block leaves the free queue."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._free.remove(block)
                self._num_cached -= 1
            block.ref_count += 1

    def free(self, block_ids: list[BlockId]) -> None:
        """Drop one reference to each block of a table, tail first.

        The tail of a prefix is the least likely to be asked for again and useless without its head, so it goes
        first. Blocks without a hash go to the front: no cached prefix is lost while an empty block is there.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} was freed more often than it was given out"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.block_hash is None:
                self._free.appendleft(block)
            else:
                self._free.append(block)
                self._num_cached += 1

    def lookup(self, block_hash: BlockHash) -> BlockId | None:
        """The block that holds this prefix. Changes nothing."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.block_id

    def publish(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """Let others find a block that is full and computed. The first holder of a hash keeps it."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is published without an owner"
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block

    def set_target(self, target_blocks: int) -> None:
        """Change the number of blocks that may be used; what is in use is held out later, by hold_out_due()."""
        assert 0 <= target_blocks <= self.num_blocks
        to_hold_out = self.num_blocks - target_blocks
        while len(self._held_out) > to_hold_out:
            self._free.appendleft(self._held_out.pop())
        self._num_to_hold_out = to_hold_out - len(self._held_out)
        self.hold_out_due()

    def hold_out_due(self) -> None:
        """Hold out unreferenced blocks, empty ones first, until the cap is reached."""
        while self._num_to_hold_out and self._free:
            block = self._free.popleft()
            self._evict(block)
            self._held_out.append(block)
            self._num_to_hold_out -= 1

    def check_invariants(self, references: dict[BlockId, int]) -> None:
        """Assert that everything adds up; `references` counts how often live tables name each block. For tests."""
        queued = [block.block_id for block in self._free]
        backwards = []
        block = self._free._last.previous_free
        while block is not None and block is not self._free._first:
            backwards.append(block.block_id)
            block = block.previous_free
        assert queued == backwards[::-1], "the free queue reads differently from its two ends"
        assert len(queued) == len(self._free) == len(set(queued)), "the free queue miscounts"
        held_out = [block.block_id for block in self._held_out]
        unused = set(queued) | set(held_out)
        assert len(unused) == len(queued) + len(held_out), "a block is both free and held out"
        assert NULL_BLOCK not in unused | references.keys(), "the null block moved"
        for block in self._blocks[1:]:
            block_id = block.block_id
            assert block.ref_count == references.get(block_id, 0), f"block {block_id} has a wrong reference count"
            assert (block.ref_count == 0) == (block_id in unused), f"block {block_id} is lost or in two states"
            if block.block_hash is not None:
                assert self._by_hash.get(block.block_hash) is block, f"block {block_id} can't be found by its hash"
        assert all(self._blocks[i].block_hash is None for i in held_out), "a held-out block still holds a prefix"
        assert all(block.block_hash == key for key, block in self._by_hash.items()), "a hash leads to another block"
        assert self._num_cached == sum(self._blocks[i].block_hash is not None for i in queued), "cached is miscounted"
        assert self.num_used == len(references), "used is miscounted"
        assert self.num_free + self.num_cached + self.num_used + self.num_held_out == self.num_blocks
        assert self._num_to_hold_out >= 0
        assert not (self._num_to_hold_out and self._free), "a block is free that the cap forbids"

    def _evict(self, block: KVBlock) -> None:
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash = None
            self._num_cached -= 1
