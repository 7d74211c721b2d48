"""Where the tokens of one sequence live: logical position → block and slot.

Knows nothing of reference counts or hashes (block_pool) nor of tensors (execution).
Invariant: grows at the end only; a dropped plan alone cuts back what that plan had added.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpilot_engine.core.ids import BlockId


class BlockTable:
    """Block ids of one sequence in the order of its positions."""

    __slots__ = ("_as_tuple", "_block_ids", "_block_size")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_ids: list[BlockId] = []
        self._as_tuple: tuple[BlockId, ...] | None = ()

    def __len__(self) -> int:
        return len(self._block_ids)

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

    def cut_to(self, num_blocks: int) -> list[BlockId]:
        """Take the blocks from num_blocks on out of the table and return them in table order."""
        removed = self._block_ids[num_blocks:]
        del self._block_ids[num_blocks:]
        self._as_tuple = None
        return removed
