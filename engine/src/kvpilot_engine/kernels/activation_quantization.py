"""Activations as signed bytes with a scale for each row and 32 columns: what the integer linears multiply.

Each row is done by itself in a fixed order, so a row's result never depends on its neighbours or their number. A row
with a NaN or an infinity stays recognizable: the scale of that group becomes NaN or infinite, and so does the output.
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

from kvpilot_engine.kernels.jit import emitted, kernel, parallel_kernel, parallel_range
from kvpilot_engine.kernels.simd import F32, LANES, EmittedArray, Simd

GROUP = 32
"""Columns that share a scale."""

SCALE, SCALED_SUM, MINUS_128_SUM, MINUS_128_FIRST_SUM = range(4)
"""The four words that go with a group: its scale; scale times the sum of its bytes; and as int32, the sum of its bytes
times -128, and that of the first sixteen. The last three save the linears from adding up again for each block of
outputs: for minima, and for weights whose bytes are biased by 128."""

ROWS_ALONE = 4
"""So many rows are done sooner than a second thread is woken."""

_SMALLEST = np.float32(1e-30)
"""Groups below count as zeros: the reciprocal of their scale would overflow."""
_ONE_127TH = np.float32(1 / 127)
_ALL_BUT_SIGN = np.int32(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Buffers for rows of activations."""

    values: npt.NDArray[np.int8]
    """[rows, columns, filled up with zeros to a multiple of 32]"""
    groups: npt.NDArray[np.float32]
    """[rows, groups, 4]: the words above"""

    @classmethod
    def allocate(cls, num_rows: int, num_columns: int) -> Self:
        num_groups = -(-num_columns // GROUP)
        return cls(np.zeros((num_rows, num_groups * GROUP), np.int8), np.zeros((num_rows, num_groups, 4), np.float32))

    def first(self, num_rows: int) -> QuantizedRows:
        """The first rows; shares the memory."""
        return QuantizedRows(self.values[:num_rows], self.groups[:num_rows])

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes + self.groups.nbytes


@emitted
def _quantize_whole_group(
    typing_context: Any, row: Any, values: Any, groups: Any, group: Any
) -> tuple[Any, Callable[..., Any]]:
    """Thirty-two columns at once; a plain loop takes ten times as long, as LLVM makes no vectors of its sums."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        simd = Simd(builder)
        row, values, groups = (
            EmittedArray(context, builder, kind, argument).pointer
            for kind, argument in zip(signature.args[:3], arguments[:3], strict=True)
        )
        start = simd.at(row, simd.times(arguments[3], 4 * GROUP))
        halves = [simd.load_f32(simd.at(start, 4 * LANES * half)) for half in range(2)]
        highest = simd.max_i32(simd.maximum_i32(*(simd.magnitude_bits(half) for half in halves)))
        magnitude = builder.bitcast(highest, F32)
        is_small = builder.fcmp_ordered("<", magnitude, ir.Constant(F32, _SMALLEST))
        inverse = builder.select(is_small, ir.Constant(F32, 0.0), builder.fdiv(ir.Constant(F32, 127.0), magnitude))
        rounded = [simd.to_i32(simd.round(simd.mul(half, simd.splat(inverse)))) for half in halves]
        place = simd.at(values, simd.times(arguments[3], GROUP))
        for half, integers in enumerate(rounded):
            simd.store_s8(integers, simd.at(place, LANES * half))
        first_sum = simd.sum_i32(rounded[0])
        total = builder.add(first_sum, simd.sum_i32(rounded[1]))
        scale = builder.fmul(magnitude, ir.Constant(F32, _ONE_127TH))
        words = {
            SCALE: scale,
            SCALED_SUM: builder.fmul(scale, builder.sitofp(total, F32)),
            MINUS_128_SUM: simd.times(total, -128),
            MINUS_128_FIRST_SUM: simd.times(first_sum, -128),
        }
        at_words = simd.at(groups, simd.times(arguments[3], 4 * len(words)))
        for word, value in words.items():
            simd.store(value, simd.at(at_words, 4 * word), 4)
        return context.get_dummy_value()

    return types.void(row, values, groups, types.int64), emit


@kernel
def _quantize_part_of_group(
    row: npt.NDArray[np.float32], values: npt.NDArray[np.int8], groups: npt.NDArray[np.float32], group: int
) -> None:
    """The last columns of a row whose length 32 does not divide; the same arithmetic."""
    words = groups[group]
    words_as_int = words.view(np.int32)
    bits = row.view(np.int32)
    start = group * GROUP
    highest = np.int32(0)
    for column in range(start, row.shape[0]):
        highest = max(highest, bits[column] & _ALL_BUT_SIGN)
    words_as_int[SCALE] = highest
    magnitude = words[SCALE]
    inverse = np.float32(0) if magnitude < _SMALLEST else np.float32(127) / magnitude
    first_sum, total = np.int32(0), np.int32(0)
    for column in range(start, row.shape[0]):
        value = np.int8(np.rint(row[column] * inverse))
        values[column] = value
        total += np.int32(value)
        if column < start + 16:
            first_sum += np.int32(value)
    scale = magnitude * _ONE_127TH
    words[SCALE] = scale
    words[SCALED_SUM] = scale * np.float32(total)
    words_as_int[MINUS_128_SUM] = -128 * total
    words_as_int[MINUS_128_FIRST_SUM] = -128 * first_sum


@kernel
def quantize_row(row: npt.NDArray[np.float32], values: npt.NDArray[np.int8], groups: npt.NDArray[np.float32]) -> None:
    """One row; the columns that fill it up are left alone, they are zero from the start."""
    num_whole = row.shape[0] // GROUP
    for group in range(num_whole):
        _quantize_whole_group(row, values, groups, group)
    if num_whole * GROUP < row.shape[0]:
        _quantize_part_of_group(row, values, groups, num_whole)


@parallel_kernel
def quantize_rows(rows: npt.NDArray[np.float32], values: npt.NDArray[np.int8], groups: npt.NDArray[np.float32]) -> None:
    if rows.shape[0] <= ROWS_ALONE:
        for row in range(rows.shape[0]):
            quantize_row(rows[row], values[row], groups[row])
        return
    for row in parallel_range(rows.shape[0]):
        quantize_row(rows[row], values[row], groups[row])
