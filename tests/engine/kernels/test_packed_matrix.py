"""Packing keeps every bit of a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.kernels.packed_matrix import (
    LAYOUTS,
    PackedMatrix,
    RawMatrix,
    pack_matrices,
    packed_size_bytes,
)
from kvpilot_engine.kernels.packed_rows import read_rows
from kvpilot_engine.kernels.weight_memory import WeightMemory

Make = Callable[[str, int, int], tuple[RawMatrix, npt.NDArray[np.float32]]]

BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
PLAIN = ["F16", "BF16", "F32"]


def _all_rows(matrix: PackedMatrix) -> npt.NDArray[np.float32]:
    out = np.full((matrix.num_outputs, matrix.num_columns), np.nan, np.float32)
    read_rows(matrix, np.arange(matrix.num_outputs), out)
    return out


@pytest.mark.parametrize("storage", BLOCKS + PLAIN)
@pytest.mark.parametrize("num_rows", [16, 37])
def test_every_weight_is_what_gguf_says(make_matrix: Make, storage: str, num_rows: int) -> None:
    raw, exact = make_matrix(storage, num_rows, 512)
    packed = pack_matrices([raw])
    np.testing.assert_array_equal(_all_rows(packed).view(np.uint32), exact.view(np.uint32))


@pytest.mark.parametrize("storage", PLAIN)
def test_plain_matrices_have_any_number_of_columns(make_matrix: Make, storage: str) -> None:
    raw, exact = make_matrix(storage, 19, 45)
    np.testing.assert_array_equal(_all_rows(pack_matrices([raw])), exact)


def test_more_rows_than_are_packed_at_once(make_matrix: Make) -> None:
    first, exact_first = make_matrix("Q4_1", 1500, 64)
    second, exact_second = make_matrix("Q4_1", 1041, 64)
    packed = pack_matrices([first, second])
    assert len(packed.parts) == 1
    np.testing.assert_array_equal(_all_rows(packed), np.concatenate([exact_first, exact_second]))


def test_matrices_stored_alike_become_one_part(make_matrix: Make) -> None:
    query, exact_query = make_matrix("Q5_0", 21, 64)
    key, exact_key = make_matrix("Q8_0", 7, 64)
    value, exact_value = make_matrix("F16", 9, 64)
    packed = pack_matrices([query, key, value])
    assert [part.num_outputs for part in packed.parts] == [28, 9]
    np.testing.assert_array_equal(_all_rows(packed), np.concatenate([exact_query, exact_key, exact_value]))


def test_rows_are_read_in_the_order_asked_across_parts(make_matrix: Make) -> None:
    first, exact_first = make_matrix("Q4_0", 20, 64)
    second, exact_second = make_matrix("Q8_0", 20, 64)
    ids = np.array([39, 0, 20, 19, 0])
    out = np.empty((5, 64), np.float32)
    read_rows(pack_matrices([first, second]), ids, out)
    np.testing.assert_array_equal(out, np.concatenate([exact_first, exact_second])[ids])


@pytest.mark.parametrize("storage", PLAIN)
def test_quantized_plain_weights_are_the_nearest_of_eight_bits(make_matrix: Make, storage: str) -> None:
    raw, exact = make_matrix(storage, 33, 80)
    got = _all_rows(pack_matrices([raw], quantize_plain=True))
    padded = np.zeros((33, 96), np.float32)
    padded[:, :80] = exact
    largest = np.abs(padded.reshape(33, 3, 32)).max(axis=-1)
    # Half a step, and the rounding of the scale to eleven bits at the far end.
    allowed = np.repeat(largest * (0.5 / 127 + 2.0**-11), 32, axis=1)[:, :80]
    assert (np.abs(got - exact) <= allowed).all()


@pytest.mark.parametrize("storage", BLOCKS + PLAIN)
@pytest.mark.parametrize("quantize_plain", [False, True])
def test_the_size_is_known_beforehand(make_matrix: Make, storage: str, quantize_plain: bool) -> None:
    raw, _ = make_matrix(storage, 37, 256)
    packed = pack_matrices([raw], quantize_plain=quantize_plain)
    assert packed_size_bytes(storage, 37, 256, quantize_plain=quantize_plain) == packed.size_bytes


@pytest.mark.parametrize(
    ("storage", "bits"),
    [("Q4_0", 4.5), ("Q4_1", 5), ("Q8_0", 8.5), ("Q4_K", 4.625), ("Q5_K", 8.625), ("Q6_K", 8.5625), ("F16", 16)],
)
def test_bits_of_a_weight(storage: str, bits: float) -> None:
    without_bias = packed_size_bytes(storage, 1024, 1024) - 1024 * 4
    assert without_bias * 8 / 1024**2 == bits


def test_blocks_start_at_cache_lines(make_matrix: Make) -> None:
    raw, _ = make_matrix("Q4_0", 48, 96)
    weights = pack_matrices([raw]).parts[0].weights
    assert weights.ctypes.data % 64 == 0
    assert weights.strides[0] % 64 == 0


def test_matrices_lie_one_after_the_other_in_a_common_memory(make_matrix: Make) -> None:
    made = [make_matrix(storage, 37, 256) for storage in ("Q4_0", "F16", "Q6_K")]
    capacity = sum(packed_size_bytes(raw.storage, 37, 256) for raw, _ in made)
    memory = WeightMemory(capacity)
    packed = [pack_matrices([raw], memory=memory) for raw, _ in made]
    weights = [matrix.parts[0].weights for matrix in packed]
    assert memory.used_bytes == sum(array.nbytes for array in weights) <= capacity
    for before, after in pairwise(weights):
        assert after.ctypes.data == before.ctypes.data + before.nbytes
        assert after.ctypes.data % 64 == 0
    for matrix, (_, exact) in zip(packed, made, strict=True):
        np.testing.assert_array_equal(_all_rows(matrix), exact)


def test_a_memory_that_is_used_up_is_no_limit(make_matrix: Make) -> None:
    raw, exact = make_matrix("Q8_0", 16, 64)
    memory = WeightMemory(64)
    packed = pack_matrices([raw], memory=memory)
    assert memory.used_bytes == 0
    assert packed.parts[0].weights.ctypes.data % 64 == 0
    np.testing.assert_array_equal(_all_rows(packed), exact)


def test_biases_are_kept_with_their_outputs(make_matrix: Make) -> None:
    query, _ = make_matrix("Q8_0", 5, 32)
    key, _ = make_matrix("Q8_0", 6, 32)
    bias = np.arange(6, dtype=np.float32)
    part = pack_matrices([query, key], [None, bias]).parts[0]
    np.testing.assert_array_equal(part.bias, [0, 0, 0, 0, 0, *bias, 0, 0, 0, 0, 0])


def test_columns_that_blocks_do_not_divide_are_refused_by_name() -> None:
    raw = RawMatrix("Q4_K", 2, 300, np.zeros((2, 144), np.uint8))
    with pytest.raises(SettingsError, match="Q4_K matrix of 300 columns: not a multiple of its block of 256"):
        pack_matrices([raw])


def test_unknown_formats_are_refused_by_name() -> None:
    raw = RawMatrix("IQ2_XS", 2, 256, np.zeros((2, 74), np.uint8))
    with pytest.raises(SettingsError, match=r"IQ2_XS: supported are Q4_0, .*F32"):
        pack_matrices([raw])


@pytest.mark.parametrize(
    "change",
    [{"num_columns": 64}, {"num_rows": 3}, {"data": np.zeros((2, 33), np.uint8)}],
    ids=["columns", "rows", "bytes"],
)
def test_data_of_another_shape_is_a_mistake_of_ours(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"num_rows": 2, "num_columns": 32, "data": np.zeros((2, 34), np.uint8)}
    with pytest.raises(ValueError, match="Q8_0 matrix"):
        pack_matrices([RawMatrix("Q8_0", **(fields | change))])


def test_layout_names_are_unique() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
