"""RMS norms of rows, with the residual addition before and the quantization after, while a row is in the cache.

    residual += addend                                   where there is an addend
    normed = residual / sqrt(mean(residual**2) + epsilon) * weight
    values, groups = quantized normed                    for integer linears; plain ones read normed
    tiles = normed as bfloat16                           for tiled linears

Each row by itself, in float32, in an order that depends on its length alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.activation_quantization import ROWS_ALONE, quantize_row
from kvpilot_engine.kernels.bfloat_tiles import ROWS
from kvpilot_engine.kernels.jit import kernel, kernel_with_sums, parallel_kernel, parallel_range
from kvpilot_engine.kernels.tiled_rows import Index, pack_row, pack_tile

Floats = npt.NDArray[np.float32]
Values = npt.NDArray[np.int8]
Tiles = npt.NDArray[np.uint16]


@kernel_with_sums
def sum_of_squares(row: Floats) -> np.float32:
    total = np.float32(0)
    for column in range(row.shape[0]):
        total += row[column] * row[column]
    return total


@kernel
def rms_norm_row(row: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
    """`out` may be `row` itself."""
    mean = sum_of_squares(row) / np.float32(row.shape[0])
    factor = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
    for column in range(row.shape[0]):
        out[column] = row[column] * factor * weight[column]


@kernel
def add_row(row: Floats, addend: Floats) -> None:
    """row += addend"""
    for column in range(row.shape[0]):
        row[column] += addend[column]


@parallel_kernel
def rms_norm(rows: Floats, weight: Floats, epsilon: float, out: Floats) -> None:
    """`out` may be `rows`."""
    if rows.shape[0] <= ROWS_ALONE:
        for row in range(rows.shape[0]):
            rms_norm_row(rows[row], weight, epsilon, out[row])
        return
    for row in parallel_range(rows.shape[0]):
        rms_norm_row(rows[row], weight, epsilon, out[row])


@kernel
def norm_and_quantize_row(
    residual: Floats, weight: Floats, epsilon: float, normed: Floats, values: Values, groups: Floats
) -> None:
    rms_norm_row(residual, weight, epsilon, normed)
    quantize_row(normed, values, groups)


@parallel_kernel
def rms_norm_quantize(
    residual: Floats, weight: Floats, epsilon: float, normed: Floats, values: Values, groups: Floats
) -> None:
    """For the first layer, which has nothing to add."""
    if residual.shape[0] <= ROWS_ALONE:
        for row in range(residual.shape[0]):
            norm_and_quantize_row(residual[row], weight, epsilon, normed[row], values[row], groups[row])
        return
    for row in parallel_range(residual.shape[0]):
        norm_and_quantize_row(residual[row], weight, epsilon, normed[row], values[row], groups[row])


@kernel
def add_norm_and_quantize_row(
    residual: Floats, addend: Floats, weight: Floats, epsilon: float, normed: Floats, values: Values, groups: Floats
) -> None:
    add_row(residual, addend)
    norm_and_quantize_row(residual, weight, epsilon, normed, values, groups)


@parallel_kernel
def add_rms_norm_quantize(
    residual: Floats, addend: Floats, weight: Floats, epsilon: float, normed: Floats, values: Values, groups: Floats
) -> None:
    if residual.shape[0] <= ROWS_ALONE:
        for row in range(residual.shape[0]):
            add_norm_and_quantize_row(
                residual[row], addend[row], weight, epsilon, normed[row], values[row], groups[row]
            )
        return
    for row in parallel_range(residual.shape[0]):
        add_norm_and_quantize_row(residual[row], addend[row], weight, epsilon, normed[row], values[row], groups[row])


@kernel
def _norm_and_pack_tile(
    residual: Floats, index: Index, weight: Floats, epsilon: float, normed: Floats, tile: Tiles
) -> None:
    for row in range(index * ROWS, min(residual.shape[0], (index + 1) * ROWS)):
        rms_norm_row(residual[row], weight, epsilon, normed[row])
    pack_tile(normed, index, tile)


@parallel_kernel
def rms_norm_tiles(residual: Floats, weight: Floats, epsilon: float, normed: Floats, tiles: Tiles) -> None:
    """For the first layer, which has nothing to add."""
    if residual.shape[0] <= ROWS_ALONE:
        for row in range(residual.shape[0]):
            rms_norm_row(residual[row], weight, epsilon, normed[row])
            pack_row(normed[row], tiles[0], row)
    elif residual.shape[0] <= ROWS:
        for index in parallel_range(residual.shape[0]):
            place = np.int64(index)
            rms_norm_row(residual[place], weight, epsilon, normed[place])
            pack_row(normed[place], tiles[0], place)
    else:
        for index in parallel_range(tiles.shape[0]):
            place = np.int64(index)
            _norm_and_pack_tile(residual, place, weight, epsilon, normed, tiles[place])


@parallel_kernel
def add_rms_norm_tiles(
    residual: Floats, addend: Floats, weight: Floats, epsilon: float, normed: Floats, tiles: Tiles
) -> None:
    if residual.shape[0] <= ROWS_ALONE:
        for row in range(residual.shape[0]):
            add_row(residual[row], addend[row])
            rms_norm_row(residual[row], weight, epsilon, normed[row])
            pack_row(normed[row], tiles[0], row)
    elif residual.shape[0] <= ROWS:
        for index in parallel_range(residual.shape[0]):
            place = np.int64(index)
            add_row(residual[place], addend[place])
            rms_norm_row(residual[place], weight, epsilon, normed[place])
            pack_row(normed[place], tiles[0], place)
    else:
        for index in parallel_range(tiles.shape[0]):
            place = np.int64(index)
            for row in range(place * ROWS, min(residual.shape[0], (place + 1) * ROWS)):
                add_row(residual[row], addend[row])
            _norm_and_pack_tile(residual, place, weight, epsilon, normed, tiles[place])
