"""Linears on packed integer weights: a block of sixteen outputs against tiles of rows, blocks spread over the threads.

For each group of 32 columns the products of bytes are summed as integers; the sum is scaled by the weights' and the
activations' scales and added to the output in float32, groups in ascending order. That order is the same for a tile of
one row and of eight, so a row's result is the same bits whatever stands beside it; a tile only saves reading and
unpacking the weights again.
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

from kvpilot_engine.kernels.activation_quantization import (
    GROUP,
    MINUS_128_FIRST_SUM,
    MINUS_128_SUM,
    SCALE,
    SCALED_SUM,
)
from kvpilot_engine.kernels.block_formats import NESTED_COLUMNS
from kvpilot_engine.kernels.cpu_features import DotPath, dot_path
from kvpilot_engine.kernels.integer_dot import IntegerDot, integer_dot
from kvpilot_engine.kernels.jit import emitted, parallel_kernel, parallel_range
from kvpilot_engine.kernels.packed_matrix import (
    LAYOUTS,
    OUTPUTS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    PackedLayout,
)
from kvpilot_engine.kernels.simd import F32X16, I32X16, I64, EmittedArray, Simd, Value

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Values = npt.NDArray[np.int8]

QUADS = GROUP // 4
"""Vectors of a group: each holds four columns of sixteen outputs."""

_VECTOR_BYTES = 64
_GROUP_WORDS_BYTES = 16
_GROUPS_PER_SUPERBLOCK = NESTED_COLUMNS // GROUP


def tile_sizes(path: DotPath) -> tuple[int, ...]:
    """Rows of a tile, largest first. A tile's sums must fit in the registers: 32 of 64 bytes, or 16 of 32."""
    return (8, 4, 2, 1) if path is DotPath.AVX512_VNNI else (4, 2, 1)


@dataclass(frozen=True, slots=True)
class _Block:
    """Where one block of outputs finds everything."""

    layout: PackedLayout
    weights: Value
    bias: Value
    mask: Value
    num_groups: Value

    def plane(self, simd: Simd, bytes_before: int) -> Value:
        """A plane's address, by what the planes before it need for each group."""
        return simd.at(self.weights, simd.times(self.num_groups, bytes_before))


@dataclass(frozen=True, slots=True)
class _Scaling:
    """Of one group's weights: factors of integer sums and of activation sums, for sixteen outputs."""

    scales: tuple[Value, ...]
    """One, or one for each half of the group."""
    minima: Value | None


@emitted
def multiply_block(
    typing_context: Any,
    layout: Any,
    block: Any,
    values: Any,
    groups: Any,
    weights: Any,
    bias: Any,
    out: Any,
    first_output: Any,
    num_outputs: Any,
) -> tuple[Any, Callable[..., Any]]:
    """out[:, first_output + 16 * block ...] of one block, all rows."""
    signature = types.void(layout, types.int64, values, groups, weights, bias, out, types.int64, types.int64)
    packed_layout = LAYOUTS[layout.literal_value]

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        _, block, *_, first_output, num_outputs = arguments
        values, groups, weights, bias, out = (
            EmittedArray(context, builder, kind, argument)
            for kind, argument in zip(signature.args[2:7], arguments[2:7], strict=True)
        )
        before = simd.times(block, OUTPUTS)
        place = _Block(
            packed_layout,
            simd.at(weights.pointer, simd.times(block, weights.strides[0])),
            simd.at(bias.pointer, simd.times(before, 4)),
            simd.first_lanes(builder.sub(num_outputs, before)),
            groups.shape[1],
        )
        column = simd.at(out.pointer, simd.times(builder.add(first_output, before), 4))
        num_rows = values.shape[0]
        first_row: Value = ir.Constant(I64, 0)
        for size in tile_sizes(dot_path()):
            left = builder.sub(num_rows, first_row)
            num_tiles = builder.sdiv(left, ir.Constant(I64, size))
            with simd.loop(num_tiles) as tile:
                row = builder.add(first_row, simd.times(tile, size))
                rows = [builder.add(row, ir.Constant(I64, index)) for index in range(size)]
                _emit_tile(
                    simd,
                    place,
                    [simd.at(values.pointer, simd.times(row, values.strides[0])) for row in rows],
                    [simd.at(groups.pointer, simd.times(row, groups.strides[0])) for row in rows],
                    [simd.at(column, simd.times(row, out.strides[0])) for row in rows],
                )
            first_row = builder.add(first_row, simd.times(num_tiles, size))
        return context.get_dummy_value()

    return signature, emit


