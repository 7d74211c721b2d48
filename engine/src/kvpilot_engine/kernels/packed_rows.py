"""Rows of a packed matrix as float32: for an embedding that shares its weights with the head, and for tests.

Each number is what GGUF's definition of the format gives, in the same order of roundings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvpilot_engine.kernels.block_formats import NESTED_COLUMNS, SIMPLE_COLUMNS
from kvpilot_engine.kernels.float_bits import bits_to_float, half_to_float
from kvpilot_engine.kernels.jit import kernel
from kvpilot_engine.kernels.packed_matrix import LAYOUTS, OUTPUTS, PackedMatrix, PackedPart

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def read_rows(matrix: PackedMatrix, row_ids: npt.NDArray[np.int64], out: Floats) -> None:
    """out[i] = the matrix's row row_ids[i], without bias. `out` is [ids, columns], C-contiguous."""
    first_output = 0
    for part in matrix.parts:
        mine = (row_ids >= first_output) & (row_ids < first_output + part.num_outputs)
        if mine.all():
            _read_part(part, row_ids - first_output, out)
            return
        if mine.any():
            rows = np.empty((int(mine.sum()), matrix.num_columns), np.float32)
            _read_part(part, row_ids[mine] - first_output, rows)
            out[mine] = rows
        first_output += part.num_outputs


def _read_part(part: PackedPart, row_ids: npt.NDArray[np.int64], out: Floats) -> None:
    layout = LAYOUTS[part.layout]
    if layout.is_plain:
        _read_plain_rows(part.weights, row_ids, out, layout.bits, layout.name.startswith("f16"), layout.in_tiles)
        return
    num_groups = -(-out.shape[1] // layout.column_step) * layout.column_step // SIMPLE_COLUMNS
    scales = layout.integers_bytes * num_groups
    minima = scales + layout.scales_bytes * num_groups
    factors = minima + layout.scales_bytes * num_groups if layout.has_minimum else minima
    common = (layout.bits, layout.in_tiles, layout.zero_point, layout.has_minimum)
    if layout.is_nested:
        offsets = (scales, minima, factors, factors + layout.factors_bytes * num_groups)
        _read_nested_rows(part.weights, row_ids, out, *common, *offsets)
    else:
        _read_simple_rows(part.weights, row_ids, out, *common, scales, minima)


def compile_reading(layouts: Iterable[int]) -> None:
    """Compiles what reads rows of these layouts, or loads it from numba's cache."""
    common = (types.Array(types.uint8, 2, "C"), types.Array(types.int64, 1, "C"), types.Array(types.float32, 2, "C"))
    integers = (types.int64, types.boolean, types.int64, types.boolean)
    for layout in (LAYOUTS[index] for index in layouts):
        reader: Any
        others: tuple[Any, ...]
        if layout.is_plain:
            reader, others = _read_plain_rows, (types.int64, types.boolean, types.boolean)
        elif layout.is_nested:
            reader, others = _read_nested_rows, (*integers, *[types.int64] * 4)
        else:
            reader, others = _read_simple_rows, (*integers, *[types.int64] * 2)
        reader.compile((*common, *others))


@kernel
def _read_plain_rows(
    weights: Bytes, row_ids: npt.NDArray[np.int64], out: Floats, bits: int, is_half: bool, in_tiles: bool
) -> None:
    for index in range(row_ids.shape[0]):
        block, lane = weights[row_ids[index] // OUTPUTS], row_ids[index] % OUTPUTS
        if bits == 32:
            numbers = block.view(np.float32)
            for column in range(out.shape[1]):
                out[index, column] = numbers[column * OUTPUTS + lane]
            continue
        halves = block.view(np.uint16)
        for column in range(out.shape[1]):
            place = column * OUTPUTS + lane
            if in_tiles:
                place = (column // SIMPLE_COLUMNS * OUTPUTS + lane) * SIMPLE_COLUMNS + column % SIMPLE_COLUMNS
            if is_half:
                out[index, column] = half_to_float(halves[place])
            else:
                out[index, column] = bits_to_float(np.int32(np.uint32(halves[place]) << np.uint32(16)))


@kernel
def _read_simple_rows(
    weights: Bytes,
    row_ids: npt.NDArray[np.int64],
    out: Floats,
    bits: int,
    in_tiles: bool,
    zero_point: int,
    has_minimum: bool,
    scales: int,
    minima: int,
) -> None:
    """The last two are the planes' offsets in a block."""
    for index in range(row_ids.shape[0]):
        block, lane = weights[row_ids[index] // OUTPUTS], row_ids[index] % OUTPUTS
        for group in range((out.shape[1] + SIMPLE_COLUMNS - 1) // SIMPLE_COLUMNS):
            place = (group * OUTPUTS + lane) * 2
            scale = _half_at(block, scales + place)
            minimum = _half_at(block, minima + place) if has_minimum else np.float32(0)
            for column in range(group * SIMPLE_COLUMNS, min((group + 1) * SIMPLE_COLUMNS, out.shape[1])):
                value = scale * np.float32(_integer_at(block, lane, column, bits, in_tiles) - zero_point)
                out[index, column] = value + minimum if has_minimum else value


@kernel
def _read_nested_rows(
    weights: Bytes,
    row_ids: npt.NDArray[np.int64],
    out: Floats,
    bits: int,
    in_tiles: bool,
    zero_point: int,
    has_minimum: bool,
    scales: int,
    minima: int,
    factors: int,
    minimum_factors: int,
) -> None:
    """The last four are the planes' offsets in a block. Without minima, factors are signed and for 16 columns."""
    run = SIMPLE_COLUMNS if has_minimum else SIMPLE_COLUMNS // 2
    for index in range(row_ids.shape[0]):
        block, lane = weights[row_ids[index] // OUTPUTS], row_ids[index] % OUTPUTS
        for first in range(0, out.shape[1], run):
            place = (first // NESTED_COLUMNS * OUTPUTS + lane) * 2
            factor_place = first // run * OUTPUTS + lane
            factor = block[factors + factor_place]
            scale = _half_at(block, scales + place) * np.float32(factor if has_minimum else np.int8(factor))
            minimum = np.float32(0)
            if has_minimum:
                minimum = _half_at(block, minima + place) * np.float32(block[minimum_factors + factor_place])
            for column in range(first, first + run):
                value = scale * np.float32(_integer_at(block, lane, column, bits, in_tiles) - zero_point)
                out[index, column] = value - minimum if has_minimum else value


@kernel
def _integer_at(block: Bytes, lane: int, column: int, bits: int, in_tiles: bool) -> int:
    group, within = column // SIMPLE_COLUMNS, column % SIMPLE_COLUMNS
    if in_tiles:
        if bits == 8:
            return int(block[(group * OUTPUTS + lane) * SIMPLE_COLUMNS + within])
        byte = int(block[((group * 4 + lane // 4) * SIMPLE_COLUMNS + within) * 2 + lane % 4 // 2])
        return byte >> 4 if lane % 2 else byte & 15
    quad, place = within // 4, within % 4
    if bits == 8:
        return int(block[group * 512 + quad * 64 + lane * 4 + place])
    byte = int(block[group * 256 + quad % 4 * 64 + lane * 4 + place])
    return byte >> 4 if quad >= 4 else byte & 15


@kernel
def _half_at(block: Bytes, offset: int) -> float:
    value: float = half_to_float(block[offset : offset + 2].view(np.uint16)[0])
    return value
