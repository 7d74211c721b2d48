"""The small metadata reader against files written by the `gguf` library."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest

from kvpilot_engine.text.gguf_metadata import GGUFFormatError, is_gguf, read_gguf_metadata


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    path = tmp_path / "blob-without-suffix"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "Příliš 🐴")
    writer.add_uint32("a.uint32", 4_000_000_000)
    writer.add_int64("an.int64", -5)
    writer.add_float32("a.float32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_array("strings", ["", "x", "한"])
    writer.add_array("ints", [3, -1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_every_kind_of_value(gguf_path: Path) -> None:
    assert is_gguf(gguf_path)
    assert read_gguf_metadata(gguf_path) == {
        "general.architecture": "llama",
        "a.string": "Příliš 🐴",
        "a.uint32": 4_000_000_000,
        "an.int64": -5,
        "a.float32": 0.5,
        "a.bool": True,
        "strings": ["", "x", "한"],
        "ints": [3, -1, 2],
    }


def test_a_cut_off_file_is_an_error_at_every_length(gguf_path: Path) -> None:
    whole = gguf_path.read_bytes()
    end = whole.index(struct.pack("<iii", 3, -1, 2)) + 12
    for length in range(1, end):
        gguf_path.write_bytes(whole[:length])
        with pytest.raises(GGUFFormatError, match="blob-without-suffix"):
            read_gguf_metadata(gguf_path)


def test_other_files_are_not_gguf(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(64))
    assert not is_gguf(other)
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "absent")
    with pytest.raises(GGUFFormatError, match="not a GGUF file"):
        read_gguf_metadata(other)


@pytest.mark.parametrize("content", [b"GGUF" + struct.pack("<I", 1), b"GGUF" + struct.pack(">I", 3)])
def test_an_unreadable_version_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(content + bytes(32))
    with pytest.raises(GGUFFormatError, match="version"):
        read_gguf_metadata(path)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(b"")
    with pytest.raises(GGUFFormatError):
        read_gguf_metadata(path)


@pytest.mark.model
def test_agrees_with_the_gguf_library_on_the_real_model(smollm2_path: Path) -> None:
    path = next(smollm2_path.glob("*.gguf"))
    reader = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert read_gguf_metadata(path) == expected