def _emit_tile(simd: Simd, block: _Block, values: list[Value], groups: list[Value], out: list[Value]) -> None:
    """Some rows against a block; the three lists hold an address for each row."""
    dot = integer_dot(dot_path())
    bias = simd.load_f32(block.bias)
    totals = [simd.variable(bias) for _ in values]
    with simd.loop(block.num_groups) as group:
        weights = _load_weights(simd, dot, block, group)
        scaling = _load_scaling(simd, block, group)
        columns = simd.times(group, GROUP)
        words = [simd.at(row, simd.times(group, _GROUP_WORDS_BYTES)) for row in groups]
        sums = [_start_sums(simd, dot, block.layout, its_words) for its_words in words]
        activations = [simd.at(row, columns) for row in values]
        for quad in range(QUADS):
            half = quad * len(scaling.scales) // QUADS
            for row, its_sums in zip(activations, sums, strict=True):
                add = dot.add_biased if block.layout.bits == 8 and block.layout.zero_point else dot.add_small
                four_columns = simd.broadcast_i32(simd.at(row, 4 * quad))
                its_sums[half] = add(simd, its_sums[half], weights[quad], four_columns)
        for total, its_words, its_sums in zip(totals, words, sums, strict=True):
            _add_group(simd, total, its_words, its_sums, scaling)
    for total, place in zip(totals, out, strict=True):
        simd.store_first_f32(simd.get(total), place, block.mask)


def _load_weights(simd: Simd, dot: IntegerDot, block: _Block, group: Value) -> list[Value]:
    """The bytes of one group: eight vectors of four columns."""
    layout = block.layout
    start = simd.at(block.weights, simd.times(group, layout.integers_bytes))
    count = layout.integers_bytes // _VECTOR_BYTES
    stored = [simd.load(simd.at(start, _VECTOR_BYTES * index), I32X16, _VECTOR_BYTES) for index in range(count)]
    if layout.bits == 8:
        return [dot.prepare_biased(simd, vector) for vector in stored] if layout.zero_point else stored
    low_halves = simd.splat_i32(0x0F0F0F0F)
    lower = [simd.builder.and_(vector, low_halves) for vector in stored]
    upper = [simd.builder.and_(simd.builder.lshr(vector, simd.splat_i32(4)), low_halves) for vector in stored]
    return lower + upper


def _load_scaling(simd: Simd, block: _Block, group: Value) -> _Scaling:
    layout = block.layout
    num_scale_planes = 2 if layout.has_minimum else 1
    superblock = group
    if layout.is_nested:
        superblock = simd.builder.lshr(group, ir.Constant(I64, _GROUPS_PER_SUPERBLOCK.bit_length() - 1))

    def halves(plane: int) -> Value:
        """Scales or minima as stored in half precision."""
        start = block.plane(simd, layout.integers_bytes + plane * layout.scales_bytes)
        return simd.load_f16(simd.at(start, simd.times(superblock, 2 * OUTPUTS)))

    def factor_place(plane: int) -> Value:
        before = layout.integers_bytes + num_scale_planes * layout.scales_bytes + plane * layout.factors_bytes
        return simd.at(block.plane(simd, before), simd.times(group, layout.factors_bytes))

    scale = halves(0)
    if not layout.is_nested:
        if layout.has_minimum:
            return _Scaling((scale,), halves(1))
        if layout.bits == 4:
            return _Scaling((scale,), simd.mul(scale, simd.splat_f32(-layout.zero_point)))
        return _Scaling((scale,), None)
    if not layout.has_minimum:
        factors = [simd.load_s8(simd.at(factor_place(0), OUTPUTS * half)) for half in range(2)]
        return _Scaling(tuple(simd.mul(scale, factor) for factor in factors), None)
    minima = simd.mul(halves(1), simd.load_u8(factor_place(1)))
    return _Scaling((simd.mul(scale, simd.load_u8(factor_place(0))),), simd.builder.fneg(minima))


def _start_sums(simd: Simd, dot: IntegerDot, layout: PackedLayout, words: Value) -> list[Value]:
    """What the integer sums of a row and group start with: one, or one for each half."""
    if not (layout.bits == 8 and layout.zero_point):
        return [simd.splat_i32(0)]
    whole = simd.broadcast_i32(simd.at(words, 4 * MINUS_128_SUM))
    if layout.columns_per_factor == GROUP:
        return [dot.start_biased(simd, whole)]
    first = simd.broadcast_i32(simd.at(words, 4 * MINUS_128_FIRST_SUM))
    return [dot.start_biased(simd, first), dot.start_biased(simd, simd.builder.sub(whole, first))]


def _add_group(simd: Simd, total: Value, words: Value, sums: list[Value], scaling: _Scaling) -> None:
    activation_scale = simd.broadcast_f32(simd.at(words, 4 * SCALE))
    value = simd.get(total, F32X16)
    for integers, scales in zip(sums, scaling.scales, strict=True):
        value = simd.fma(simd.to_f32(integers), simd.mul(scales, activation_scale), value)
    if scaling.minima is not None:
        value = simd.fma(scaling.minima, simd.broadcast_f32(simd.at(words, 4 * SCALED_SUM)), value)
    simd.put(total, value)


@parallel_kernel
def linear_q4_0(
    values: Values, groups: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_block(Q4_0, block, values, groups, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q4_1(
    values: Values, groups: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_block(Q4_1, block, values, groups, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q8_0(
    values: Values, groups: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_block(Q8_0, block, values, groups, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q5_1(
    values: Values, groups: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_block(Q5_1, block, values, groups, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q4_k(
    values: Values, groups: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_block(Q4_K, block, values, groups, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q5_k(
    values: Values, groups: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_block(Q5_K, block, values, groups, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_q6_k(
    values: Values, groups: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int
) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_block(Q6_K, block, values, groups, weights, bias, out, first_output, num_outputs)
