"""Rows of activations in every form that a linear may want: float32, bytes with scales, or tiles of bfloat16.

Which of the last two exists is the machine's question: where linears are tiled there are no bytes, and the other way
round. The float32 rows are always there, for matrices of F32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.activation_quantization import QuantizedRows, quantize_rows
from kvpilot_engine.kernels.gated_activation import ALONE_BY_NAME, BY_NAME
from kvpilot_engine.kernels.linear import linear
from kvpilot_engine.kernels.packed_matrix import PackedMatrix
from kvpilot_engine.kernels.precise_linear import precise_linear
from kvpilot_engine.kernels.rms_norm import (
    add_rms_norm_quantize,
    add_rms_norm_tiles,
    rms_norm_quantize,
    rms_norm_tiles,
)
from kvpilot_engine.kernels.tiled_rows import TiledRows, Tiles, pack_rows

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearInput:
    """Views of as many rows as are in use; the memory is that of the buffer they were cut from."""

    rows: Floats
    """[rows, columns]"""
    quantized: QuantizedRows | None
    """A precise input has twice the rows: the second half for what the first byte leaves over (precise_linear.py)."""
    rest: Floats | None
    """As `rows`; only of a precise input."""
    tiles: Tiles | None
    tile_buffer: TiledRows | None

    @classmethod
    def allocate(cls, num_rows: int, num_columns: int, *, in_tiles: bool, is_precise: bool = False) -> Self:
        is_precise = is_precise and not in_tiles
        tiled = TiledRows.allocate(num_rows, num_columns) if in_tiles else None
        quantized_rows = 2 * num_rows if is_precise else num_rows
        return cls(
            rows=np.empty((num_rows, num_columns), np.float32),
            quantized=None if in_tiles else QuantizedRows.allocate(quantized_rows, num_columns),
            rest=np.empty((num_rows, num_columns), np.float32) if is_precise else None,
            tiles=None if tiled is None else tiled.first(num_rows),
            tile_buffer=tiled,
        )

    def first(self, num_rows: int) -> LinearInput:
        """For so many rows; shares the memory, and invalidates what other numbers of rows have left in it."""
        return replace(
            self,
            rows=self.rows[:num_rows],
            quantized=None
            if self.quantized is None
            else self.quantized.first(num_rows if self.rest is None else 2 * num_rows),
            rest=None if self.rest is None else self.rest[:num_rows],
            tiles=None if self.tile_buffer is None else self.tile_buffer.first(num_rows),
        )

    def normalize(self, residual: Floats, weight: Floats, epsilon: float) -> None:
        """Fills all forms with the RMS norm of `residual`, which may be the rows themselves."""
        if self.tiles is not None:
            rms_norm_tiles(residual, weight, epsilon, self.rows, self.tiles)
        elif self.quantized is not None:
            quantized = self.quantized
            rms_norm_quantize(residual, weight, epsilon, self.rows, quantized.values, quantized.groups)

    def add_and_normalize(self, residual: Floats, addend: Floats, weight: Floats, epsilon: float) -> None:
        """The same after residual += addend."""
        if self.tiles is not None:
            add_rms_norm_tiles(residual, addend, weight, epsilon, self.rows, self.tiles)
        elif self.quantized is not None:
            quantized = self.quantized
            add_rms_norm_quantize(residual, addend, weight, epsilon, self.rows, quantized.values, quantized.groups)

    def convert(self) -> None:
        """Fills the other forms from the rows."""
        if self.tiles is not None:
            pack_rows(self.rows, self.tiles)
        elif self.quantized is not None:
            quantize_rows(self.rows, self.quantized.values, self.quantized.groups)

    def gate(self, gate_up: Floats, activation: str) -> None:
        """Fills all forms with activation(gate) * up of rows [gate | up]."""
        if self.quantized is not None:
            BY_NAME[activation](gate_up, self.rows, self.quantized.values, self.quantized.groups)
        else:
            ALONE_BY_NAME[activation](gate_up, self.rows)
            self.convert()

    def multiply(self, matrix: PackedMatrix, out: Floats) -> None:
        """out = rows @ matrix.T + bias."""
        quantized = self.quantized
        if quantized is not None and self.rest is not None:
            quantized = quantized.first(len(self.rows))
        linear(matrix, self.rows, quantized, out, self.tiles)

    def multiply_precisely(self, matrix: PackedMatrix, out: Floats) -> Floats:
        """The same of a precise input, with a second byte where activations are bytes: `out` then has twice the rows.

        Returns the first half, which is the result.
        """
        if self.quantized is not None and self.rest is not None:
            return precise_linear(matrix, self.rows, self.quantized, self.rest, out)
        self.multiply(matrix, out)
        return out

    @property
    def size_bytes(self) -> int:
        arrays = [array.nbytes for array in (self.rows, self.rest) if array is not None]
        buffers = [buffer.size_bytes for buffer in (self.quantized, self.tile_buffer) if buffer is not None]
        return sum(arrays + buffers)
