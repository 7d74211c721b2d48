"""Weight matrices laid out for the linear kernels: sixteen outputs side by side, exact in every bit.

A matrix is cut into blocks of sixteen outputs. A block holds one plane after the other, each with all of the block's
columns, so that a kernel reads a few streams from front to back:

    integers           [groups of 32 columns, 8, 16 outputs, 4 columns] bytes; with four bits, quad q of a group shares
                       its byte with quad q + 4, which has the upper half
        in tiles       [groups, 16 outputs, 32 columns] bytes; with four bits [groups, 4, 32 columns] words of the
                       integers of four outputs, the first lowest
    scales, minima     half precision, [groups or superblocks, 16 outputs]
    factors            [groups or half groups, 16 outputs] bytes, only in nested formats; then those of the minima
    numbers            [columns, 16 outputs] of F16, BF16 or F32, instead of all of the above
        in tiles       [groups, 16 outputs, 32 columns]

Outputs are filled up to sixteen with zeros. Several matrices on the same input (q, k and v) become one when they are
stored alike; a PackedMatrix otherwise holds them as parts. Knows no model; reading files is the models' part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.kernels.block_formats import (
    BLOCK_FORMATS,
    NESTED_COLUMNS,
    SIMPLE_COLUMNS,
    BlockParts,
    Bytes,
    quantize_to_q8_0,
    split_blocks,
)
from kvpilot_engine.kernels.weight_memory import WeightMemory, aligned_zeros

Number = TypeVar("Number", bound=np.generic)

OUTPUTS = 16
"""Of a block: one vector."""

_ALIGNMENT = 64
_ROWS_AT_ONCE = 1024
"""Rows taken apart together: bounds what packing needs beside the matrix itself."""

_PLAIN_TYPES: dict[str, type[np.generic]] = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """How the blocks of a part are made; one kernel each (quantized_linear.py, plain_linear.py)."""

    name: str
    bits: int
    """Of a weight: 4 and 8 are integers, 16 and 32 plain numbers."""
    zero_point: int = 0
    """The integer that means zero."""
    has_minimum: bool = False
    is_nested: bool = False
    columns_per_factor: int = SIMPLE_COLUMNS
    """In nested formats, 32 or 16."""
    in_tiles: bool = False
    """The integers or numbers of a group lie output by output."""

    @property
    def is_plain(self) -> bool:
        return self.bits > 8

    @property
    def column_step(self) -> int:
        """Columns are filled up to a multiple of this."""
        if self.is_plain and not self.in_tiles:
            return 1
        return NESTED_COLUMNS if self.is_nested else SIMPLE_COLUMNS

    @property
    def integers_bytes(self) -> int:
        """Of the integers, for each group of 32 columns; so the others."""
        return OUTPUTS * SIMPLE_COLUMNS * self.bits // 8

    @property
    def scales_bytes(self) -> int:
        return OUTPUTS * 2 * SIMPLE_COLUMNS // self.column_step

    @property
    def factors_bytes(self) -> int:
        return OUTPUTS * SIMPLE_COLUMNS // self.columns_per_factor if self.is_nested else 0

    @property
    def group_bytes(self) -> int:
        """Of everything."""
        if self.is_plain:
            return self.integers_bytes
        return self.integers_bytes + (self.scales_bytes + self.factors_bytes) * (2 if self.has_minimum else 1)

    def block_bytes(self, num_columns: int) -> int:
        """From one block to the next, for filled-up columns."""
        size = self.group_bytes * num_columns // SIMPLE_COLUMNS
        return -(-size // _ALIGNMENT) * _ALIGNMENT


_IN_LANES: tuple[PackedLayout, ...] = (
    PackedLayout(name="q4_0", bits=4, zero_point=8),
    PackedLayout(name="q4_1", bits=4, has_minimum=True),
    PackedLayout(name="q8_0", bits=8, zero_point=128),
    PackedLayout(name="q5_1", bits=8, has_minimum=True),
    PackedLayout(name="q4_k", bits=4, has_minimum=True, is_nested=True),
    PackedLayout(name="q5_k", bits=8, has_minimum=True, is_nested=True),
    PackedLayout(name="q6_k", bits=8, zero_point=128, is_nested=True, columns_per_factor=16),
    PackedLayout(name="f16", bits=16),
    PackedLayout(name="bf16", bits=16),
    PackedLayout(name="f32", bits=32),
)
_IN_TILES = tuple(replace(layout, name=f"{layout.name}_tiles", in_tiles=True) for layout in _IN_LANES[:-1])

LAYOUTS: tuple[PackedLayout, ...] = (*_IN_LANES, *_IN_TILES)
"""Kernels name them by their place in this tuple: Q4_0, Q4_0_TILES and so on below."""

Q4_0, Q4_1, Q8_0, Q5_1, Q4_K, Q5_K, Q6_K, F16, BF16, F32 = range(len(_IN_LANES))
(
    Q4_0_TILES,
    Q4_1_TILES,
    Q8_0_TILES,
    Q5_1_TILES,
    Q4_K_TILES,
    Q5_K_TILES,
    Q6_K_TILES,
    F16_TILES,
    BF16_TILES,
) = range(len(_IN_LANES), len(LAYOUTS))

_LAYOUT_OF_STORAGE: dict[str, int] = {
    "Q4_0": Q4_0,
    "Q4_1": Q4_1,
    "Q5_0": Q8_0,
    "Q5_1": Q5_1,
    "Q8_0": Q8_0,
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
    "F16": F16,
    "BF16": BF16,
    "F32": F32,
}


@dataclass(frozen=True, slots=True)
class RawMatrix:
    """A matrix as a checkpoint keeps it: GGUF's name of the format, and [rows, bytes of a row]; a row is an output."""

    storage: str
    num_rows: int
    num_columns: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Outputs that are stored alike."""

    layout: int
    num_outputs: int
    weights: Bytes
    """[blocks of sixteen outputs, bytes of a block], at an address that is a multiple of 64"""
    bias: npt.NDArray[np.float32]
    """[outputs, filled up to sixteen]; zeros when there is none"""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """outputs = activations @ matrix.T + bias, for kernels/linear.py."""

    num_columns: int
    parts: tuple[PackedPart, ...]

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)

    @property
    def layouts(self) -> frozenset[int]:
        return frozenset(part.layout for part in self.parts)

    @property
    def needs_plain_rows(self) -> bool:
        """Some part multiplies float32 activations."""
        return any(LAYOUTS[part.layout].is_plain and not LAYOUTS[part.layout].in_tiles for part in self.parts)

    @property
    def size_bytes(self) -> int:
        return sum(part.weights.nbytes + part.bias.nbytes for part in self.parts)


def layouts_in_use(*, in_tiles: bool) -> list[int]:
    """All that matrices can have when they are packed in tiles, or not."""
    return sorted({layout_for(storage, quantize_plain=False, in_tiles=in_tiles) for storage in _LAYOUT_OF_STORAGE})


def packed_size_bytes(
    storage: str, num_rows: int, num_columns: int, *, quantize_plain: bool = False, in_tiles: bool = False
) -> int:
    """What pack_matrices would need for a matrix, before any of it is read."""
    layout = LAYOUTS[layout_for(storage, quantize_plain=quantize_plain, in_tiles=in_tiles)]
    blocks = -(-num_rows // OUTPUTS)
    return blocks * (layout.block_bytes(padded_columns(num_columns, layout)) + 4 * OUTPUTS)


def padded_columns(num_columns: int, layout: PackedLayout) -> int:
    return -(-num_columns // layout.column_step) * layout.column_step


def pack_matrices(
    matrices: Iterable[RawMatrix],
    biases: Iterable[npt.NDArray[np.float32] | None] = (),
    *,
    quantize_plain: bool = False,
    in_tiles: bool = False,
    memory: WeightMemory | None = None,
) -> PackedMatrix:
    """Matrices on the same input as one, their outputs one after the other; `biases` one for each, or none at all.

    `quantize_plain` turns F16, BF16 and F32 to eight bits (Q8_0); `in_tiles` lays everything but F32 out for tiled
    linears; the weights lie in `memory` if given. SettingsError for a format that has no layout here or a row that its
    blocks don't divide.
    """
    rows = list(matrices)
    bias_of_row = list(biases) or [None] * len(rows)
    columns = {matrix.num_columns for matrix in rows}
    if len(columns) != 1 or len(bias_of_row) != len(rows):
        raise ValueError(f"matrices of {sorted(columns)} columns and {len(bias_of_row)} biases don't make one matrix")
    with_layout = [
        (layout_for(matrix.storage, quantize_plain=quantize_plain, in_tiles=in_tiles), matrix, bias)
        for matrix, bias in zip(rows, bias_of_row, strict=True)
    ]
    parts = []
    for layout, members in groupby(with_layout, key=lambda member: member[0]):
        alike = list(members)
        parts.append(_pack_part(layout, [matrix for _, matrix, _ in alike], [bias for _, _, bias in alike], memory))
    return PackedMatrix(columns.pop(), tuple(parts))


def layout_for(storage: str, *, quantize_plain: bool, in_tiles: bool = False) -> int:
    """The place in LAYOUTS of a matrix stored like this; SettingsError when there is none."""
    if storage not in _LAYOUT_OF_STORAGE:
        raise SettingsError([f"weights of type {storage}: supported are {', '.join(_LAYOUT_OF_STORAGE)}"])
    layout = Q8_0 if quantize_plain and storage in _PLAIN_TYPES else _LAYOUT_OF_STORAGE[storage]
    return layout + len(_IN_LANES) if in_tiles and layout != F32 else layout


def _pack_part(
    layout_index: int,
    matrices: list[RawMatrix],
    biases: list[npt.NDArray[np.float32] | None],
    memory: WeightMemory | None,
) -> PackedPart:
    layout = LAYOUTS[layout_index]
    num_outputs = sum(matrix.num_rows for matrix in matrices)
    num_columns = padded_columns(matrices[0].num_columns, layout)
    num_blocks = -(-num_outputs // OUTPUTS)
    take = aligned_zeros if memory is None else memory.take
    weights = take(num_blocks, layout.block_bytes(num_columns))
    bias = np.zeros(num_blocks * OUTPUTS, np.float32)
    first = 0
    for matrix, its_bias in zip(matrices, biases, strict=True):
        _check_rows(matrix)
        if its_bias is not None:
            bias[first : first + matrix.num_rows] = its_bias
        first += matrix.num_rows
    for block, rows in _chunks_of_blocks(matrices):
        target = weights[block : block + -(-_num_rows(rows) // OUTPUTS)]
        if layout.is_plain:
            _pack_plain(layout, rows, num_columns, target)
        else:
            _pack_integers(layout, _join_parts([_split(layout, piece, num_columns) for piece in rows]), target)
    return PackedPart(layout_index, num_outputs, weights, bias)


def _check_rows(matrix: RawMatrix) -> None:
    if matrix.storage in _PLAIN_TYPES:
        columns, size = 1, np.dtype(_PLAIN_TYPES[matrix.storage]).itemsize
    else:
        columns, size = BLOCK_FORMATS[matrix.storage].columns, BLOCK_FORMATS[matrix.storage].size_bytes
    if matrix.num_columns % columns:
        raise SettingsError(
            [f"a {matrix.storage} matrix of {matrix.num_columns} columns: not a multiple of its block of {columns}"]
        )
    expected = (matrix.num_rows, matrix.num_columns // columns * size)
    if matrix.data.shape != expected or matrix.data.dtype != np.uint8:
        raise ValueError(
            f"a {matrix.storage} matrix of {matrix.num_rows} x {matrix.num_columns} is {expected} bytes, "
            f"not {matrix.data.shape} of {matrix.data.dtype}"
        )


def _chunks_of_blocks(matrices: list[RawMatrix]) -> Iterable[tuple[int, list[RawMatrix]]]:
    """The rows of all matrices in chunks of whole blocks: the chunk's first block, and pieces of the matrices."""
    pieces: list[RawMatrix] = []
    block, wanted = 0, _ROWS_AT_ONCE
    for matrix in matrices:
        start = 0
        while start < matrix.num_rows:
            stop = min(matrix.num_rows, start + wanted)
            pieces.append(RawMatrix(matrix.storage, stop - start, matrix.num_columns, matrix.data[start:stop]))
            wanted -= stop - start
            start = stop
            if not wanted:
                yield block, pieces
                pieces, block, wanted = [], block + _ROWS_AT_ONCE // OUTPUTS, _ROWS_AT_ONCE
    if pieces:
        yield block, pieces


