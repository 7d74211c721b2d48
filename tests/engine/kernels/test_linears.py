"""Linears on packed weights: right within float32's rounding, and a row's bits never depend on its batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.kernels.activation_quantization import GROUP, QuantizedRows, quantize_rows
from kvpilot_engine.kernels.linear import linear
from kvpilot_engine.kernels.packed_matrix import PackedMatrix, RawMatrix, pack_matrices

Make = Callable[[str, int, int], tuple[RawMatrix, npt.NDArray[np.float32]]]
Floats = npt.NDArray[np.float32]

BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
PLAIN = ["F16", "BF16", "F32"]


def _activations(num_rows: int, num_columns: int) -> Floats:
    random = np.random.default_rng(num_rows * 1000 + num_columns)
    # Rows of different size, and a few large columns, as real activations have.
    rows = random.standard_normal((num_rows, num_columns)) * np.exp(random.standard_normal((num_rows, 1)))
    rows[:, :: max(1, num_columns // 5)] *= 20
    return rows.astype(np.float32)


def _quantize(rows: Floats) -> QuantizedRows:
    quantized = QuantizedRows.allocate(*rows.shape)
    quantize_rows(rows, quantized.values, quantized.groups)
    return quantized


def _dequantize(quantized: QuantizedRows, num_columns: int) -> npt.NDArray[np.float64]:
    groups = quantized.values.reshape(quantized.values.shape[0], -1, GROUP).astype(np.float64)
    return (groups * quantized.groups[:, :, :1]).reshape(quantized.values.shape[0], -1)[:, :num_columns]


def _run(matrix: PackedMatrix, rows: Floats) -> Floats:
    out = np.full((rows.shape[0], matrix.num_outputs), np.nan, np.float32)
    linear(matrix, rows, _quantize(rows), out)
    return out


def _assert_close(out: Floats, rows: npt.NDArray[np.float64], weights: Floats, bias: Floats | float = 0.0) -> None:
    """Within what float32 rounds away of the sum of magnitudes, which is what the order of additions can cost."""
    wanted = rows @ weights.T.astype(np.float64) + bias
    magnitudes = np.abs(rows) @ np.abs(weights.T).astype(np.float64) + np.abs(bias)
    assert (np.abs(out - wanted) / magnitudes).max() < 1e-6


@pytest.mark.parametrize("storage", BLOCKS)
def test_integer_weights_against_float64(make_matrix: Make, storage: str) -> None:
    raw, exact = make_matrix(storage, 41, 512)
    rows = _activations(13, 512)
    _assert_close(_run(pack_matrices([raw]), rows), _dequantize(_quantize(rows), 512), exact)


@pytest.mark.parametrize("storage", PLAIN)
@pytest.mark.parametrize("num_columns", [1, 45, 256])
def test_plain_weights_against_float64(make_matrix: Make, storage: str, num_columns: int) -> None:
    raw, exact = make_matrix(storage, 41, num_columns)
    rows = _activations(13, num_columns)
    _assert_close(_run(pack_matrices([raw]), rows), rows.astype(np.float64), exact)


@pytest.mark.parametrize("storage", BLOCKS + PLAIN)
def test_a_row_is_the_same_bits_in_every_batch(make_matrix: Make, storage: str) -> None:
    """# every batch of 1 to 67 rows: all tiles, and all ways to reach a row through them."""
    raw, _ = make_matrix(storage, 32, 256)
    matrix = pack_matrices([raw])
    rows = _activations(67, 256)
    alone = np.concatenate([_run(matrix, rows[index : index + 1]) for index in range(67)])
    for count in range(1, 68):
        together = _run(matrix, rows[67 - count :])
        np.testing.assert_array_equal(together.view(np.uint32), alone[67 - count :].view(np.uint32))


