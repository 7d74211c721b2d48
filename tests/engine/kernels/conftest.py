"""Matrices in every storage format: quantized by the gguf package where it can, otherwise random blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from kvpilot_engine.kernels.packed_matrix import RawMatrix

MakeMatrix = Callable[[str, int, int], tuple[RawMatrix, npt.NDArray[np.float32]]]

_HALVES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Offsets of half-precision numbers in formats that the gguf package can't write."""


@pytest.fixture
def make_matrix() -> MakeMatrix:
    """A matrix of a format, and its numbers as the gguf package reads them."""
    random = np.random.default_rng(20261130)

    def make(storage: str, num_rows: int, num_columns: int) -> tuple[RawMatrix, npt.NDArray[np.float32]]:
        kind = GGMLQuantizationType[storage]
        if storage in _HALVES_AT:
            columns, size = GGML_QUANT_SIZES[kind]
            blocks = random.integers(0, 256, (num_rows, num_columns // columns, size), dtype=np.uint8)
            for offset in _HALVES_AT[storage]:
                halves = (random.random(blocks.shape[:2]) * 1e-3).astype(np.float16)
                blocks[..., offset : offset + 2] = halves[..., None].view(np.uint8)
            data = blocks.reshape(num_rows, -1)
        else:
            values = (random.standard_normal((num_rows, num_columns)) * 0.05).astype(np.float32)
            data = np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8).reshape(num_rows, -1)
        typed = data if storage not in ("F16", "F32") else data.view(np.float16 if storage == "F16" else np.float32)
        exact = quants.dequantize(typed, kind).astype(np.float32).reshape(num_rows, num_columns)
        return RawMatrix(storage, num_rows, num_columns, data), exact

    return make
