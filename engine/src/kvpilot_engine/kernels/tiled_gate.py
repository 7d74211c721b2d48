"""The MLP's first half in one: gate and up of tiled rows, activation(gate) * up, and that as tiles for the next linear.

A matrix's blocks of sixteen outputs are gate and up in turn. What a pair of them gives are sixteen columns of the next
linear's rows; they lie as its tiles want them, so nothing is turned round and no float32 row is ever written.
"""

# ruff: noqa: ARG001 - numba names arguments that only the emitted code reads
from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from kvpilot_engine.kernels.bfloat_tiles import COLUMNS, BFloatTiles
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
from kvpilot_engine.kernels.simd import F32X16, I1, I16, I32, I32X16, I64, LINE, EmittedArray, Simd, Value
from kvpilot_engine.kernels.tiled_linear import BLOCKS, emit_blocks
from kvpilot_engine.kernels.tiled_weights import HALF_OF_LAST_BIT, TiledBlock

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Tiles = npt.NDArray[np.uint16]

_GELU_INNER, _GELU_CUBE = 2 * sqrt(2 / pi), 0.044715
_LOG2_E = 1.4426950408889634
_POWER_COEFFICIENTS = (0.0096663685, 0.0559219758, 0.2402234904, 0.6931210452, 1.0)
"""Of 2**r for |r| <= 0.5, highest power first: interpolated in Chebyshev's points, error 4e-6."""
_CURRENT_ROUNDING = 4
_PAIRS = OUTPUTS // 2
_UPPER_HALF = -0x10000


@emitted
def multiply_gated_blocks(
    typing_context: Any, layout: Any, pair: Any, tiles: Any, weights: Any, bias: Any, is_gelu: Any, out: Any
) -> tuple[Any, Callable[..., Any]]:
    """Columns 16 * pair … of `out`, tiles as the next linear reads them; is_gelu: Gemma's activation, else SiLU."""
    signature = types.void(layout, types.int64, tiles, weights, bias, types.boolean, out)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        tiles, weights, bias, out = (
            EmittedArray(context, builder, signature.args[place], arguments[place]) for place in (2, 3, 4, 6)
        )
        pair = arguments[1]
        is_gelu = builder.trunc(arguments[5], I1) if arguments[5].type != I1 else arguments[5]
        width = builder.udiv(out.shape[2], ir.Constant(I64, COLUMNS))
        pair_bytes = simd.times(width, 4)
        lanes = simd.first_lanes(width)
        in_group = simd.times(builder.and_(pair, ir.Constant(I64, 1)), _PAIRS)
        group = simd.times(builder.lshr(pair, ir.Constant(I64, 1)), out.strides[1])
        start = simd.at(simd.at(out.pointer, group), simd.times(in_group, pair_bytes))

        def finish(simd: Simd, matrix: BFloatTiles, blocks: list[TiledBlock], tile: Value, sums: list[int]) -> None:
            if len(blocks) < BLOCKS:
                return  # never run: gate and up come in pairs
            at_sums = matrix.store_sums(sums)
            at_biases = [block.bias for block in blocks]
            place = simd.at(start, simd.times(tile, out.strides[0]))
            with simd.loop(ir.Constant(I64, _PAIRS)) as number:
                bits = []
                for output in range(2):
                    index = builder.add(simd.times(number, 2), ir.Constant(I64, output))
                    gate, up = (
                        simd.add(
                            simd.load_f32(simd.at(at_sum, simd.times(index, LINE))),
                            simd.broadcast_f32(simd.at(at_bias, simd.times(index, 4))),
                        )
                        for at_sum, at_bias in zip(at_sums, at_biases, strict=True)
                    )
                    product = builder.bitcast(_activate(simd, gate, up, is_gelu), I32X16)
                    bits.append(builder.add(product, simd.splat_i32(HALF_OF_LAST_BIT)))
                low = builder.lshr(bits[0], simd.splat_i32(16))
                joined = builder.or_(low, builder.and_(bits[1], simd.splat_i32(_UPPER_HALF)))
                target = simd.at(place, simd.times(pair_bytes, number))
                arguments = [joined, target, ir.Constant(I32, 4), lanes]
                simd.call("llvm.masked.store.v16i32.p0", ir.VoidType(), arguments)

        all_outputs = simd.times(weights.shape[0], OUTPUTS)
        first_block = simd.times(pair, BLOCKS)
        emit_blocks(simd, LAYOUTS[layout.literal_value], first_block, (tiles, weights, bias), all_outputs, finish)
        return context.get_dummy_value()

    return signature, emit


