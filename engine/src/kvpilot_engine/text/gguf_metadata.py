"""Reads the key-value part of a GGUF file, and nothing else.

For the HTTP parent, which needs the tokenizer but neither tensors nor numpy. Weights are read with the `gguf` library,
in `models`: its reader makes two numpy arrays for each string, and a small vocabulary has 98,000 of them (2.0 s and
160 MB, where this takes 0.1 s and 10 MB).
Invariant: a file that is no GGUF file or ends early raises GGUFFormatError, never a partial result.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_STRING_TYPE = 8
_ARRAY_TYPE = 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GGUFFormatError(ValueError):
    """The file can't be read as GGUF."""


def is_gguf(path: Path) -> bool:
    """True for a file that starts like GGUF, whatever its name (blobs of the hub's cache have no suffix)."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_gguf_metadata(path: Path) -> dict[str, object]:
    """Return all keys with their values: int, float, bool, str or a list of these."""
    if not is_gguf(path):
        raise GGUFFormatError(f"{path}: not a GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _MetadataCursor(data).read_all()
        except (struct.error, IndexError, UnicodeDecodeError, RecursionError) as error:
            raise GGUFFormatError(f"{path}: damaged or cut off in its metadata: {error}") from error
        except GGUFFormatError as error:
            raise GGUFFormatError(f"{path}: {error}") from error


class _MetadataCursor:
    """A position in the mapped file that moves forward value by value."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = len(_MAGIC)

    def read_all(self) -> dict[str, object]:
        version = self._scalar("I")
        if version not in _SUPPORTED_VERSIONS:
            raise GGUFFormatError(f"GGUF version {version}; readable are {_SUPPORTED_VERSIONS}, little-endian")
        self._scalar("Q")  # number of tensors
        num_pairs = self._integer("Q")
        return {self._string(): self._value(self._integer("I")) for _ in range(num_pairs)}

    def _value(self, value_type: int) -> object:
        if value_type == _STRING_TYPE:
            return self._string()
        if value_type == _ARRAY_TYPE:
            element_type, length = self._integer("I"), self._integer("Q")
            if element_type in _SCALAR_FORMATS:
                return list(self._scalars(_SCALAR_FORMATS[element_type], length))
            return [self._value(element_type) for _ in range(length)]
        if value_type not in _SCALAR_FORMATS:
            raise GGUFFormatError(f"unknown value type {value_type}")
        return self._scalar(_SCALAR_FORMATS[value_type])

    def _scalars(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        layout = struct.Struct(f"<{count}{code}")
        values: tuple[int | float | bool, ...] = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return values

    def _scalar(self, code: str) -> int | float | bool:
        return self._scalars(code, 1)[0]

    def _integer(self, code: str) -> int:
        return int(self._scalar(code))

    def _string(self) -> str:
        return self._take(self._integer("Q")).decode("utf-8")

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._data):
            raise IndexError(f"{length} bytes wanted at {self._position}, the file has {len(self._data)}")
        taken = self._data[self._position : end]
        self._position = end
        return taken
