"""Blocks for sequences: what is already cached, what must be allocated, what others may reuse.

Decides nothing about order or victims (scheduler). find_prefix changes nothing; allocate_slots changes nothing when it
returns None. Invariant: a block named by several tables, or by the hash map, is full and computed, and never written.

    positions of a sequence
    0 ─────────────── num_cached ───────── num_computed ──────── num_tokens ──────── table.num_slots
    └ shared, found by hash ┘└ own, full blocks published ┘└ reserved, to be computed ┘└ rest of last block ┘

With a sliding window, blocks that no token after num_computed reads are given away (they may stay cached), and room is
taken chunk by chunk, so that a sequence never holds more than the window, one step and the rests of two blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpilot_engine.core.block_pool import BlockPool
from kvpilot_engine.core.ids import BlockHash, BlockId
from kvpilot_engine.core.prefix_hashing import compute_block_hash, compute_root_hash
from kvpilot_engine.core.sequence import Sequence
from kvpilot_engine.core.settings import CacheSettings


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that hold the first tokens of a sequence."""

    block_ids: tuple[BlockId, ...]
    """Those that later tokens read."""
    num_cached_tokens: int
    num_skipped_blocks: int = 0
    """Cached blocks before them, which lie outside the window."""

    @property
    def num_blocks(self) -> int:
        return self.num_skipped_blocks + len(self.block_ids)


NO_PREFIX = PrefixMatch((), 0)


