"""Linears in bfloat16 tiles: right within float32's rounding of what was rounded to bfloat16, alone as in company."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.kernels.cpu_features import multiplies_tiles
from kvpilot_engine.kernels.linear import gated_linear, linear
from kvpilot_engine.kernels.linear_input import LinearInput
from kvpilot_engine.kernels.packed_matrix import (
    LAYOUTS,
    OUTPUTS,
    PackedMatrix,
    RawMatrix,
    pack_matrices,
    packed_size_bytes,
)
from kvpilot_engine.kernels.packed_rows import read_rows
from kvpilot_engine.kernels.tiled_rows import TiledRows, Tiles, pack_rows

Make = Callable[[str, int, int], tuple[RawMatrix, npt.NDArray[np.float32]]]
Floats = npt.NDArray[np.float32]

BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
HALVES = ["F16", "BF16"]

needs_tiles = pytest.mark.skipif(not multiplies_tiles(), reason="this processor has no bfloat16 tiles")


def _activations(num_rows: int, num_columns: int) -> Floats:
    random = np.random.default_rng(num_rows * 1000 + num_columns)
    rows = random.standard_normal((num_rows, num_columns)) * np.exp(random.standard_normal((num_rows, 1)))
    rows[:, :: max(1, num_columns // 5)] *= 20
    return rows.astype(np.float32)


def _round_to_even(values: Floats) -> npt.NDArray[np.float64]:
    """bfloat16, ties to even, as rows are rounded."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)


def _pack(rows: Floats) -> Tiles:
    buffer = TiledRows.allocate(70, rows.shape[1])
    buffer.memory[:] = 0xFF  # bfloat16 that are not numbers: what is not written must not be read
    tiles = buffer.first(len(rows))
    pack_rows(rows, tiles)
    return tiles


def _unpack(tiles: Tiles, num_rows: int) -> npt.NDArray[np.float64]:
    """The rows of tiles, with the columns that fill up a group."""
    num_tiles, num_groups, width = tiles.shape[0], tiles.shape[1], tiles.shape[2] // 32
    pairs = tiles.reshape(num_tiles, num_groups, 16, width, 2).transpose(0, 3, 1, 2, 4)
    bits = pairs.reshape(num_tiles * width, num_groups * 32)[:num_rows].astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64)


def _run(matrix: PackedMatrix, rows: Floats) -> Floats:
    out = np.full((rows.shape[0], matrix.num_outputs), np.nan, np.float32)
    linear(matrix, rows, None, out, _pack(rows))
    return out


def _assert_close(out: Floats, rows: Floats, weights: Floats, bias: Floats | float = 0.0) -> None:
    """Rows as they are rounded; of the weights, which are computed in float32, half of bfloat16's last bit at most."""
    exact = _round_to_even(rows)
    wanted = exact @ weights.T.astype(np.float64) + bias
    magnitudes = np.abs(exact) @ np.abs(weights.T).astype(np.float64) + np.abs(bias)
    assert (np.abs(out - wanted) / magnitudes).max() < 2**-9 + 1e-6
    # rounding errors of many weights cancel: a bias in one direction would not
    assert np.abs(((out - wanted) / magnitudes).mean()) < 2**-13


@pytest.mark.parametrize("storage", BLOCKS + HALVES)
@pytest.mark.parametrize("num_rows", [16, 37])
def test_every_weight_is_what_gguf_says(make_matrix: Make, storage: str, num_rows: int) -> None:
    raw, exact = make_matrix(storage, num_rows, 512)
    packed = pack_matrices([raw], in_tiles=True)
    out = np.full((num_rows, 512), np.nan, np.float32)
    read_rows(packed, np.arange(num_rows), out)
    np.testing.assert_array_equal(out.view(np.uint32), exact.view(np.uint32))
    assert packed.size_bytes == packed_size_bytes(storage, num_rows, 512, in_tiles=True)


@pytest.mark.parametrize("storage", HALVES)
def test_halves_have_any_number_of_columns(make_matrix: Make, storage: str) -> None:
    raw, exact = make_matrix(storage, 19, 45)
    packed = pack_matrices([raw], in_tiles=True)
    out = np.full((19, 45), np.nan, np.float32)
    read_rows(packed, np.arange(19), out)
    np.testing.assert_array_equal(out, exact)
    assert packed.size_bytes == packed_size_bytes(storage, 19, 45, in_tiles=True)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 15, 16, 17, 33, 48])
