"""Compiles what a model needs of the linears and of what stands between them, or loads it from the cache.

For a thread that runs while weights are read. Nothing else compiles later: the signatures here are those of the calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numba import types

from kvpilot_engine.kernels import gated_activation, packed_rows, precise_linear, rms_norm, tiled_rows
from kvpilot_engine.kernels.activation_quantization import quantize_rows
from kvpilot_engine.kernels.linear import compile_linears
from kvpilot_engine.kernels.packed_matrix import LAYOUTS

_ROWS = types.Array(types.float32, 2, "C")
_ROW = types.Array(types.float32, 1, "C")
_QUANTIZED = (types.Array(types.int8, 2, "C"), types.Array(types.float32, 3, "C"))
_TILES = types.Array(types.uint16, 3, "C")
_EPSILON = types.float64


def compile_decoder_parts(layouts: Iterable[int], gated_activations: Iterable[str]) -> None:
    """`layouts`: of all packed matrices, as PackedMatrix.layouts has them. `gated_activations`: the MLP's, by name."""
    layouts = sorted(set(layouts))
    compile_linears(layouts)
    packed_rows.compile_reading(layouts)
    names = list(gated_activations)
    signatures: list[tuple[Any, tuple[Any, ...]]] = [(rms_norm.rms_norm, (_ROWS, _ROW, _EPSILON, _ROWS))]
    if any(LAYOUTS[layout].in_tiles for layout in layouts):
        signatures += [
            (tiled_rows.pack_rows, (_ROWS, _TILES)),
            (rms_norm.rms_norm_tiles, (_ROWS, _ROW, _EPSILON, _ROWS, _TILES)),
            (rms_norm.add_rms_norm_tiles, (_ROWS, _ROWS, _ROW, _EPSILON, _ROWS, _TILES)),
            *((gated_activation.ALONE_BY_NAME[name], (_ROWS, _ROWS)) for name in names),
        ]
    else:
        signatures += [
            (quantize_rows, (_ROWS, *_QUANTIZED)),
            (precise_linear.quantize_rest, (_ROWS, *_QUANTIZED, _ROWS)),
            (precise_linear.add_rest, (_ROWS, _ROW, types.int64, types.int64)),
            (rms_norm.rms_norm_quantize, (_ROWS, _ROW, _EPSILON, _ROWS, *_QUANTIZED)),
            (rms_norm.add_rms_norm_quantize, (_ROWS, _ROWS, _ROW, _EPSILON, _ROWS, *_QUANTIZED)),
            *((gated_activation.BY_NAME[name], (_ROWS, _ROWS, *_QUANTIZED)) for name in names),
        ]
    for kernel, signature in signatures:
        kernel.compile(signature)
