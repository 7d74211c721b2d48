"""Activations as tiles of bfloat16 rows: what the tiled linears multiply.

A tile holds up to sixteen rows: [groups of 32 columns, 16 pairs of columns, rows of the tile, 2]. With fewer rows than
that there is one tile of just so many. A number depends on its own row alone; columns that fill up a group are zero.
"""

# ruff: noqa: ARG001 - numba names arguments that only the emitted code reads
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from kvpilot_engine.kernels.bfloat_tiles import COLUMNS, ROW_BYTES, ROWS
from kvpilot_engine.kernels.jit import emitted, kernel, parallel_kernel, parallel_range
from kvpilot_engine.kernels.simd import I32, I32X16, I64, LANES, LINE, EmittedArray, Simd
from kvpilot_engine.kernels.weight_memory import aligned_zeros

Floats = npt.NDArray[np.float32]
Tiles = npt.NDArray[np.uint16]
Index = int | np.int64

ROWS_ALONE = 4
"""So many rows are done sooner than a second thread is woken."""


@dataclass(frozen=True, slots=True)
class TiledRows:
    """A buffer for rows of activations."""

    memory: npt.NDArray[np.uint8]
    num_groups: int

    @classmethod
    def allocate(cls, num_rows: int, num_columns: int) -> Self:
        num_groups = -(-num_columns // COLUMNS)
        return cls(aligned_zeros(-(-num_rows // ROWS) * ROWS, num_groups * ROW_BYTES).reshape(-1), num_groups)

    def first(self, num_rows: int) -> Tiles:
        """The tiles of so many rows, [tiles, groups, 32 * rows of a tile]; shares the memory with all others."""
        width = min(num_rows, ROWS)
        num_tiles = -(-num_rows // ROWS) if num_rows else 0
        used = self.memory[: num_tiles * self.num_groups * width * ROW_BYTES]
        return used.view(np.uint16).reshape(num_tiles, self.num_groups, width * COLUMNS)

    @property
    def size_bytes(self) -> int:
        return self.memory.nbytes


@emitted
def _pack_groups_of_row(
    typing_context: Any, row: Any, num_groups: Any, tile: Any, lane: Any
) -> tuple[Any, Callable[..., Any]]:
    """Whole groups of one row to its lane of a tile."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        row, tile = (
            EmittedArray(context, builder, kind, argument)
            for kind, argument in zip((signature.args[0], signature.args[2]), (arguments[0], arguments[2]), strict=True)
        )
        group_bytes = tile.strides[0]
        pair_bytes = builder.udiv(group_bytes, ir.Constant(I64, LANES))
        is_alone = builder.icmp_unsigned("==", pair_bytes, ir.Constant(I64, 4))
        lane_offset = simd.times(arguments[3], 4)
        with simd.loop(arguments[1]) as group:
            pairs = _load_pairs(simd, simd.at(row.pointer, simd.times(group, 4 * COLUMNS)))
            place = simd.at(tile.pointer, simd.times(group, group_bytes))
            with builder.if_else(is_alone) as (then, otherwise):
                with then:
                    simd.store(pairs, place, 2)
                with otherwise:
                    first = simd.at(place, lane_offset)
                    for pair in range(LANES):
                        number = builder.extract_element(pairs, ir.Constant(I32, pair))
                        simd.store(number, simd.at(first, simd.times(pair_bytes, pair)), 2)
        return context.get_dummy_value()

    return types.void(row, types.int64, tile, types.int64), emit


@emitted
def _pack_groups_of_tile(
    typing_context: Any, rows: Any, first_row: Any, num_groups: Any, tile: Any
) -> tuple[Any, Callable[..., Any]]:
    """Whole groups of sixteen rows to their tile."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        rows, tile = (
            EmittedArray(context, builder, kind, argument)
            for kind, argument in zip((signature.args[0], signature.args[3]), (arguments[0], arguments[3]), strict=True)
        )
        start = simd.at(rows.pointer, simd.times(arguments[1], rows.strides[0]))
        with simd.loop(arguments[2]) as group:
            column = simd.at(start, simd.times(group, 4 * COLUMNS))
            pairs = [_load_pairs(simd, simd.at(column, simd.times(rows.strides[0], row))) for row in range(ROWS)]
            place = simd.at(tile.pointer, simd.times(group, tile.strides[0]))
            for pair, vector in enumerate(simd.transpose(pairs)):
                simd.store(vector, simd.at(place, LINE * pair), 2)
        return context.get_dummy_value()

    return types.void(rows, types.int64, types.int64, tile), emit


def _load_pairs(simd: Simd, pointer: Any) -> Any:
    """32 float32 as sixteen pairs of bfloat16."""
    low, high = (simd.round_to_bf16(simd.load_f32(simd.at(pointer, LINE * half))) for half in range(2))
    return simd.builder.bitcast(simd.shuffle(low, high, range(COLUMNS)), I32X16)


@kernel
def _pack_rest_of_row(row: Floats, rest: Floats, tile: Tiles, lane: Index) -> None:
    """The columns that do not fill a group, and zeros."""
    first = row.shape[0] // COLUMNS * COLUMNS
    rest[:] = 0
    for column in range(first, row.shape[0]):
        rest[column - first] = row[column]
    _pack_groups_of_row(rest, np.int64(1), tile[first // COLUMNS :], np.int64(lane))


@kernel
def pack_row(row: Floats, tile: Tiles, lane: Index) -> None:
    """One row to its lane of a tile, [groups, 32 * rows of the tile]."""
    num_whole = row.shape[0] // COLUMNS
    _pack_groups_of_row(row, np.int64(num_whole), tile, np.int64(lane))
    if num_whole * COLUMNS < row.shape[0]:
        _pack_rest_of_row(row, np.empty(COLUMNS, np.float32), tile, lane)


@kernel
def pack_tile(rows: Floats, index: Index, tile: Tiles) -> None:
    """Rows 16 * index … to their tile."""
    first = index * ROWS
    count = min(rows.shape[0] - first, ROWS)
    if count < ROWS:
        for row in range(count):
            pack_row(rows[first + row], tile, row)
        return
    num_whole = rows.shape[1] // COLUMNS
    _pack_groups_of_tile(rows, np.int64(first), np.int64(num_whole), tile)
    if num_whole * COLUMNS < rows.shape[1]:
        rest = np.empty(COLUMNS, np.float32)
        for row in range(count):
            _pack_rest_of_row(rows[first + row], rest, tile, row)


@parallel_kernel
def pack_rows(rows: Floats, tiles: Tiles) -> None:
    if rows.shape[0] <= ROWS_ALONE:
        for row in range(rows.shape[0]):
            pack_row(rows[row], tiles[0], row)
    elif rows.shape[0] <= ROWS:
        for index in parallel_range(rows.shape[0]):
            place = np.int64(index)
            pack_row(rows[place], tiles[0], place)
    else:
        for index in parallel_range(tiles.shape[0]):
            place = np.int64(index)
            pack_tile(rows, place, tiles[place])