@pytest.mark.parametrize("num_columns", [32, 45, 7, 96])
def test_rows_are_rounded_and_filled_up_with_zeros(num_rows: int, num_columns: int) -> None:
    rows = _activations(num_rows, num_columns)
    found = _unpack(_pack(rows), num_rows)
    np.testing.assert_array_equal(found[:, :num_columns], _round_to_even(rows))
    assert not found[:, num_columns:].any()


def test_f32_stays_exact(make_matrix: Make) -> None:
    raw, _ = make_matrix("F32", 16, 64)
    (part,) = pack_matrices([raw], in_tiles=True).parts
    assert not LAYOUTS[part.layout].in_tiles


@needs_tiles
@pytest.mark.parametrize("storage", BLOCKS + HALVES)
@pytest.mark.parametrize("num_rows", [1, 13, 37])
def test_against_float64(make_matrix: Make, storage: str, num_rows: int) -> None:
    raw, exact = make_matrix(storage, 41, 512)
    rows = _activations(num_rows, 512)
    _assert_close(_run(pack_matrices([raw], in_tiles=True), rows), rows, exact)


@needs_tiles
@pytest.mark.parametrize("num_columns", [1, 45, 70])
def test_columns_that_do_not_fill_a_group(make_matrix: Make, num_columns: int) -> None:
    raw, exact = make_matrix("BF16", 41, num_columns)
    rows = _activations(13, num_columns)
    out = _run(pack_matrices([raw], in_tiles=True), rows)
    wanted = _round_to_even(rows) @ exact.T
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


@needs_tiles
@pytest.mark.parametrize("storage", BLOCKS + HALVES)
def test_a_row_is_the_same_bits_in_every_batch(make_matrix: Make, storage: str) -> None:
    """# every batch of 1 to 67 rows: all widths of tiles, one pass and several, tiles in pairs and alone."""
    raw, _ = make_matrix(storage, 48, 256)
    matrix = pack_matrices([raw], in_tiles=True)
    rows = _activations(67, 256)
    alone = np.concatenate([_run(matrix, rows[index : index + 1]) for index in range(67)])
    for count in range(1, 68):
        together = _run(matrix, rows[67 - count :])
        np.testing.assert_array_equal(together.view(np.uint32), alone[67 - count :].view(np.uint32))


@needs_tiles
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("num_rows", [9, 40])
def test_a_neighbour_that_is_not_finite_stays_alone(make_matrix: Make, poison: float, num_rows: int) -> None:
    raw, _ = make_matrix("Q4_1", 16, 64)
    matrix = pack_matrices([raw], in_tiles=True)
    rows = _activations(num_rows, 64)
    healthy = _run(matrix, rows)
    rows[4, 33] = poison
    sick = _run(matrix, rows)
    assert not np.isfinite(sick[4]).any()
    np.testing.assert_array_equal(np.delete(sick, 4, axis=0), np.delete(healthy, 4, axis=0))


@needs_tiles
def test_joined_matrices_of_different_formats_with_biases(make_matrix: Make) -> None:
    made = [make_matrix(storage, rows, 256) for storage, rows in (("Q4_K", 35), ("Q6_K", 9), ("F32", 21))]
    bias = np.linspace(-3, 3, 9).astype(np.float32)
    matrix = pack_matrices([raw for raw, _ in made], [None, bias, None], in_tiles=True)
    rows = _activations(5, 256)
    out = _run(matrix, rows)
    _assert_close(out[:, :35], rows, made[0][1])
    _assert_close(out[:, 35:44], rows, made[1][1], bias)
    np.testing.assert_allclose(out[:, 44:], rows.astype(np.float64) @ made[2][1].T, rtol=1e-3, atol=1e-3)


@needs_tiles
def test_nothing_is_written_beyond_the_outputs(make_matrix: Make) -> None:
    raw, _ = make_matrix("Q8_0", 21, 32)
    matrix = pack_matrices([raw], in_tiles=True)
    rows = _activations(3, 32)
    memory = np.full(4 * 21, 7.0, np.float32)
    linear(matrix, None, None, memory[: 3 * 21].reshape(3, 21), _pack(rows))
    np.testing.assert_array_equal(memory[3 * 21 :], np.full(21, 7.0))
    np.testing.assert_array_equal(memory[: 3 * 21].reshape(3, 21), _run(matrix, rows))