@pytest.mark.parametrize("storage", ["Q4_1", "F16"])
def test_a_neighbour_that_is_not_a_number_stays_alone(make_matrix: Make, storage: str) -> None:
    raw, _ = make_matrix(storage, 16, 64)
    matrix = pack_matrices([raw])
    rows = _activations(9, 64)
    healthy = _run(matrix, rows)
    rows[4, 33] = np.nan
    sick = _run(matrix, rows)
    assert np.isnan(sick[4]).all()
    np.testing.assert_array_equal(np.delete(sick, 4, axis=0), np.delete(healthy, 4, axis=0))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_are_not_hidden(make_matrix: Make, poison: float) -> None:
    raw, _ = make_matrix("Q8_0", 16, 64)
    rows = _activations(1, 64)
    rows[0, 10] = poison
    assert not np.isfinite(_run(pack_matrices([raw]), rows)).any()


def test_joined_matrices_of_different_formats_with_biases(make_matrix: Make) -> None:
    made = [make_matrix(storage, rows, 256) for storage, rows in (("Q4_K", 35), ("Q6_K", 9), ("F16", 21))]
    bias = np.linspace(-3, 3, 9).astype(np.float32)
    matrix = pack_matrices([raw for raw, _ in made], [None, bias, None])
    rows = _activations(5, 256)
    out = _run(matrix, rows)
    quantized = _dequantize(_quantize(rows), 256)
    _assert_close(out[:, :35], quantized, made[0][1])
    _assert_close(out[:, 35:44], quantized, made[1][1], bias)
    _assert_close(out[:, 44:], rows.astype(np.float64), made[2][1])


def test_joined_equals_apart(make_matrix: Make) -> None:
    (query, _), (key, _) = make_matrix("Q4_0", 48, 96), make_matrix("Q4_0", 20, 96)
    rows = _activations(6, 96)
    apart = [_run(pack_matrices([raw]), rows) for raw in (query, key)]
    np.testing.assert_array_equal(_run(pack_matrices([query, key]), rows), np.concatenate(apart, axis=1))


def test_nothing_is_written_beyond_the_outputs(make_matrix: Make) -> None:
    raw, _ = make_matrix("Q8_0", 21, 32)
    matrix = pack_matrices([raw])
    rows = _activations(3, 32)
    memory = np.full(4 * 21, 7.0, np.float32)
    linear(matrix, None, _quantize(rows), memory[: 3 * 21].reshape(3, 21))
    np.testing.assert_array_equal(memory[3 * 21 :], np.full(21, 7.0))
    np.testing.assert_array_equal(memory[: 3 * 21].reshape(3, 21), _run(matrix, rows))


def test_quantized_plain_weights_with_a_ragged_row(make_matrix: Make) -> None:
    raw, exact = make_matrix("BF16", 16, 83)
    rows = _activations(4, 83)
    out = _run(pack_matrices([raw], quantize_plain=True), rows)
    wanted = rows.astype(np.float64) @ exact.T
    scale = np.abs(rows.astype(np.float64)) @ np.abs(exact.T)
    assert (np.abs(out - wanted) / scale).max() < 0.02


@pytest.mark.parametrize("num_columns", [32, 64, 83, 7, 576])
def test_quantized_activations(num_columns: int) -> None:
    rows = _activations(6, num_columns)
    quantized = _quantize(rows)
    width = quantized.values.shape[1]
    padded = np.zeros((6, width), np.float32)
    padded[:, :num_columns] = rows
    largest = np.abs(padded.reshape(6, -1, GROUP)).max(axis=-1)
    scales = quantized.groups[:, :, 0]
    np.testing.assert_allclose(scales, largest / 127, rtol=2e-7)
    values = quantized.values.reshape(6, -1, GROUP).astype(np.int64)
    error = np.abs(values * scales[..., None].astype(np.float64) - padded.reshape(6, -1, GROUP))
    assert (error <= 0.5001 * scales[..., None]).all()
    np.testing.assert_allclose(quantized.groups[:, :, 1], scales * values.sum(axis=-1), rtol=1e-6)
    words = quantized.groups.view(np.int32)
    np.testing.assert_array_equal(words[:, :, 2], -128 * values.sum(axis=-1))
    np.testing.assert_array_equal(words[:, :, 3], -128 * values[:, :, :16].sum(axis=-1))


def test_zero_and_tiny_activations_become_zero() -> None:
    rows = np.zeros((2, 64), np.float32)
    rows[0, 40] = 1e-38
    quantized = _quantize(rows)
    assert not quantized.values.any()
