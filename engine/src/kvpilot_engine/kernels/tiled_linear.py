"""Linears by AMX's bfloat16 tiles: blocks of sixteen outputs against tiles of sixteen rows, spread over the threads.

Weights become bfloat16 while the first rows are multiplied and stay in the thread's memory for the others. Rows are
bfloat16 as well (tiled_rows.py); a sum is float32 over all columns in ascending order, so a row's result is the same
bits whatever rows stand beside it and however many they are.
"""

# ruff: noqa: ARG001 - numba names arguments that only the emitted code reads
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from kvpilot_engine.kernels.bfloat_tiles import COLUMNS, ROWS, WEIGHT_TILE_BYTES, BFloatTiles
from kvpilot_engine.kernels.jit import emitted, parallel_kernel, parallel_range
from kvpilot_engine.kernels.packed_matrix import (
    BF16_TILES,
    F16_TILES,
    LAYOUTS,
    OUTPUTS,
    Q4_0_TILES,
    Q4_1_TILES,
    Q4_K_TILES,
    Q5_1_TILES,
    Q5_K_TILES,
    Q6_K_TILES,
    Q8_0_TILES,
)
from kvpilot_engine.kernels.simd import I1, I64, LINE, EmittedArray, Simd, Value
from kvpilot_engine.kernels.tiled_weights import TiledBlock

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Tiles = npt.NDArray[np.uint16]

BLOCKS = 2
"""Of outputs and tiles of rows that are multiplied at once: each tile that is loaded is used twice."""

_GROUPS_AHEAD = 4
"""So many groups of weights are unpacked before the first is multiplied: their stores have arrived by then."""
_RING = 8
"""Groups kept where no later rows need them: they stay in the nearest cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The activations; strides in bytes."""

    tiles: Value
    tile_stride: Value
    group_stride: Value
    num_tiles: Value

    def of_group(self, simd: Simd, tile: Value, count: int, group: Value) -> list[Value]:
        """Addresses of a group in `count` tiles from `tile` on."""
        first = simd.at(simd.at(self.tiles, simd.times(tile, self.tile_stride)), simd.times(group, self.group_stride))
        return [simd.at(first, simd.times(self.tile_stride, index)) for index in range(count)]


Finish = Callable[[Simd, BFloatTiles, list[TiledBlock], Value, list[int]], None]
"""Takes the blocks, the number of a tile of rows, and for each block the sum that is complete."""


