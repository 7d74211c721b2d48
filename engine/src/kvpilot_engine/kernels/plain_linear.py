"""Linears on plain weights: F16, BF16 or F32 times float32 activations, summed in float32.

Two sums a row, of even and of odd columns, so that one addition need not wait for the one before; they are joined at
the end. As in quantized_linear.py the order is the same for a tile of any number of rows.
"""

# ruff: noqa: ARG001 - numba names arguments that only the emitted code reads
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from kvpilot_engine.kernels.cpu_features import dot_path
from kvpilot_engine.kernels.jit import emitted, parallel_kernel, parallel_range
from kvpilot_engine.kernels.packed_matrix import BF16, F16, F32, LAYOUTS, OUTPUTS
from kvpilot_engine.kernels.quantized_linear import tile_sizes
from kvpilot_engine.kernels.simd import I64, EmittedArray, Simd, Value

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHAINS = 2
_LOADS: dict[str, Callable[[Simd, Value], Value]] = {
    "f16": Simd.load_f16,
    "bf16": Simd.load_bf16,
    "f32": Simd.load_f32,
}


@emitted
def multiply_plain_block(
    typing_context: Any,
    layout: Any,
    block: Any,
    rows: Any,
    weights: Any,
    bias: Any,
    out: Any,
    first_output: Any,
    num_outputs: Any,
) -> tuple[Any, Callable[..., Any]]:
    """out[:, first_output + 16 * block ...] of one block, all rows."""
    signature = types.void(layout, types.int64, rows, weights, bias, out, types.int64, types.int64)
    packed_layout = LAYOUTS[layout.literal_value]
    load, size_bytes = _LOADS[packed_layout.name], OUTPUTS * packed_layout.bits // 8

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        _, block, *_, first_output, num_outputs = arguments
        rows, weights, bias, out = (
            EmittedArray(context, builder, kind, argument)
            for kind, argument in zip(signature.args[2:6], arguments[2:6], strict=True)
        )
        before = simd.times(block, OUTPUTS)
        start = simd.at(weights.pointer, simd.times(block, weights.strides[0]))
        its_bias = simd.load_f32(simd.at(bias.pointer, simd.times(before, 4)))
        mask = simd.first_lanes(builder.sub(num_outputs, before))
        column = simd.at(out.pointer, simd.times(builder.add(first_output, before), 4))
        num_rows, num_columns = rows.shape

        def emit_tile(row_numbers: list[Value]) -> None:
            inputs = [simd.at(rows.pointer, simd.times(row, rows.strides[0])) for row in row_numbers]
            totals = [[simd.variable(its_bias), simd.variable(simd.splat_f32(0.0))] for _ in row_numbers]

            def add_column(index: Value, chain: int) -> None:
                weight = load(simd, simd.at(start, simd.times(index, size_bytes)))
                for address, sums in zip(inputs, totals, strict=True):
                    activation = simd.broadcast_f32(simd.at(address, simd.times(index, 4)))
                    simd.put(sums[chain], simd.fma(activation, weight, simd.get(sums[chain])))

            with simd.loop(builder.lshr(num_columns, ir.Constant(I64, 1))) as pair:
                for chain in range(_CHAINS):
                    add_column(builder.add(simd.times(pair, _CHAINS), ir.Constant(I64, chain)), chain)
            with simd.loop(builder.and_(num_columns, ir.Constant(I64, 1))):
                add_column(builder.sub(num_columns, ir.Constant(I64, 1)), 0)
            for row, (even, odd) in zip(row_numbers, totals, strict=True):
                place = simd.at(column, simd.times(row, out.strides[0]))
                simd.store_first_f32(simd.add(simd.get(even), simd.get(odd)), place, mask)

        first_row: Value = ir.Constant(I64, 0)
        for size in tile_sizes(dot_path()):
            num_tiles = builder.sdiv(builder.sub(num_rows, first_row), ir.Constant(I64, size))
            with simd.loop(num_tiles) as tile:
                row = builder.add(first_row, simd.times(tile, size))
                emit_tile([builder.add(row, ir.Constant(I64, index)) for index in range(size)])
            first_row = builder.add(first_row, simd.times(num_tiles, size))
        return context.get_dummy_value()

    return signature, emit


@parallel_kernel
def linear_f16(rows: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_plain_block(F16, block, rows, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_bf16(rows: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_plain_block(BF16, block, rows, weights, bias, out, first_output, num_outputs)


@parallel_kernel
def linear_f32(rows: Floats, weights: Bytes, bias: Floats, out: Floats, first_output: int, num_outputs: int) -> None:
    for block in parallel_range(weights.shape[0]):
        multiply_plain_block(F32, block, rows, weights, bias, out, first_output, num_outputs)
