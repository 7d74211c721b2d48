"""One linear of a model on packed weights, whatever they are stored as: picks the kernel of each part.

out[row] is the same bits for a row alone and for the row in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from kvpilot_engine.kernels import plain_linear, quantized_linear, tiled_gate, tiled_linear
from kvpilot_engine.kernels.activation_quantization import QuantizedRows
from kvpilot_engine.kernels.packed_matrix import LAYOUTS, Q4_0_TILES, PackedMatrix
from kvpilot_engine.kernels.tiled_rows import Tiles

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
    tiled_linear.linear_q4_0_tiles,
    tiled_linear.linear_q4_1_tiles,
    tiled_linear.linear_q8_0_tiles,
    tiled_linear.linear_q5_1_tiles,
    tiled_linear.linear_q4_k_tiles,
    tiled_linear.linear_q5_k_tiles,
    tiled_linear.linear_q6_k_tiles,
    tiled_linear.linear_f16_tiles,
    tiled_linear.linear_bf16_tiles,
)
"""In the order of LAYOUTS."""

_GATES: tuple[Callable[..., None], ...] = (
    tiled_gate.gate_q4_0_tiles,
    tiled_gate.gate_q4_1_tiles,
    tiled_gate.gate_q8_0_tiles,
    tiled_gate.gate_q5_1_tiles,
    tiled_gate.gate_q4_k_tiles,
    tiled_gate.gate_q5_k_tiles,
    tiled_gate.gate_q6_k_tiles,
    tiled_gate.gate_f16_tiles,
    tiled_gate.gate_bf16_tiles,
)
"""In the order of the layouts in tiles."""

_FLOATS = types.Array(types.float32, 2, "C")
_WEIGHTS = types.Array(types.uint8, 2, "C")
_BIAS = types.Array(types.float32, 1, "C")
_QUANTIZED_ROWS = (types.Array(types.int8, 2, "C"), types.Array(types.float32, 3, "C"))
_PLACE = (types.int64, types.int64)
_TILES = types.Array(types.uint16, 3, "C")


def linear(
    matrix: PackedMatrix, rows: Floats | None, quantized: QuantizedRows | None, out: Floats, tiles: Tiles | None = None
) -> None:
    """out = rows @ matrix.T + bias for all rows; every array C-contiguous, `out` [rows, outputs of the matrix].

    Parts in tiles read `tiles`, other integer parts `quantized`, other plain parts `rows`.
    """
    first_output = 0
    for part in matrix.parts:
        kernel, layout = _KERNELS[part.layout], LAYOUTS[part.layout]
        place = (part.weights, part.bias, out, first_output, part.num_outputs)
        if layout.in_tiles:
            assert tiles is not None
            kernel(tiles, *place)
        elif layout.is_plain:
            assert rows is not None
            kernel(rows, *place)
        else:
            assert quantized is not None
            kernel(quantized.values, quantized.groups, *place)
        first_output += part.num_outputs


def gated_linear(matrix: PackedMatrix, tiles: Tiles, out: Tiles, *, is_gelu: bool) -> None:
    """activation(gate) * up as tiles; the matrix has one part, in tiles, with blocks of gate and up in turn."""
    (part,) = matrix.parts
    _GATES[part.layout - Q4_0_TILES](tiles, part.weights, part.bias, is_gelu, out)


def compile_linears(layouts: Iterable[int]) -> None:
    """Compiles the kernels of these layouts, or loads them from numba's cache, without running them."""
    for layout in sorted(set(layouts)):
        kernel: Any = _KERNELS[layout]
        if LAYOUTS[layout].in_tiles:
            kernel.compile((_TILES, _WEIGHTS, _BIAS, _FLOATS, *_PLACE))
            gate: Any = _GATES[layout - Q4_0_TILES]
            gate.compile((_TILES, _WEIGHTS, _BIAS, types.boolean, _TILES))
            continue
        inputs = (_FLOATS,) if LAYOUTS[layout].is_plain else _QUANTIZED_ROWS
        kernel.compile((*inputs, _WEIGHTS, _BIAS, _FLOATS, *_PLACE))