class KVCacheManager:
    """Owns the pool; every block that a sequence holds came from here."""

    def __init__(self, settings: CacheSettings, *, num_blocks: int, max_step_tokens: int, model: str) -> None:
        """`model` names what the cached values depend on besides tokens; `num_blocks` excludes the null block.

        `max_step_tokens`: the most that one sequence computes in one step.
        """
        self.block_size = settings.block_size
        self._window = settings.window
        self._max_step_tokens = max_step_tokens
        self.caches_prefixes = settings.enable_prefix_caching
        self._model = model
        self.pool = BlockPool(num_blocks)
        self._computing: dict[BlockHash, Sequence] = {}
        """Full blocks of admitted sequences that are not computed yet, and who will compute them."""

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_to_hold(self, num_tokens: int) -> int:
        """The most blocks that a sequence of num_tokens tokens holds at a time while they are computed."""
        if self._window is None:
            return self.num_blocks_for(num_tokens)
        # One block more than the tokens fill: they may begin in the middle of a block.
        widest = self.num_blocks_for(self._window - 1 + self._max_step_tokens) + 1
        return min(self.num_blocks_for(num_tokens), widest)

    def find_prefix(self, sequence: Sequence) -> PrefixMatch:
        """The longest cached prefix of a waiting sequence, in whole blocks.

        At least one token is left to compute, or there would be nothing to sample the next token from; and every
        token whose logits are wanted for the log-probabilities of the prompt.
        """
        if not self.caches_prefixes:
            return NO_PREFIX
        max_blocks = sequence.num_scored_tokens // self.block_size
        found: list[BlockId] = []
        for block_hash in self._hashes(sequence, max_blocks):
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        num_cached_tokens = len(found) * self.block_size
        num_skipped = self._num_unread_blocks(num_cached_tokens)
        return PrefixMatch(tuple(found[num_skipped:]), num_cached_tokens, num_skipped)

    def can_admit(self, sequence: Sequence, match: PrefixMatch, *, num_reserved_blocks: int) -> bool:
        """True when all known tokens of a waiting sequence get blocks and the reserve stays free after that."""
        num_new = self.num_blocks_for(sequence.num_tokens) - match.num_blocks
        if self._window is not None:
            num_new = min(num_new, self.num_blocks_to_hold(sequence.num_tokens) - len(match.block_ids))
        # Matched blocks that nobody references leave the free queue too.
        num_revived = sum(self.pool.is_available(block_id) for block_id in match.block_ids)
        return num_new + num_revived + num_reserved_blocks <= self.pool.num_available

    def will_be_cached(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """True when the block after the match is just being computed for another sequence. Changes nothing.

        To wait for it is cheaper than to compute it twice: equal prompts that arrive together, as the choices of
        one request do, then share their blocks.
        """
        num_matched = match.num_blocks
        if not self.caches_prefixes or num_matched >= sequence.num_scored_tokens // self.block_size:
            return False
        return self._hashes(sequence, num_matched + 1)[num_matched] in self._computing

    def admit(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a waiting sequence blocks for all its tokens, and start it. can_admit() has said that they are there.

        With a window it gets those of its first step; the others follow as it gives away what it has left behind.
        """
        num_tokens = sequence.num_tokens
        if self._window is not None:
            num_tokens = min(num_tokens, match.num_cached_tokens + self._max_step_tokens)
        allocated = self.allocate_slots(sequence, num_tokens, match)
        assert allocated is not None, "there was room for a sequence that got no blocks"
        sequence.start(num_cached_tokens=match.num_cached_tokens)
        if self.caches_prefixes:
            num_full = sequence.num_tokens // self.block_size
            for block_hash in self._hashes(sequence, num_full)[match.num_blocks :]:
                self._computing.setdefault(block_hash, sequence)

    def allocate_slots(
        self, sequence: Sequence, num_tokens: int, match: PrefixMatch = NO_PREFIX
    ) -> list[BlockId] | None:
        """Make room for the first num_tokens tokens. The new blocks, or None and no change when the pool is short.

        `match` goes with a sequence that holds nothing yet: its blocks become the head of the table.
        """
        assert not match.block_ids or len(sequence.block_table) == 0
        num_new = self.num_blocks_for(num_tokens) - (match.num_blocks or len(sequence.block_table))
        if num_new <= 0 and not match.block_ids:
            return []
        self.pool.touch(match.block_ids)  # first, or the allocation could evict what was matched
        new_blocks = self.pool.allocate(max(num_new, 0))
        if new_blocks is None:
            self.pool.free(list(match.block_ids))
            return None
        if match.num_skipped_blocks:
            sequence.block_table.skip(match.num_skipped_blocks)
        sequence.block_table.extend(match.block_ids)
        sequence.block_table.extend(new_blocks)
        return new_blocks

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Count num_tokens more tokens as computed, publish the blocks that became full, give away the unread."""
        first = sequence.num_computed_tokens // self.block_size
        sequence.advance(num_tokens)
        last = sequence.num_computed_tokens // self.block_size
        if self.caches_prefixes and first != last:
            hashes = self._hashes(sequence, last)
            for index in range(first, last):
                self.pool.publish(sequence.block_table.block_at(index), hashes[index])
                self._stop_computing(sequence, hashes[index])
        if self._window is not None:
            num_unread = self._num_unread_blocks(sequence.num_computed_tokens)
            if num_unread > sequence.block_table.num_given_away:
                self.pool.free(sequence.block_table.give_away(num_unread))

    def cut_to(self, sequence: Sequence, num_blocks: int) -> None:
        """Give back what the table holds beyond num_blocks blocks; nothing there may be computed."""
        assert sequence.num_computed_tokens <= num_blocks * self.block_size
        self.pool.free(sequence.block_table.cut_to(num_blocks))

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence; published ones stay cached until they are evicted."""
        for block_hash in sequence.block_hashes[sequence.num_computed_tokens // self.block_size :]:
            self._stop_computing(sequence, block_hash)
        self.pool.free(sequence.block_table.cut_to(0))

    @property
    def usage(self) -> float:
        """Blocks held by live sequences ÷ blocks that may be used now, 0..1. Cached blocks don't count."""
        num_usable = self.pool.num_blocks - self.pool.num_held_out
        return self.pool.num_used / num_usable if num_usable else 0.0

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Assert that pool and tables of all live sequences agree. For tests, after every step."""
        references: dict[BlockId, int] = {}
        written: dict[BlockId, str] = {}
        for sequence in sequences:
            num_given_away = sequence.block_table.num_given_away
            assert not any(sequence.block_table.block_ids[:num_given_away]), "a block was given away and is held"
            assert num_given_away <= self._num_unread_blocks(sequence.num_computed_tokens), "a block is missing"
            block_ids = sequence.block_table.block_ids[num_given_away:]
            held_at_most = self.num_blocks_to_hold(max(sequence.num_tokens, sequence.num_computed_tokens))
            assert len(block_ids) <= held_at_most, f"{sequence.request_id} holds more than it was admitted for"
            assert len(set(block_ids)) == len(block_ids), f"{sequence.request_id} holds a block twice"
            assert sequence.num_computed_tokens <= sequence.block_table.num_slots, f"{sequence.request_id} lacks slots"
            for index, block_id in enumerate(block_ids, start=num_given_away):
                references[block_id] = references.get(block_id, 0) + 1
                if (index + 1) * self.block_size > sequence.num_computed_tokens:
                    assert block_id not in written, f"{sequence.request_id} and {written[block_id]} write {block_id}"
                    written[block_id] = sequence.request_id
        assert all(references[block_id] == 1 for block_id in written), "a block that is still written is shared"
        self.pool.check_invariants(references)
        for block_hash, sequence in self._computing.items():
            index = sequence.block_hashes.index(block_hash)
            has_block = len(sequence.block_table) > index or self._window is not None
            assert has_block, f"{sequence.request_id} computes a block that it has not"
            assert sequence.num_computed_tokens < (index + 1) * self.block_size, "a computed block is still awaited"

    def _num_unread_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token from num_computed_tokens on reads."""
        if self._window is None:
            return 0
        return max(0, num_computed_tokens - self._window + 1) // self.block_size

    def _stop_computing(self, sequence: Sequence, block_hash: BlockHash) -> None:
        if self._computing.get(block_hash) is sequence:
            del self._computing[block_hash]

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[BlockHash]:
        """Names of the first num_blocks full blocks, computed once per sequence."""
        hashes = sequence.block_hashes
        if not hashes and num_blocks:
            root = compute_root_hash(model=self._model, salt=sequence.request.cache_salt)
            hashes.append(compute_block_hash(root, sequence.token_ids[: self.block_size]))
        for index in range(len(hashes), num_blocks):
            tokens = sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
            hashes.append(compute_block_hash(hashes[-1], tokens))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]
