"""Linears whose activations have two bytes, against float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.kernels.activation_quantization import QuantizedRows, quantize_rows
from kvpilot_engine.kernels.linear import linear
from kvpilot_engine.kernels.packed_matrix import PackedMatrix, RawMatrix, pack_matrices
from kvpilot_engine.kernels.precise_linear import precise_linear

COLUMNS, OUTPUTS = 200, 40
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def weights() -> Floats:
    return np.random.default_rng(1).normal(size=(OUTPUTS, COLUMNS)).astype(np.float32)


def pack(weights: Floats, bias: Floats | None = None, *, quantize_plain: bool = True) -> PackedMatrix:
    num_rows, num_columns = weights.shape
    raw = RawMatrix("F32", num_rows, num_columns, weights.view(np.uint8))
    return pack_matrices([raw], [bias], quantize_plain=quantize_plain)


def multiply(matrix: PackedMatrix, rows: Floats) -> tuple[Floats, Floats]:
    """With one byte and with two."""
    count = len(rows)
    quantized = QuantizedRows.allocate(2 * count, COLUMNS)
    quantize_rows(rows, quantized.first(count).values, quantized.first(count).groups)
    once, twice = np.empty((count, OUTPUTS), np.float32), np.empty((2 * count, OUTPUTS), np.float32)
    linear(matrix, rows, quantized.first(count), once)
    return once, precise_linear(matrix, rows, quantized, np.empty_like(rows), twice)


@pytest.mark.parametrize("count", [1, 3, 9, 40])
def test_a_second_byte_is_a_hundred_times_nearer(weights: Floats, count: int) -> None:
    rows = np.random.default_rng(count).normal(size=(count, COLUMNS)).astype(np.float32)
    bias = np.arange(OUTPUTS, dtype=np.float32)
    once, twice = multiply(pack(weights, bias), rows)
    # the weights as eight bits keep them: a row of the identity reads a column
    identity = np.eye(COLUMNS, dtype=np.float32)
    kept = multiply(pack(weights), identity)[1].astype(np.float64)
    exact = rows.astype(np.float64) @ kept + bias
    assert np.abs(twice - exact).max() < np.abs(once - exact).max() / 100
    assert np.abs(twice - exact).max() < 1e-3


def test_a_row_has_the_same_bits_in_any_company(weights: Floats) -> None:
    matrix = pack(weights)
    rows = np.random.default_rng(5).normal(size=(37, COLUMNS)).astype(np.float32)
    together = multiply(matrix, rows)[1]
    alone = np.concatenate([multiply(matrix, rows[index : index + 1])[1] for index in range(len(rows))])
    assert np.array_equal(together, alone)


def test_plain_weights_take_the_rows_as_they_are(weights: Floats) -> None:
    rows = np.random.default_rng(6).normal(size=(3, COLUMNS)).astype(np.float32)
    once, twice = multiply(pack(weights, quantize_plain=False), rows)
    assert np.array_equal(once, twice)


def test_a_row_that_is_not_finite_stays_so_and_alone(weights: Floats) -> None:
    rows = np.random.default_rng(7).normal(size=(3, COLUMNS)).astype(np.float32)
    expected = multiply(pack(weights), rows)[1].copy()
    for broken in (np.nan, np.inf):
        rows[1, 17] = broken
        found = multiply(pack(weights), rows)[1]
        assert not np.isfinite(found[1]).any()
        assert np.array_equal(found[[0, 2]], expected[[0, 2]])
