"""The tensors of a GGUF file or of one in parts, in every quantization that the gguf package can undo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from kvpilot_engine.errors import ModelNotFoundError, SettingsError
from kvpilot_engine.models.gguf_header import GGUFHeader
from kvpilot_engine.models.gguf_reader import TensorReader
from kvpilot_engine.models.weight_source import StorageType


class GGUFStore:
    """TensorStore over all parts of one model."""

    def __init__(self, parts: list[Path]) -> None:
        self._origin = parts[0].name
        self._tensors: dict[str, Any] = {}
        self.metadata: dict[str, Any] = {}
        """Of the first part, but for the tokenizer's."""
        for number, path in enumerate(parts):
            try:
                reader = TensorReader(path)
                if number == 0:
                    self.metadata = _read_metadata(reader)
            except (ValueError, OSError, IndexError) as error:
                raise SettingsError([f"{path}: not a readable GGUF file ({error})"]) from error
            self._tensors |= {tensor.name: tensor for tensor in reader.tensors}
        _check_part_count(self.metadata, parts)
        # GGUF lists dimensions innermost first
        self._shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()}

    @property
    def origin(self) -> str:
        return self._origin

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    @property
    def header(self) -> GGUFHeader:
        return GGUFHeader(
            metadata=self.metadata,
            shapes=self._shapes,
            read_tensor=lambda name: self.read(name, slice(None)),
            origin=self._origin,
        )

    def read(self, name: str, rows: slice) -> npt.NDArray[np.float32]:
        tensor = self._tensors[name]
        try:
            return np.asarray(dequantize(tensor.data[rows], tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise SettingsError([f"{self._origin}: quantization {kind} of {name} is not supported"]) from error

    def read_stored(self, name: str, rows: slice) -> tuple[StorageType, npt.NDArray[np.uint8]] | None:
        tensor = self._tensors[name]
        try:
            storage = StorageType(tensor.tensor_type.name)
        except ValueError:
            return None
        return storage, tensor.data[rows].view(np.uint8)

    def close(self) -> None:
        self._tensors.clear()


def _read_metadata(reader: TensorReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}


def _check_part_count(metadata: dict[str, Any], parts: list[Path]) -> None:
    count = int(metadata.get("split.count", 1)) or 1
    if count != len(parts):
        raise ModelNotFoundError(f"{parts[0]} is one of {count} parts; {len(parts)} found by their names")
    if int(metadata.get("split.no", 0)) != 0:
        raise ModelNotFoundError(f"{parts[0]} is part {int(metadata['split.no']) + 1}, not the first one")
