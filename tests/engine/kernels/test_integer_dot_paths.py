"""Every machine computes the same: the dot product's paths agree bit by bit, alone and inside a linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from llvmlite import binding, ir
from numba import njit, types

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.kernels import packed_matrix, quantized_linear
from kvpilot_engine.kernels.activation_quantization import QuantizedRows, quantize_rows
from kvpilot_engine.kernels.cpu_features import DotPath, choose_dot_path, choose_tiles
from kvpilot_engine.kernels.integer_dot import integer_dot
from kvpilot_engine.kernels.jit import emitted
from kvpilot_engine.kernels.packed_matrix import RawMatrix, pack_matrices
from kvpilot_engine.kernels.simd import I32X16, EmittedArray, Simd

Make = Callable[[str, int, int], tuple[RawMatrix, npt.NDArray[np.float32]]]
Bytes = npt.NDArray[np.uint8]

VNNI_MACHINE = {"avx2", "fma", "avx512f", "avx512bw", "avx512vnni", "avxvnni"}
TILE_MACHINE = VNNI_MACHINE | {"amx-tile", "amx-bf16", "avx512bf16"}


def _paths_of_this_machine() -> list[DotPath]:
    able = []
    for path in DotPath:
        try:
            able.append(choose_dot_path(binding.get_host_cpu_features(), path))
        except SettingsError:
            continue
    return able


PATHS = _paths_of_this_machine()


def _dot_function(path: DotPath, *, biased: bool) -> Callable[[Bytes, Bytes, npt.NDArray[np.int32]], None]:
    @emitted
    def emit_dot(typing_context: Any, weights: Any, activations: Any, sums: Any) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            simd, dot = Simd(builder), integer_dot(path)
            weights, activations, sums = (
                EmittedArray(context, builder, kind, value).pointer
                for kind, value in zip(signature.args, arguments, strict=True)
            )
            start, bytes_in, four = (simd.load(place, I32X16, 4) for place in (sums, weights, activations))
            if biased:
                total = dot.add_biased(simd, dot.start_biased(simd, start), dot.prepare_biased(simd, bytes_in), four)
            else:
                total = dot.add_small(simd, simd.splat_i32(0), bytes_in, four)
            simd.store(total, sums, 4)
            return context.get_dummy_value()

        return types.void(weights, activations, sums), emit

    @njit
    def run(weights: Bytes, activations: Bytes, sums: npt.NDArray[np.int32]) -> None:
        emit_dot(weights, activations, sums)

    return cast(Callable[[Bytes, Bytes, npt.NDArray[np.int32]], None], run)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("biased", [False, True], ids=["small", "biased"])
def test_sums_of_products_are_exact(path: DotPath, biased: bool) -> None:
    run = _dot_function(path, biased=biased)
    random = np.random.default_rng(7)
    highest = 255 if biased else 63
    extreme = [
        (weight, value)
        for weight in (0, 1, 127 if biased else 63, 128 if biased else 0, highest)
        for value in (-127, 0, 127)
    ]
    for weight, value in [*extreme, *([(None, None)] * 50)]:
        weights = (
            np.full(64, weight or 0, np.uint8) if weight is not None else random.integers(0, highest + 1, 64, np.uint8)
        )
        values = np.full(64, value, np.int8) if value is not None else random.integers(-127, 128, 64, np.int8)
        meant = weights.astype(np.int32) - (128 if biased else 0)
        sums = -128 * values.astype(np.int32).reshape(16, 4).sum(axis=1, dtype=np.int32)
        run(weights, values.view(np.uint8), sums)
        np.testing.assert_array_equal(sums, (meant * values).reshape(16, 4).sum(axis=1))


@pytest.mark.parametrize("storage", ["Q4_1", "Q8_0", "Q5_K", "Q6_K"])
def test_linears_have_the_same_bits_on_every_path(
    make_matrix: Make, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, _ = make_matrix(storage, 16, 256)
    part = pack_matrices([raw]).parts[0]
    layout = part.layout
    num_rows = 16 + 8 + 4 + 2 + 1
    rows = np.random.default_rng(3).standard_normal((num_rows, 256)).astype(np.float32)
    quantized = QuantizedRows.allocate(num_rows, 256)
    quantize_rows(rows, quantized.values, quantized.groups)
    results = []
    for path in PATHS:
        monkeypatch.setattr(quantized_linear, "dot_path", lambda chosen=path: chosen)

        @njit
        def run(values: Any, groups: Any, weights: Any, bias: Any, out: Any) -> None:
            quantized_linear.multiply_block(layout, 0, values, groups, weights, bias, out, 0, 16)

        out = np.empty((num_rows, 16), np.float32)
        run(quantized.values, quantized.groups, part.weights, part.bias, out)
        results.append(out)
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize(
    ("features", "path"),
    [
        (VNNI_MACHINE, DotPath.AVX512_VNNI),
        (VNNI_MACHINE - {"avx512vnni"}, DotPath.AVX_VNNI),
        ({"avx2", "fma", "avx512f", "avx512bw"}, DotPath.AVX2),
        ({"avx2"}, DotPath.PLAIN),
        ({"neon"}, DotPath.PLAIN),
    ],
)
def test_the_fastest_path_is_chosen(features: set[str], path: DotPath) -> None:
    assert choose_dot_path(dict.fromkeys(features, True), None) is path


@pytest.mark.parametrize(
    ("features", "forced", "is_permitted", "expected"),
    [
        (TILE_MACHINE, None, True, True),
        (TILE_MACHINE, None, False, False),
        (TILE_MACHINE, "avx512_vnni", True, False),
        (TILE_MACHINE - {"amx-bf16"}, None, True, False),
        ({"amx-tile", "amx-bf16", "avx512bf16", "avx2", "fma"}, None, True, False),
    ],
    ids=["all", "not permitted", "a path is forced", "no bfloat16", "no AVX-512"],
)
def test_tiles_are_used_where_all_agree(
    features: set[str], forced: str | None, is_permitted: bool, expected: bool
) -> None:
    assert choose_tiles(dict.fromkeys(features, True), forced, is_permitted=is_permitted) is expected


def test_a_path_can_be_forced() -> None:
    assert choose_dot_path(dict.fromkeys(VNNI_MACHINE, True), "avx2") is DotPath.AVX2


def test_a_forced_path_that_can_not_run_names_what_is_missing() -> None:
    with pytest.raises(SettingsError, match="KVPILOT_CPU_DOT=avx512_vnni: this processor lacks avx512bw"):
        choose_dot_path({"avx2": True}, "avx512_vnni")


def test_an_unknown_forced_path_names_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="KVPILOT_CPU_DOT=sse9: not one of avx512_vnni, avx_vnni, avx2, plain"):
        choose_dot_path({}, "sse9")


def test_the_layouts_of_the_linears_are_those_of_the_packer() -> None:
    names = [layout.name for layout in packed_matrix.LAYOUTS]
    from kvpilot_engine.kernels import linear

    assert [kernel.__name__ for kernel in linear._KERNELS] == [f"linear_{name}" for name in names]
    in_tiles = [layout.name for layout in packed_matrix.LAYOUTS if layout.in_tiles]
    assert [kernel.__name__ for kernel in linear._GATES] == [f"gate_{name}" for name in in_tiles]