def _num_rows(pieces: list[RawMatrix]) -> int:
    return sum(piece.num_rows for piece in pieces)


def _split(layout: PackedLayout, matrix: RawMatrix, num_columns: int) -> BlockParts:
    if matrix.storage not in _PLAIN_TYPES:
        return split_blocks(matrix.storage, np.ascontiguousarray(matrix.data))
    assert layout.name.startswith("q8_0")
    values = np.zeros((matrix.num_rows, num_columns), np.float32)
    values[:, : matrix.num_columns] = decode_plain(matrix.storage, matrix.data)
    return quantize_to_q8_0(values)


def decode_plain(storage: str, data: Bytes) -> npt.NDArray[np.float32]:
    """Rows of F16, BF16 or F32 as float32."""
    data = np.ascontiguousarray(data)
    if storage == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16 if storage == "F16" else np.float32).astype(np.float32)


def _join_parts(parts: list[BlockParts]) -> BlockParts:
    if len(parts) == 1:
        return parts[0]
    joined = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(BlockParts)
        if getattr(parts[0], field.name) is not None
    }
    return BlockParts(**joined)


def _pack_plain(layout: PackedLayout, pieces: list[RawMatrix], num_columns: int, target: Bytes) -> None:
    kind = np.uint16 if layout.bits == 16 else np.uint32
    numbers = np.concatenate([np.ascontiguousarray(piece.data).view(kind) for piece in pieces])
    if layout.in_tiles:
        numbers = np.pad(numbers, ((0, 0), (0, num_columns - numbers.shape[1])))
        _put_plane(target, 0, _by_group(numbers, target.shape[0]))
    else:
        _put_plane(target, 0, _by_output(numbers, target.shape[0]))


