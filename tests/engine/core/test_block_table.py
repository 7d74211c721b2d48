"""The block table: where a position lives."""

from __future__ import annotations

from kvpilot_engine.core.block_table import BlockTable
from kvpilot_engine.core.ids import BlockId


def make_table(*block_ids: int, block_size: int = 4) -> BlockTable:
    table = BlockTable(block_size)
    table.extend(BlockId(block_id) for block_id in block_ids)
    return table


def test_positions_map_to_slots_through_the_table() -> None:
    table = make_table(7, 2)
    assert [table.slot(position) for position in (0, 3, 4, 7)] == [28, 31, 8, 11]
    assert table.num_slots == 8


def test_the_tuple_is_built_once_per_growth() -> None:
    table = make_table(7)
    first = table.block_ids
    assert table.block_ids is first
    table.extend([BlockId(3)])
    assert table.block_ids == (7, 3)


def test_cutting_returns_what_was_removed_in_table_order() -> None:
    table = make_table(7, 2, 5)
    assert table.cut_to(1) == [2, 5]
    assert table.block_ids == (7,)
    assert table.cut_to(1) == []