def emit_blocks(
    simd: Simd, layout: Any, first_block: Value, arrays: tuple[EmittedArray, ...], outputs: Value, finish: Finish
) -> None:
    """Two blocks of outputs, or the last one, for all rows. `arrays`: tiles, weights, bias; `outputs`: how many."""
    builder = simd.builder
    tiles, weights, bias = arrays
    num_groups = tiles.shape[1]
    rows = _Rows(
        tiles=tiles.pointer,
        tile_stride=tiles.strides[0],
        group_stride=tiles.strides[1],
        num_tiles=tiles.shape[0],
    )
    matrix = BFloatTiles(simd, builder.udiv(tiles.shape[2], ir.Constant(I64, COLUMNS)))

    def block_at(index: int) -> TiledBlock:
        block = builder.add(first_block, ir.Constant(I64, index))
        before = simd.times(block, OUTPUTS)
        return TiledBlock(
            layout=layout,
            weights=simd.at(weights.pointer, simd.times(block, weights.strides[0])),
            block_bytes=weights.strides[0],
            bias=simd.at(bias.pointer, simd.times(before, 4)),
            first_output=before,
            mask=simd.first_lanes(builder.sub(outputs, before)),
            num_groups=num_groups,
        )

    is_pair = builder.icmp_signed("<", builder.add(first_block, ir.Constant(I64, 1)), weights.shape[0])
    lines = simd.times(num_groups, BLOCKS * (WEIGHT_TILE_BYTES + block_at(0).scaling_bytes) // LINE)
    with simd.memory(lines) as memory:
        matrix.configure()
        with builder.if_else(is_pair) as (then, otherwise):
            with then:
                _multiply(simd, matrix, [block_at(0), block_at(1)], rows, memory, finish)
            with otherwise:
                _multiply(simd, matrix, [block_at(0)], rows, memory, finish)
        matrix.release()


def _multiply(
    simd: Simd, matrix: BFloatTiles, blocks: list[TiledBlock], rows: _Rows, memory: Value, finish: Finish
) -> None:
    builder = simd.builder
    zero, two = ir.Constant(I64, 0), ir.Constant(I64, 2)
    num_groups = blocks[0].num_groups
    size = simd.times(num_groups, WEIGHT_TILE_BYTES)
    is_once = builder.icmp_signed("<=", rows.num_tiles, two)
    kept = builder.select(is_once, ir.Constant(I64, _RING - 1), ir.Constant(I64, -1))
    starts = [simd.at(memory, builder.select(is_once, zero, simd.times(size, index))) for index in range(len(blocks))]
    scaling = simd.at(memory, simd.times(size, BLOCKS))

    def tile_of(block: int, group: Value) -> Value:
        if not blocks[block].needs_unpacking:
            return simd.at(blocks[block].weights, simd.times(group, WEIGHT_TILE_BYTES))
        return simd.at(starts[block], simd.times(builder.and_(group, kept), WEIGHT_TILE_BYTES))

    def emit_first(count: int) -> None:
        """Unpacks the weights, one block after the other, on the way to the first tiles of rows."""
        matrix.clear(len(blocks) * count)
        for index, block in enumerate(blocks):

            def unpack(group: Value, block: TiledBlock = block, index: int = index) -> None:
                block.fetch_next(simd, group)
                if block.needs_unpacking:
                    at_scaling = simd.at(scaling, simd.times(group, block.scaling_bytes))
                    block.unpack(simd, group, at_scaling, tile_of(index, group))

            def multiply(group: Value, index: int = index) -> None:
                matrix.multiply([tile_of(index, group)], rows.of_group(simd, zero, count, group), index * count)

            with simd.loop(num_groups) as group:
                block.unpack_scaling(simd, group, simd.at(scaling, simd.times(group, block.scaling_bytes)))
            ahead = simd.smaller(num_groups, _GROUPS_AHEAD)
            rest = builder.sub(num_groups, ahead)
            with simd.loop(ahead) as group:
                unpack(group)
            with simd.loop(rest) as group:
                unpack(builder.add(group, ahead))
                multiply(group)
            with simd.loop(ahead) as group:
                multiply(builder.add(rest, group))
        emit_finish(zero, count)

    def emit_later(tile: Value, count: int) -> None:
        matrix.clear(len(blocks) * count)
        with simd.loop(num_groups) as group:
            weights = [tile_of(index, group) for index in range(len(blocks))]
            matrix.multiply(weights, rows.of_group(simd, tile, count, group))
        emit_finish(tile, count)

    def emit_finish(tile: Value, count: int) -> None:
        for number in range(count):
            sums = [index * count + number for index in range(len(blocks))]
            finish(simd, matrix, blocks, builder.add(tile, ir.Constant(I64, number)), sums)

    with builder.if_else(builder.icmp_signed(">=", rows.num_tiles, two)) as (then, otherwise):
        with then:
            emit_first(2)
        with otherwise:
            emit_first(1)
    left = builder.sub(rows.num_tiles, two)
    with builder.if_then(builder.icmp_signed(">", left, zero)):
        with simd.loop(builder.udiv(left, two)) as pair:
            emit_later(builder.add(two, simd.times(pair, 2)), 2)
        with builder.if_then(builder.trunc(left, I1)):
            emit_later(builder.sub(rows.num_tiles, ir.Constant(I64, 1)), 1)


@emitted
def multiply_blocks(
    typing_context: Any,
    layout: Any,
    first_block: Any,
    tiles: Any,
    weights: Any,
    bias: Any,
    out: Any,
    first_output: Any,
    num_outputs: Any,
) -> tuple[Any, Callable[..., Any]]:
    """out[:, first_output + 16 * block ...] of block first_block and the next, where there is one."""
    signature = types.void(layout, types.int64, tiles, weights, bias, out, types.int64, types.int64)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        *arrays, out = (
            EmittedArray(context, builder, kind, argument)
            for kind, argument in zip(signature.args[2:6], arguments[2:6], strict=True)
        )
        start = simd.at(out.pointer, simd.times(arguments[6], 4))

        kept = simd.allocate_lines(ROWS)

        def finish(simd: Simd, matrix: BFloatTiles, blocks: list[TiledBlock], tile: Value, sums: list[int]) -> None:
            first = simd.times(tile, ROWS)
            count = simd.smaller(builder.sub(out.shape[0], first), ROWS)
            corner = simd.at(start, simd.times(first, out.strides[0]))
            is_full = builder.icmp_unsigned("==", count, ir.Constant(I64, ROWS))
            for block, number in zip(blocks, sums, strict=True):
                place = simd.at(corner, simd.times(block.first_output, 4))
                bias = simd.load_f32(block.bias)
                (at_sum,) = matrix.store_sums([number])
                sums_of_outputs = [simd.load_f32(simd.at(at_sum, LINE * output)) for output in range(OUTPUTS)]
                turned = [simd.add(vector, bias) for vector in simd.transpose(sums_of_outputs)]
                with builder.if_else(is_full) as (then, otherwise):
                    with then:
                        for row, vector in enumerate(turned):
                            simd.store_first_f32(vector, simd.at(place, simd.times(out.strides[0], row)), block.mask)
                    with otherwise:
                        for row, vector in enumerate(turned):
                            simd.store(vector, simd.at(kept, LINE * row), LINE)
                        with simd.loop(count) as row:
                            vector = simd.load_f32(simd.at(kept, simd.times(row, LINE)))
                            simd.store_first_f32(vector, simd.at(place, simd.times(row, out.strides[0])), block.mask)

        emit_blocks(simd, LAYOUTS[layout.literal_value], arguments[1], tuple(arrays), arguments[7], finish)
        return context.get_dummy_value()

    return signature, emit


@parallel_kernel
def linear_q4_0_tiles(
    tiles: Tiles, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for pair in parallel_range((weights.shape[0] + 1) // BLOCKS):
        multiply_blocks(Q4_0_TILES, BLOCKS * pair, tiles, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q4_1_tiles(
    tiles: Tiles, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for pair in parallel_range((weights.shape[0] + 1) // BLOCKS):
        multiply_blocks(Q4_1_TILES, BLOCKS * pair, tiles, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q8_0_tiles(
    tiles: Tiles, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for pair in parallel_range((weights.shape[0] + 1) // BLOCKS):
        multiply_blocks(Q8_0_TILES, BLOCKS * pair, tiles, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q5_1_tiles(
    tiles: Tiles, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for pair in parallel_range((weights.shape[0] + 1) // BLOCKS):
        multiply_blocks(Q5_1_TILES, BLOCKS * pair, tiles, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q4_k_tiles(
    tiles: Tiles, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for pair in parallel_range((weights.shape[0] + 1) // BLOCKS):
        multiply_blocks(Q4_K_TILES, BLOCKS * pair, tiles, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q5_k_tiles(
    tiles: Tiles, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for pair in parallel_range((weights.shape[0] + 1) // BLOCKS):
        multiply_blocks(Q5_K_TILES, BLOCKS * pair, tiles, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q6_k_tiles(
    tiles: Tiles, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for pair in parallel_range((weights.shape[0] + 1) // BLOCKS):
        multiply_blocks(Q6_K_TILES, BLOCKS * pair, tiles, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_f16_tiles(
    tiles: Tiles, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for pair in parallel_range((weights.shape[0] + 1) // BLOCKS):
        multiply_blocks(F16_TILES, BLOCKS * pair, tiles, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_bf16_tiles(
    tiles: Tiles, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for pair in parallel_range((weights.shape[0] + 1) // BLOCKS):
        multiply_blocks(BF16_TILES, BLOCKS * pair, tiles, weights, bias, out, first_output, num_outputs)
