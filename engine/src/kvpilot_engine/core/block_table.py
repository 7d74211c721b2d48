"""Where the tokens of one sequence live: logical position → block and slot.

Knows nothing of reference counts or hashes (block_pool) nor of tensors (execution).
Invariant: grows at the end only; a dropped plan alone cuts back what that plan had added. With a sliding window the
blocks that no later token reads are given away at the head; the null block keeps their places.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpilot_engine.core.ids import NULL_BLOCK, BlockId


class BlockTable:
    """Block ids of one sequence in the order of its positions."""

    __slots__ = ("_as_tuple", "_block_ids", "_block_size", "_num_given_away")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_ids: list[BlockId] = []
        self._as_tuple: tuple[BlockId, ...] | None = ()
        self._num_given_away = 0

    def __len__(self) -> int:
        return len(self._block_ids)

    @property
    def num_held(self) -> int:
        """Blocks that the sequence references."""
        return len(self._block_ids) - self._num_given_away

    @property
    def num_given_away(self) -> int:
        """Leading places that the null block keeps."""
        return self._num_given_away

    @property
    def num_slots(self) -> int:
        """Tokens that the table has room for."""
        return len(self._block_ids) * self._block_size

    @property
    def block_ids(self) -> tuple[BlockId, ...]:
        """The whole table. Built once per growth: a decoding sequence grows in one step of block_size."""
        if self._as_tuple is None:
            self._as_tuple = tuple(self._block_ids)
        return self._as_tuple

    def block_at(self, index: int) -> BlockId:
        return self._block_ids[index]

    def slot(self, position: int) -> int:
        """Index of the position's slot in a storage that lays blocks one after another."""
        block, offset = divmod(position, self._block_size)
        return self._block_ids[block] * self._block_size + offset

    def extend(self, block_ids: Iterable[BlockId]) -> None:
        self._block_ids.extend(block_ids)
        self._as_tuple = None

    def skip(self, num_blocks: int) -> None:
        """Begin with places whose blocks nobody reads."""
        assert not self._block_ids
        self._block_ids = [NULL_BLOCK] * num_blocks
        self._num_given_away = num_blocks
        self._as_tuple = None

    def give_away(self, num_blocks: int) -> list[BlockId]:
        """Put the null block in the first num_blocks places; the blocks that stood there, in table order."""
        removed = self._block_ids[self._num_given_away : num_blocks]
        self._block_ids[self._num_given_away : num_blocks] = [NULL_BLOCK] * len(removed)
        self._num_given_away += len(removed)
        self._as_tuple = None
        return removed

    def cut_to(self, num_blocks: int) -> list[BlockId]:
        """Take the blocks from num_blocks on out of the table and return them in table order."""
        removed = self._block_ids[max(num_blocks, self._num_given_away) :]
        del self._block_ids[num_blocks:]
        self._num_given_away = min(self._num_given_away, num_blocks)
        self._as_tuple = None
        return removed
