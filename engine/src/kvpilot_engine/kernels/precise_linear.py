"""Integer linears whose activations have two bytes: for matrices where one byte is seen in the text.

A row is quantized, what is left of it is quantized too, and both go through the linear as two rows of one call, so that
the weights are read once. The rest is at most half a step of the first byte: its scale is 254 times finer. Rounding
then is 1/32,000 of a group's largest number, below what float16 keys and values lose.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.activation_quantization import GROUP, ROWS_ALONE, SCALE, QuantizedRows, quantize_row
from kvpilot_engine.kernels.jit import kernel, parallel_kernel, parallel_range
from kvpilot_engine.kernels.linear import linear
from kvpilot_engine.kernels.packed_matrix import PackedMatrix

Floats = npt.NDArray[np.float32]
Values = npt.NDArray[np.int8]


@kernel
def _quantize_rest_of_row(
    row: Floats, values: Values, groups: Floats, rest: Floats, rest_values: Values, rest_groups: Floats
) -> None:
    for group in range(groups.shape[0]):
        scale = groups[group, SCALE]
        for column in range(group * GROUP, min((group + 1) * GROUP, row.shape[0])):
            rest[column] = row[column] - scale * np.float32(values[column])
    quantize_row(rest, rest_values, rest_groups)


@parallel_kernel
def quantize_rest(rows: Floats, values: Values, groups: Floats, rest: Floats) -> None:
    """`values` and `groups` have twice the rows: the first half is read, the second written. `rest`: as `rows`."""
    count = rows.shape[0]
    if count <= ROWS_ALONE:
        for row in range(count):
            _quantize_rest_of_row(
                rows[row], values[row], groups[row], rest[row], values[count + row], groups[count + row]
            )
        return
    for index in parallel_range(count):
        place = np.int64(index)
        second = count + place
        _quantize_rest_of_row(rows[place], values[place], groups[place], rest[place], values[second], groups[second])


@parallel_kernel
def add_rest(out: Floats, bias: Floats, first_output: int, num_outputs: int) -> None:
    """The second half's outputs onto the first half's; the bias is in both, and is taken away once."""
    count = out.shape[0] // 2
    for index in parallel_range(count):
        row = np.int64(index)
        for output in range(num_outputs):
            out[row, first_output + output] += out[count + row, first_output + output] - bias[output]


def precise_linear(matrix: PackedMatrix, rows: Floats, quantized: QuantizedRows, rest: Floats, out: Floats) -> Floats:
    """The first half of `out`: rows @ matrix.T + bias.

    `quantized` and `out` have twice the rows, of which the first half of `quantized` is filled. A matrix with plain
    parts takes the rows as they are, and needs no second byte.
    """
    count = len(rows)
    if matrix.needs_plain_rows:
        linear(matrix, rows, quantized.first(count), out[:count])
        return out[:count]
    quantize_rest(rows, quantized.values, quantized.groups, rest)
    linear(matrix, None, quantized, out)
    first_output = 0
    for part in matrix.parts:
        add_rest(out, part.bias, first_output, part.num_outputs)
        first_output += part.num_outputs
    return out[:count]
