"""The tensors of a Hugging Face folder's safetensors files, mapped and read without torch.

numpy has no bfloat16: it is the upper half of a float32, so sixteen zero bits make it one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpilot_engine.errors import ModelNotFoundError, SettingsError
from kvpilot_engine.models.weight_source import StorageType

_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_ITEM_BYTES = {StorageType.F32: 4, StorageType.F16: 2, StorageType.BF16: 2}


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    file: str


class SafetensorsStore:
    """TensorStore over one file or many."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, _Entry] = {}
        index = _read_index(folder)
        files = sorted(set(index.values())) if index else sorted(file.name for file in folder.glob("*.safetensors"))
        if not files:
            raise ModelNotFoundError(f"{folder} holds no .safetensors file")
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise ModelNotFoundError(f"{folder}: {', '.join(missing)} missing")
        for file in files:
            self._entries |= _map_file(folder / file)
        lost = [
            f"{folder / file}: tensor {name} is missing" for name, file in index.items() if name not in self._entries
        ]
        if lost:
            raise SettingsError(lost[:5])
        self._shapes = {name: entry.shape for name, entry in self._entries.items()}

    @property
    def origin(self) -> str:
        return str(self._folder)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, rows: slice) -> npt.NDArray[np.float32]:
        storage, raw = self.read_stored(name, rows)
        shape = (raw.shape[0], *self._shapes[name][1:])
        if storage is StorageType.BF16:
            widened = raw.view(np.uint16).astype(np.uint32) << 16
            return widened.view(np.float32).reshape(shape)
        values = raw.view(np.float16 if storage is StorageType.F16 else np.float32)
        return values.astype(np.float32).reshape(shape)

    def read_stored(self, name: str, rows: slice) -> tuple[StorageType, npt.NDArray[np.uint8]]:
        entry = self._entries[name]
        try:
            storage = StorageType(entry.dtype)
            row_bytes = _ITEM_BYTES[storage] * math.prod(entry.shape[1:])
        except (ValueError, KeyError) as error:
            supported = ", ".join(_ITEM_BYTES)
            raise SettingsError(
                [f"{entry.file}: tensor {name} has type {entry.dtype}; supported in safetensors: {supported}"]
            ) from error
        return storage, entry.data.reshape(-1, row_bytes)[rows]

    def close(self) -> None:
        self._entries.clear()


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor → file of a checkpoint in shards; empty where there is no index."""
    path = folder / _INDEX
    if not path.is_file():
        return {}
    try:
        weight_map: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError([f"{path}: not an index of safetensors files ({error})"]) from error
    return {name: Path(file).name for name, file in weight_map.items()}


def _map_file(path: Path) -> dict[str, _Entry]:
    """Length of the header, the header as JSON, then the bytes that its offsets count from."""
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
        length = int(mapped[:_LENGTH_BYTES].view("<u8")[0])
        data = mapped[_LENGTH_BYTES + length :]
        header = json.loads(bytes(mapped[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        return {name: _parse_entry(name, entry, data, path.name) for name, entry in header.items() if name[:2] != "__"}
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OSError) as error:
        raise SettingsError([f"{path}: not a readable safetensors file ({error})"]) from error


def _parse_entry(name: str, entry: dict[str, Any], data: npt.NDArray[np.uint8], file: str) -> _Entry:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    if not 0 <= begin <= end <= data.size:
        raise ValueError(f"tensor {name} ends at byte {end} of {data.size}")
    item_bytes = _ITEM_BYTES.get(StorageType(dtype)) if dtype in _ITEM_BYTES else None
    if item_bytes is not None and item_bytes * math.prod(shape) != end - begin:
        raise ValueError(f"tensor {name} has {end - begin} bytes for {dtype} of size {list(shape)}")
    return _Entry(dtype, shape, data[begin:end], file)