def _gate(matrix: PackedMatrix, rows: Floats, *, is_gelu: bool) -> npt.NDArray[np.float64]:
    buffer = TiledRows.allocate(len(rows), matrix.num_outputs // 2)
    buffer.memory[:] = 0xFF
    out = buffer.first(len(rows))
    gated_linear(matrix, _pack(rows), out, is_gelu=is_gelu)
    return _unpack(out, len(rows))


def _in_turn(gate: RawMatrix, up: RawMatrix) -> RawMatrix:
    rows = [matrix.data.reshape(-1, OUTPUTS, matrix.data.shape[1]) for matrix in (gate, up)]
    data = np.stack(rows, axis=1).reshape(-1, gate.data.shape[1])
    return RawMatrix(gate.storage, len(data), gate.num_columns, data)


@needs_tiles
@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_rows", [1, 5, 16, 21, 40])
def test_gate_and_up_in_one(make_matrix: Make, is_gelu: bool, num_rows: int) -> None:
    (gate, _), (up, _) = (make_matrix("Q4_1", 64, 96) for _ in range(2))
    rows = _activations(num_rows, 96) / np.float32(10)
    apart = [_run(pack_matrices([raw], in_tiles=True), rows).astype(np.float64) for raw in (gate, up)]
    inner = apart[0]
    if is_gelu:
        inner = 2 * np.sqrt(2 / np.pi) * (apart[0] + 0.044715 * apart[0] ** 3)
    wanted = apart[0] / (1 + np.exp(-inner)) * apart[1]
    found = _gate(pack_matrices([_in_turn(gate, up)], in_tiles=True), rows, is_gelu=is_gelu)
    np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=1e-7)


@needs_tiles
@pytest.mark.parametrize("storage", ["Q4_K", "Q6_K", "BF16"])
def test_a_gated_row_is_the_same_in_every_batch(make_matrix: Make, storage: str) -> None:
    (gate, _), (up, _) = (make_matrix(storage, 32, 256) for _ in range(2))
    matrix = pack_matrices([_in_turn(gate, up)], in_tiles=True)
    rows = _activations(50, 256)
    alone = np.concatenate([_gate(matrix, rows[index : index + 1], is_gelu=False) for index in range(50)])
    for count in (2, 15, 16, 17, 32, 33, 50):
        np.testing.assert_array_equal(_gate(matrix, rows[50 - count :], is_gelu=False), alone[50 - count :])


@pytest.mark.parametrize("in_tiles", [False, pytest.param(True, marks=needs_tiles)])
@pytest.mark.parametrize("num_rows", [1, 7, 20, 40])
def test_an_input_is_the_same_in_every_form(make_matrix: Make, in_tiles: bool, num_rows: int) -> None:
    raw, exact = make_matrix("F16", 24, 64)
    matrix = pack_matrices([raw], in_tiles=in_tiles)
    residual, addend = _activations(40, 64), np.ones((40, 64), np.float32)
    weight = np.linspace(0.5, 2, 64).astype(np.float32)
    buffer = LinearInput.allocate(40, 64, in_tiles=in_tiles, is_precise=True).first(num_rows)
    summed = residual[:num_rows].astype(np.float64) + 1
    normed = summed / np.sqrt((summed**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    wanted = normed @ exact.T
    copies = 1 if in_tiles else 2
    out = np.empty((copies * num_rows, 24), np.float32)

    before = residual[:num_rows].copy()
    buffer.add_and_normalize(before, addend[:num_rows], weight, 1e-5)
    np.testing.assert_allclose(before, summed, rtol=1e-6)
    found = buffer.multiply_precisely(matrix, out)[:num_rows].copy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.01 * np.abs(wanted).max())

    buffer.normalize(before, weight, 1e-5)
    np.testing.assert_array_equal(buffer.multiply_precisely(matrix, out)[:num_rows], found)

    buffer.rows[:] = normed
    buffer.convert()
    plain = np.empty((num_rows, 24), np.float32)
    buffer.multiply(matrix, plain)
    np.testing.assert_allclose(plain, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())
