"""Block formats as the gguf package undoes them, parts of split files, and files that do not hold together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from kvpilot_engine.errors import ModelNotFoundError, SettingsError, StartupError
from kvpilot_engine.models.weight_source import StorageType
from kvpilot_engine.models.weights import open_weights

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 256, 8, 2, 32, 512
STORED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""What read_stored hands out as it lies in the file."""
OTHER = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")
SHAPES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}


def draw_blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int) -> npt.NDArray[Any]:
    """[rows, bytes]: random bits, but for scales, which are kept finite by clearing the top of every second byte."""
    generator = np.random.default_rng(seed)
    if kind is GGMLQuantizationType.F32:
        return generator.standard_normal((rows, columns)).astype(np.float32)
    if kind is GGMLQuantizationType.F16:
        return generator.standard_normal((rows, columns)).astype(np.float16)
    block, size = GGML_QUANT_SIZES[kind]
    data = generator.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    # no 16-bit float, wherever it lies, has all bits of its exponent set
    return data & np.uint8(0xBB)


def write_layers(path: Path, kind: GGMLQuantizationType) -> dict[str, npt.NDArray[Any]]:
    """A Llama of one layer whose matrices are of one kind; returns their stored data."""
    writer = GGUFWriter(path, "llama")
    describe(writer)
    stored = {}
    for index, (name, (rows, columns)) in enumerate(SHAPES.items()):
        stored[name] = draw_blocks(kind, rows, columns, index)
        writer.add_tensor(f"blk.0.{name}.weight", stored[name], raw_dtype=kind)
    add_rest(writer)
    finish(writer)
    return stored


def describe(writer: GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)


def add_rest(writer: GGUFWriter) -> None:
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.add_tensor("token_embd.weight", np.ones((64, HIDDEN), dtype=np.float32))


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_half_order(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of q or k: first of each head's pairs, then the second ones."""
    return np.concatenate([head[part::2] for head in np.split(rows, heads) for part in (0, 1)])


@pytest.mark.parametrize("name", STORED + OTHER)
def test_each_type_is_read_as_the_gguf_package_undoes_it(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    stored = write_layers(tmp_path / "m.gguf", kind)
    with open_weights(tmp_path / "m.gguf") as source:
        for ours, theirs, heads in (
            ("q", "attn_q", HEADS),
            ("k", "attn_k", KV_HEADS),
            ("v", "attn_v", 0),
            ("down", "ffn_down", 0),
        ):
            expected = dequantize(stored[theirs], kind)
            assert np.isfinite(expected).all()
            assert expected.std() > 0
            expected = in_half_order(expected, heads) if heads else expected
            read = source.read(f"layers.0.{ours}.weight")
            assert read.dtype == np.float32
            assert read.flags.owndata
            assert read.flags.writeable
            assert (read == expected).all()
            matrix = source.read_stored(f"layers.0.{ours}.weight")
            assert matrix.storage == (StorageType(name) if name in STORED else StorageType.F32)
            assert (matrix.num_rows, matrix.num_columns) == expected.shape
            assert matrix.data.shape[0] == matrix.num_rows
            if name in STORED:
                raw = stored[theirs].view(np.uint8)
                assert (matrix.data == (in_half_order(raw, heads) if heads else raw)).all()
            else:
                assert (matrix.data.view(np.float32) == expected).all()


def test_arrays_stay_valid_after_the_source_is_closed(tmp_path: Path) -> None:
    stored = write_layers(tmp_path / "m.gguf", GGMLQuantizationType.F32)
    with open_weights(tmp_path / "m.gguf") as source:
        read = source.read("layers.0.v.weight")
    (tmp_path / "m.gguf").write_bytes(b"")
    assert (read == stored["attn_v"]).all()


def write_parts(folder: Path, parts: int) -> list[Path]:
    """The same model as write_layers writes in Q4_0, in parts."""
    writer = GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=-(-11 // parts))
    describe(writer)
    for index, (name, (rows, columns)) in enumerate(SHAPES.items()):
        data = draw_blocks(GGMLQuantizationType.Q4_0, rows, columns, index)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=GGMLQuantizationType.Q4_0)
    add_rest(writer)
    finish(writer)
    return sorted(folder.glob("*.gguf"))


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    whole.mkdir()
    split.mkdir()
    write_layers(whole / "m.gguf", GGMLQuantizationType.Q4_0)
    parts = write_parts(split, 3)
    assert [part.name for part in parts] == [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    with open_weights(whole) as one, open_weights(split) as by_folder, open_weights(parts[0]) as by_name:
        assert one.config == by_folder.config == by_name.config
        for name in ("layers.0.q.weight", "layers.0.down.weight", "norm.weight", "embedding.weight"):
            assert (one.read(name) == by_folder.read(name)).all()
            assert (one.read(name) == by_name.read(name)).all()


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, 3)
    with pytest.raises(ModelNotFoundError, match=r"m-00002-of-00003\.gguf is part 2 of 3; name the first, m-00001"):
        open_weights(parts[1])
    parts[1].unlink()
    for path in (tmp_path, parts[0]):
        with pytest.raises(ModelNotFoundError, match=r"m-00002-of-00003\.gguf missing"):
            open_weights(path)


def test_a_part_under_another_name_is_not_taken_for_the_model(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, 3)
    alone = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelNotFoundError, match="one of 3 parts"):
        open_weights(alone)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ffn_up": (INTERMEDIATE, HIDDEN // 2)}, r"ffn_up\.weight has size 512 × 128.*512 × 256"),
        ({"ffn_up": None}, r"blk\.0\.ffn_up\.weight is missing"),
        ({"ffn_gate_inp": (4, HIDDEN)}, r"no tensor blk\.0\.ffn_gate_inp\.weight"),
    ],
)
def test_tensors_that_don_t_fit_the_configuration_are_named(
    change: dict[str, tuple[int, int] | None], named: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    describe(writer)
    for name, shape in (SHAPES | change).items():
        if shape is not None:
            writer.add_tensor(f"blk.0.{name}.weight", np.ones(shape, dtype=np.float32))
    add_rest(writer)
    finish(writer)
    with pytest.raises(SettingsError, match=named):
        open_weights(tmp_path / "m.gguf")


def test_a_changed_byte_or_a_cut_is_read_or_refused_never_worse(tmp_path: Path) -> None:
    write_layers(tmp_path / "m.gguf", GGMLQuantizationType.Q4_0)
    whole = (tmp_path / "m.gguf").read_bytes()
    header_end = whole.index(b"token_embd.weight") + 100
    source = random.Random(4)
    broken = [whole[: source.randrange(header_end)] for _ in range(40)]
    for _ in range(160):
        changed = bytearray(whole)
        changed[source.randrange(header_end)] = source.choice((0, 1, 255, source.randrange(256)))
        broken.append(bytes(changed))
    refused = 0
    for data in broken:
        (tmp_path / "m.gguf").write_bytes(data)
        try:
            with open_weights(tmp_path / "m.gguf") as opened:
                opened.read("layers.0.q.weight")
        except StartupError:
            refused += 1
    assert refused > 100
