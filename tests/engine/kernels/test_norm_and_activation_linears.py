"""What stands between the linears: norms, residual additions and gated activations, with their quantization."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.kernels import gated_activation, rms_norm
from kvpilot_engine.kernels.activation_quantization import QuantizedRows, quantize_rows

Floats = npt.NDArray[np.float32]

EPSILON = 1e-5
SIZES = [576, 64, 45]


def _random(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32) * 3


def _norm(rows: Floats, weight: Floats) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    normed: npt.NDArray[np.float64] = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPSILON) * weight
    return normed


def _assert_quantized(got: QuantizedRows, rows: Floats) -> None:
    wanted = QuantizedRows.allocate(*rows.shape)
    quantize_rows(rows, wanted.values, wanted.groups)
    np.testing.assert_array_equal(got.values, wanted.values)
    np.testing.assert_array_equal(got.groups.view(np.int32), wanted.groups.view(np.int32))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_rms_norm(size: int, num_rows: int) -> None:
    rows, weight = _random(num_rows, size), _random(size)
    out = np.empty_like(rows)
    rms_norm.rms_norm(rows, weight, EPSILON, out)
    np.testing.assert_allclose(out, _norm(rows, weight), rtol=2e-6)
    rms_norm.rms_norm(rows, weight, EPSILON, rows)
    np.testing.assert_array_equal(rows, out)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_norm_and_quantize(size: int, num_rows: int) -> None:
    rows, weight = _random(num_rows, size), _random(size)
    normed, quantized = np.empty_like(rows), QuantizedRows.allocate(num_rows, size)
    rms_norm.rms_norm_quantize(rows, weight, EPSILON, normed, quantized.values, quantized.groups)
    np.testing.assert_allclose(normed, _norm(rows, weight), rtol=2e-6)
    _assert_quantized(quantized, normed)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_add_norm_and_quantize(size: int, num_rows: int) -> None:
    residual, addend, weight = _random(num_rows, size), _random(size, num_rows).T.copy(), _random(size)
    wanted = residual + addend
    normed, quantized = np.empty_like(residual), QuantizedRows.allocate(num_rows, size)
    rms_norm.add_rms_norm_quantize(residual, addend, weight, EPSILON, normed, quantized.values, quantized.groups)
    np.testing.assert_array_equal(residual, wanted)
    np.testing.assert_allclose(normed, _norm(wanted, weight), rtol=2e-6)
    _assert_quantized(quantized, normed)


def _silu(gate: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    activated: npt.NDArray[np.float64] = gate / (1 + np.exp(-gate))
    return activated


def _gelu_tanh(gate: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    activated: npt.NDArray[np.float64] = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return activated


@pytest.mark.parametrize(("name", "reference"), [("silu", _silu), ("gelu_tanh", _gelu_tanh)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_gated_activations(
    name: str, reference: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], size: int, num_rows: int
) -> None:
    gate_up = _random(num_rows, 2 * size)
    product, quantized = np.empty((num_rows, size), np.float32), QuantizedRows.allocate(num_rows, size)
    gated_activation.BY_NAME[name](gate_up, product, quantized.values, quantized.groups)
    wanted = reference(gate_up[:, :size].astype(np.float64)) * gate_up[:, size:]
    np.testing.assert_allclose(product, wanted, rtol=3e-6, atol=1e-6)
    _assert_quantized(quantized, product)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_large_gates_saturate(name: str) -> None:
    gates = np.array([[-1e30, -200, -90, 90, 200, 1e30]], np.float32)
    gate_up = np.concatenate([gates, np.ones_like(gates)], axis=1)
    product, quantized = np.empty((1, 6), np.float32), QuantizedRows.allocate(1, 6)
    gated_activation.BY_NAME[name](gate_up, product, quantized.values, quantized.groups)
    np.testing.assert_allclose(product[0, 1:3], 0, atol=1e-30)
    np.testing.assert_allclose(product[0, 3:], gates[0, 3:], rtol=1e-6)
    assert abs(product[0, 0]) < 1e-5


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_a_gate_that_is_not_a_number_is_not_hidden(name: str) -> None:
    gate_up = np.array([[np.nan, 1.0, 1.0, 1.0]], np.float32)
    product, quantized = np.empty((1, 2), np.float32), QuantizedRows.allocate(1, 2)
    gated_activation.BY_NAME[name](gate_up, product, quantized.values, quantized.groups)
    assert np.isnan(product[0, 0])
    assert np.isnan(quantized.groups[0, 0, 0])


def test_rows_are_the_same_bits_in_every_batch() -> None:
    residual, addend, weight = _random(33, 96), _random(33, 96)[::-1].copy(), _random(96)
    gate_up = np.concatenate([residual, addend], axis=1)

    def run(rows: slice) -> list[npt.NDArray[np.int32]]:
        its_residual, gates = residual[rows].copy(), gate_up[rows].copy()
        normed, product = np.empty_like(its_residual), np.empty_like(its_residual)
        first, second = (QuantizedRows.allocate(*normed.shape) for _ in range(2))
        rms_norm.add_rms_norm_quantize(
            its_residual, addend[rows].copy(), weight, EPSILON, normed, first.values, first.groups
        )
        gated_activation.silu_mul_quantize(gates, product, second.values, second.groups)
        return [array.view(np.int32) for array in (normed, product, first.groups, second.groups)]

    together = run(slice(0, 33))
    for row in range(33):
        for alone, whole in zip(run(slice(row, row + 1)), together, strict=True):
            np.testing.assert_array_equal(alone[0], whole[row])
