"""What is compiled ahead is what is called later: a request never waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.kernels import gated_activation, linear, packed_rows, rms_norm
from kvpilot_engine.kernels.activation_quantization import QuantizedRows, quantize_rows
from kvpilot_engine.kernels.compile_ahead import compile_decoder_parts
from kvpilot_engine.kernels.packed_matrix import RawMatrix, pack_matrices
from kvpilot_engine.kernels.weight_memory import WeightMemory

Make = Callable[[str, int, int], tuple[RawMatrix, npt.NDArray[np.float32]]]


@pytest.mark.parametrize("storage", ["Q4_1", "Q6_K", "BF16"])
def test_calls_find_their_signature_compiled(make_matrix: Make, storage: str) -> None:
    raw, _ = make_matrix(storage, 48, 256)
    matrix = pack_matrices([raw], memory=WeightMemory(1 << 20))
    compile_decoder_parts(matrix.layouts, ["silu", "gelu_tanh"])

    rows, weight = np.ones((3, 256), np.float32), np.ones(256, np.float32)
    buffer, quantized = np.empty((8, 256), np.float32)[:3], QuantizedRows.allocate(8, 256).first(3)
    quantize_rows(rows, quantized.values, quantized.groups)
    rms_norm.rms_norm(rows, weight, 1e-5, buffer)
    rms_norm.rms_norm_quantize(rows, weight, 1e-5, buffer, quantized.values, quantized.groups)
    rms_norm.add_rms_norm_quantize(rows, buffer, weight, 1e-5, buffer, quantized.values, quantized.groups)
    for gated in gated_activation.BY_NAME.values():
        gated(np.ones((3, 512), np.float32), buffer, quantized.values, quantized.groups)
    linear.linear(matrix, rows, quantized, np.empty((8, 48), np.float32)[:3])
    packed_rows.read_rows(matrix, np.array([4, 1]), buffer[:2])

    kernels: list[Any] = [
        quantize_rows,
        rms_norm.rms_norm,
        rms_norm.rms_norm_quantize,
        rms_norm.add_rms_norm_quantize,
        *gated_activation.BY_NAME.values(),
        *(linear._KERNELS[layout] for layout in matrix.layouts),
        packed_rows._read_nested_rows if storage == "Q6_K" else packed_rows._read_simple_rows,
    ]
    if storage == "BF16":
        kernels[-1] = packed_rows._read_plain_rows
    for kernel in kernels:
        assert len(kernel.signatures) == 1, f"{kernel.__name__} was compiled for {kernel.signatures}"
