"""The same file as the gguf package sees it, but for the elements of string arrays."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvpilot_engine.models.gguf_reader import TensorReader

WORDS = ["", "a", "é" * 50, "token"] * 25


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([0.5, -1.5])
    writer.add_array("x.empty", ["only"])
    writer.add_block_count(3)
    writer.add_string("x.after", "read")
    writer.add_array("x.counts", [1, 2, 3])
    writer.add_tensor("t", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_keys_scalars_arrays_of_numbers_and_tensors_are_the_package_s(file: Path) -> None:
    ours, theirs = TensorReader(file), gguf.GGUFReader(file)
    assert list(ours.fields) == list(theirs.fields)
    strings = {"tokenizer.ggml.tokens", "x.empty"}
    for name in ours.fields.keys() - strings:
        assert ours.fields[name].contents() == theirs.fields[name].contents(), name
    assert ours.fields["x.counts"].contents() == [1, 2, 3]
    assert [(t.name, t.data_offset) for t in ours.tensors] == [(t.name, t.data_offset) for t in theirs.tensors]
    assert (ours.tensors[0].data == theirs.tensors[0].data).all()


def test_vocabulary_is_one_piece(file: Path) -> None:
    assert len(TensorReader(file).fields["tokenizer.ggml.tokens"].parts) < 10
    assert len(gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].parts) > 2 * len(WORDS)


@pytest.mark.parametrize("missing", [2, 10, 500], ids=["in the last word", "in a length", "far before"])
def test_file_that_ends_within_its_vocabulary_is_an_error_not_a_guess(file: Path, missing: int) -> None:
    whole = file.read_bytes()
    end = whole.index(b"tokenizer.ggml.scores") - 8
    file.write_bytes(whole[: end - missing])
    with pytest.raises(ValueError, match="cut off"):
        TensorReader(file)