def _activate(simd: Simd, gate: Value, up: Value, is_gelu: Value) -> Value:
    """gate / (1 + exp(-inner)) * up, where inner is gate (SiLU) or what makes it half of GELU's 1 + tanh."""
    cube = simd.mul(simd.mul(gate, gate), simd.mul(gate, simd.splat_f32(_GELU_CUBE)))
    gelu = simd.mul(simd.add(gate, cube), simd.splat_f32(_GELU_INNER))
    inner = simd.builder.select(is_gelu, gelu, gate)
    below = simd.add(simd.splat_f32(1.0), _power_of_two(simd, simd.mul(inner, simd.splat_f32(-_LOG2_E))))
    return simd.mul(simd.mul(gate, _reciprocal(simd, below)), up)


def _power_of_two(simd: Simd, value: Value) -> Value:
    """2**value within 2**-17, all that bfloat16 can show of it; saturates at 0 and infinity."""
    whole = simd.round(value)
    rest = simd.sub(value, whole)
    series = simd.splat_f32(_POWER_COEFFICIENTS[0])
    for coefficient in _POWER_COEFFICIENTS[1:]:
        series = simd.fma(series, rest, simd.splat_f32(coefficient))
    arguments = [series, whole, series, ir.Constant(I16, -1), ir.Constant(I32, _CURRENT_ROUNDING)]
    return simd.call("llvm.x86.avx512.mask.scalef.ps.512", F32X16, arguments)


def _reciprocal(simd: Simd, value: Value) -> Value:
    """1 / value within 2**-14; a division would take longer than everything else here."""
    return simd.call("llvm.x86.avx512.rcp14.ps.512", F32X16, [value, value, ir.Constant(I16, -1)])


@parallel_kernel
def gate_q4_0_tiles(tiles: Tiles, weights: Bytes, bias: Floats, is_gelu: bool, out: Tiles) -> None:
    for pair in parallel_range(weights.shape[0] // BLOCKS):
        multiply_gated_blocks(Q4_0_TILES, pair, tiles, weights, bias, is_gelu, out)


@parallel_kernel
def gate_q4_1_tiles(tiles: Tiles, weights: Bytes, bias: Floats, is_gelu: bool, out: Tiles) -> None:
    for pair in parallel_range(weights.shape[0] // BLOCKS):
        multiply_gated_blocks(Q4_1_TILES, pair, tiles, weights, bias, is_gelu, out)


@parallel_kernel
def gate_q8_0_tiles(tiles: Tiles, weights: Bytes, bias: Floats, is_gelu: bool, out: Tiles) -> None:
    for pair in parallel_range(weights.shape[0] // BLOCKS):
        multiply_gated_blocks(Q8_0_TILES, pair, tiles, weights, bias, is_gelu, out)


@parallel_kernel
def gate_q5_1_tiles(tiles: Tiles, weights: Bytes, bias: Floats, is_gelu: bool, out: Tiles) -> None:
    for pair in parallel_range(weights.shape[0] // BLOCKS):
        multiply_gated_blocks(Q5_1_TILES, pair, tiles, weights, bias, is_gelu, out)


@parallel_kernel
def gate_q4_k_tiles(tiles: Tiles, weights: Bytes, bias: Floats, is_gelu: bool, out: Tiles) -> None:
    for pair in parallel_range(weights.shape[0] // BLOCKS):
        multiply_gated_blocks(Q4_K_TILES, pair, tiles, weights, bias, is_gelu, out)


@parallel_kernel
def gate_q5_k_tiles(tiles: Tiles, weights: Bytes, bias: Floats, is_gelu: bool, out: Tiles) -> None:
    for pair in parallel_range(weights.shape[0] // BLOCKS):
        multiply_gated_blocks(Q5_K_TILES, pair, tiles, weights, bias, is_gelu, out)


@parallel_kernel
def gate_q6_k_tiles(tiles: Tiles, weights: Bytes, bias: Floats, is_gelu: bool, out: Tiles) -> None:
    for pair in parallel_range(weights.shape[0] // BLOCKS):
        multiply_gated_blocks(Q6_K_TILES, pair, tiles, weights, bias, is_gelu, out)


@parallel_kernel
def gate_f16_tiles(tiles: Tiles, weights: Bytes, bias: Floats, is_gelu: bool, out: Tiles) -> None:
    for pair in parallel_range(weights.shape[0] // BLOCKS):
        multiply_gated_blocks(F16_TILES, pair, tiles, weights, bias, is_gelu, out)


@parallel_kernel
def gate_bf16_tiles(tiles: Tiles, weights: Bytes, bias: Floats, is_gelu: bool, out: Tiles) -> None:
    for pair in parallel_range(weights.shape[0] // BLOCKS):
        multiply_gated_blocks(BF16_TILES, pair, tiles, weights, bias, is_gelu, out)
