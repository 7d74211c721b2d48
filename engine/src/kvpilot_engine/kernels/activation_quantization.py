"""Activations as signed bytes with a scale for each row and 32 columns: what the integer linears multiply.

Each row is done by itself in a fixed order, so a row's result never depends on its neighbours or their number. A row
with a NaN or an infinity stays recognizable: the scale of that group becomes NaN or infinite, and so does the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.jit import kernel, parallel_kernel, parallel_range

GROUP = 32
"""Columns that share a scale."""

SCALE, SCALED_SUM, MINUS_128_SUM, MINUS_128_FIRST_SUM = range(4)
"""The four words that go with a group: its scale; scale times the sum of its bytes; and as int32, the sum of its bytes
times -128, and that of the first sixteen. The last three save the linears from adding up again for each block of
outputs: for minima, and for weights whose bytes are biased by 128."""

_SMALLEST = np.float32(1e-30)
"""Groups below count as zeros: the reciprocal of their scale would overflow."""
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


@kernel
def quantize_group(
    row: npt.NDArray[np.float32],
    start: int,
    count: int,
    values: npt.NDArray[np.int8],
    words: npt.NDArray[np.float32],
) -> None:
    """Quantizes row[start : start + count] to the same place of `values`; count is 32, or less at the row's end."""
    bits = row.view(np.int32)
    highest = np.int32(0)
    for column in range(count):
        # As integers, magnitudes compare the same, and infinity and NaN are the highest.
        highest = max(highest, bits[start + column] & _ALL_BUT_SIGN)
    words_as_int = words.view(np.int32)
    words_as_int[SCALE] = highest
    magnitude = words[SCALE]
    inverse = np.float32(0) if magnitude < _SMALLEST else np.float32(127) / magnitude
    first_sum = np.int32(0)
    for column in range(min(16, count)):
        value = np.int8(np.rint(row[start + column] * inverse))
        values[start + column] = value
        first_sum += np.int32(value)
    second_sum = np.int32(0)
    for column in range(16, count):
        value = np.int8(np.rint(row[start + column] * inverse))
        values[start + column] = value
        second_sum += np.int32(value)
    scale = magnitude * np.float32(1 / 127)
    words[SCALE] = scale
    words[SCALED_SUM] = scale * np.float32(first_sum + second_sum)
    words_as_int[MINUS_128_SUM] = -128 * (first_sum + second_sum)
    words_as_int[MINUS_128_FIRST_SUM] = -128 * first_sum


@kernel
def quantize_row(row: npt.NDArray[np.float32], values: npt.NDArray[np.int8], groups: npt.NDArray[np.float32]) -> None:
    """One row; the columns that fill it up are left alone, they are zero from the start."""
    num_full = row.shape[0] // GROUP
    for group in range(num_full):
        quantize_group(row, group * GROUP, GROUP, values, groups[group])
    rest = row.shape[0] - num_full * GROUP
    if rest:
        quantize_group(row, num_full * GROUP, rest, values, groups[num_full])


@parallel_kernel
def quantize_rows(rows: npt.NDArray[np.float32], values: npt.NDArray[np.int8], groups: npt.NDArray[np.float32]) -> None:
    for row in parallel_range(rows.shape[0]):
        quantize_row(rows[row], values[row], groups[row])
