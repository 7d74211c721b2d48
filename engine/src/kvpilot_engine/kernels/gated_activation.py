"""The MLP's middle: activation(gate) * up of rows [gate | up], and its quantization while a row is in the cache.

exp is written out, since LLVM vectorizes a loop over it and not over a call of the C library.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpilot_engine.kernels.activation_quantization import quantize_row
from kvpilot_engine.kernels.float_bits import bits_to_float
from kvpilot_engine.kernels.jit import kernel, parallel_kernel, parallel_range

Floats = npt.NDArray[np.float32]
Values = npt.NDArray[np.int8]

ROWS_ALONE = 2
"""So many rows are done sooner than a second thread is woken."""

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""ln 2 in two parts, the first so short that n * high is exact."""
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.3)
_C5, _C4, _C3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C2, _C1, _C0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(0.5)
"""Of (exp(r) - 1 - r) / r**2 for |r| <= ln 2 / 2."""
_GELU_INNER, _GELU_CUBE = np.float32(2 * sqrt(2 / pi)), np.float32(0.044715)
_ONE = np.float32(1)


@kernel
def exp(value: Any) -> Any:
    """exp of a float32 within a few units in the last place; saturates outside of -87.3..88.3. NaN gives any number."""
    value = min(max(value, _LOWEST), _HIGHEST)
    power = np.rint(value * _LOG2_E)
    rest = value - power * _LN2_HIGH - power * _LN2_LOW
    series = ((((_C5 * rest + _C4) * rest + _C3) * rest + _C2) * rest + _C1) * rest + _C0
    result = series * (rest * rest) + rest + _ONE
    return result * bits_to_float((np.int32(power) + np.int32(127)) << np.int32(23))


@kernel
def silu_mul_row(gate_up: Floats, out: Floats) -> None:
    half = out.shape[0]
    for column in range(half):
        gate = gate_up[column]
        out[column] = gate / (_ONE + exp(-gate)) * gate_up[half + column]


@kernel
def gelu_tanh_mul_row(gate_up: Floats, out: Floats) -> None:
    """0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2 u))."""
    half = out.shape[0]
    for column in range(half):
        gate = gate_up[column]
        inner = _GELU_INNER * (gate + _GELU_CUBE * gate * gate * gate)
        out[column] = gate / (_ONE + exp(-inner)) * gate_up[half + column]


@parallel_kernel
def silu_mul_quantize(gate_up: Floats, product: Floats, values: Values, groups: Floats) -> None:
    """`product` [rows, n] of `gate_up` [rows, 2 n], and quantized."""
    if product.shape[0] <= ROWS_ALONE:
        for row in range(product.shape[0]):
            silu_mul_row(gate_up[row], product[row])
            quantize_row(product[row], values[row], groups[row])
        return
    for row in parallel_range(product.shape[0]):
        silu_mul_row(gate_up[row], product[row])
        quantize_row(product[row], values[row], groups[row])


@parallel_kernel
def gelu_tanh_mul_quantize(gate_up: Floats, product: Floats, values: Values, groups: Floats) -> None:
    """The same with Gemma's activation."""
    if product.shape[0] <= ROWS_ALONE:
        for row in range(product.shape[0]):
            gelu_tanh_mul_row(gate_up[row], product[row])
            quantize_row(product[row], values[row], groups[row])
        return
    for row in parallel_range(product.shape[0]):
        gelu_tanh_mul_row(gate_up[row], product[row])
        quantize_row(product[row], values[row], groups[row])


@parallel_kernel
def silu_mul(gate_up: Floats, product: Floats) -> None:
    """Without quantization."""
    for row in parallel_range(product.shape[0]):
        silu_mul_row(gate_up[row], product[row])


@parallel_kernel
def gelu_tanh_mul(gate_up: Floats, product: Floats) -> None:
    for row in parallel_range(product.shape[0]):
        gelu_tanh_mul_row(gate_up[row], product[row])


ALONE_BY_NAME: dict[str, Callable[[Floats, Floats], None]] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
BY_NAME: dict[str, Callable[[Floats, Floats, Values, Floats], None]] = {
    "silu": silu_mul_quantize,
    "gelu_tanh": gelu_tanh_mul_quantize,
}
"""By the names that models give them."""
