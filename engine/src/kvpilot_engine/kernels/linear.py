"""One linear of a model on packed weights, whatever they are stored as: picks the kernel of each part.

out[row] is the same bits for a row alone and for the row in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvpilot_engine.kernels import plain_linear, quantized_linear
from kvpilot_engine.kernels.activation_quantization import QuantizedRows
from kvpilot_engine.kernels.packed_matrix import LAYOUTS, PackedMatrix

Floats = npt.NDArray[np.float32]

_KERNELS: tuple[Callable[..., None], ...] = (
    quantized_linear.linear_q4_0,
    quantized_linear.linear_q4_1,
    quantized_linear.linear_q8_0,
    quantized_linear.linear_q5_1,
    quantized_linear.linear_q4_k,
    quantized_linear.linear_q5_k,
    quantized_linear.linear_q6_k,
    plain_linear.linear_f16,
    plain_linear.linear_bf16,
    plain_linear.linear_f32,
)
"""In the order of LAYOUTS."""

_FLOATS = types.Array(types.float32, 2, "C")
_WEIGHTS = types.Array(types.uint8, 2, "C")
_BIAS = types.Array(types.float32, 1, "C")
_QUANTIZED_ROWS = (types.Array(types.int8, 2, "C"), types.Array(types.float32, 3, "C"))
_PLACE = (types.int64, types.int64)


def linear(matrix: PackedMatrix, rows: Floats | None, quantized: QuantizedRows | None, out: Floats) -> None:
    """out = rows @ matrix.T + bias for all rows; every array C-contiguous, `out` [rows, outputs of the matrix].

    Integer parts read `quantized`, plain parts `rows`: see `needs_quantized_rows` and `needs_plain_rows`.
    """
    first_output = 0
    for part in matrix.parts:
        kernel = _KERNELS[part.layout]
        if LAYOUTS[part.layout].is_plain:
            assert rows is not None
            kernel(rows, part.weights, part.bias, out, first_output, part.num_outputs)
        else:
            assert quantized is not None
            kernel(quantized.values, quantized.groups, part.weights, part.bias, out, first_output, part.num_outputs)
        first_output += part.num_outputs


def compile_linears(layouts: Iterable[int]) -> None:
    """Compiles the kernels of these layouts, or loads them from numba's cache, without running them."""
    for layout in sorted(set(layouts)):
        inputs = (_FLOATS,) if LAYOUTS[layout].is_plain else _QUANTIZED_ROWS
        kernel: Any = _KERNELS[layout]
        kernel.compile((*inputs, _WEIGHTS, _BIAS, _FLOATS, *_PLACE))
