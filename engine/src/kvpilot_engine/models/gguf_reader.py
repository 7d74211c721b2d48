"""The gguf package's reader without its cost for a vocabulary: arrays are one piece, not two numpy arrays a string.

A small vocabulary has 98,000 strings: 3 s of a start and 160 MB that the weights could use. Elements of string arrays
are not to be had here; the text side reads them by itself (text/gguf_metadata.py).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

Parts = tuple[int, list[np.ndarray[Any, Any]], list[int], list[GGUFValueType]]
"""Size in bytes, the pieces, which of them are values, and the types from the outermost inwards."""


class TensorReader(GGUFReader):
    """Overrides how one value is taken apart; anything unusual is left to the package."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Parts:
        if raw_type != GGUFValueType.ARRAY:
            return self._parts_of_package(orig_offs, raw_type)
        element_type, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        start, count = orig_offs + 12, int(length[0])
        scalar = self.gguf_scalar_to_np.get(element_type[0])
        if count and scalar is not None:
            values = self._get(start, scalar, count)
            types = [GGUFValueType.ARRAY, GGUFValueType(element_type[0])]
            return 12 + int(values.nbytes), [element_type, length, values], [2], types
        if element_type[0] != GGUFValueType.STRING or self.byte_order == "S":
            return self._parts_of_package(orig_offs, raw_type)
        size = _size_of_strings(self.data[start:].data, count)
        strings = self._get(start, np.uint8, size)
        return 12 + size, [element_type, length, strings], [], [GGUFValueType.ARRAY, GGUFValueType.STRING]

    def _parts_of_package(self, orig_offs: int, raw_type: int) -> Parts:
        parts: Parts = super()._get_field_parts(orig_offs, raw_type)
        return parts


def _size_of_strings(data: memoryview, count: int) -> int:
    """Bytes of so many strings, each led by its length. ValueError when they don't end within the data."""
    read_length = struct.Struct("<Q").unpack_from
    position = 0
    try:
        for _ in range(count):
            position += 8 + read_length(data, position)[0]
    except struct.error as error:
        raise ValueError(f"cut off in an array of strings: {error}") from error
    if position > len(data):
        raise ValueError("cut off in an array of strings")
    return position