def _pack_integers(layout: PackedLayout, parts: BlockParts, target: Bytes) -> None:
    num_blocks = target.shape[0]
    integers: npt.NDArray[Any]
    if layout.in_tiles:
        integers = _by_group(parts.integers, num_blocks)
        if layout.bits == 4:
            fours = integers.reshape(num_blocks, -1, 4, 4, SIMPLE_COLUMNS).astype(np.uint16)
            integers = fours[..., 0, :] | fours[..., 1, :] << 4 | fours[..., 2, :] << 8 | fours[..., 3, :] << 12
    else:
        integers = _by_output(parts.integers.view(np.uint32), num_blocks)
        if layout.bits == 4:
            groups = integers.reshape(num_blocks, -1, 8, OUTPUTS)
            integers = groups[:, :, :4] | (groups[:, :, 4:] << np.uint32(4))
    offset = _put_plane(target, 0, integers)
    planes: tuple[npt.NDArray[Any] | None, ...] = (parts.scales, parts.minima, parts.factors, parts.minimum_factors)
    for plane in planes:
        if plane is not None:
            offset = _put_plane(target, offset, _by_output(plane, num_blocks))


def _by_output(values: npt.NDArray[Number], num_blocks: int) -> npt.NDArray[Number]:
    """[rows, n] to [blocks, n, 16]."""
    return np.ascontiguousarray(_in_blocks(values, num_blocks).transpose(0, 2, 1))


def _by_group(values: npt.NDArray[Number], num_blocks: int) -> npt.NDArray[Number]:
    """[rows, n] to [blocks, n / 32, 16, 32]."""
    blocks = _in_blocks(values, num_blocks).reshape(num_blocks, OUTPUTS, -1, SIMPLE_COLUMNS)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3))


def _in_blocks(values: npt.NDArray[Number], num_blocks: int) -> npt.NDArray[Number]:
    """[rows, n] to [blocks, 16, n], rows filled up with zeros."""
    missing = num_blocks * OUTPUTS - values.shape[0]
    if missing:
        values = np.concatenate([values, np.zeros((missing, values.shape[1]), values.dtype)])
    return values.reshape(num_blocks, OUTPUTS, -1)


def _put_plane(target: Bytes, offset: int, plane: npt.NDArray[np.generic]) -> int:
    """Writes [blocks, ...] behind what is there; returns where the next plane starts."""
    data = np.ascontiguousarray(plane).reshape(target.shape[0], -1).view(np.uint8)
    target[:, offset : offset + data.shape[1]] = data
    return offset + data.shape[1]
