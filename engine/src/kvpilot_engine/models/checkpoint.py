"""A checkpoint of a known architecture as a WeightSource: our names, our order of rows, norms as they multiply.

Not for file formats (tensor_store.py). What the files hold is compared with what the configuration needs when the
checkpoint is opened: missing tensors, wrong sizes, and layer tensors that we would ignore are refused by name.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.models.architecture import TensorNames, TensorRows
from kvpilot_engine.models.decoder_config import DecoderConfig
from kvpilot_engine.models.tensor_shapes import tensor_shapes
from kvpilot_engine.models.tensor_store import TensorStore
from kvpilot_engine.models.weight_source import StorageType, StoredMatrix

_NOTHING_TO_COMPUTE = ("rotary_emb.inv_freq",)
"""Ends of layer tensors that old checkpoints carry and the configuration already tells."""
_LISTED = 5


class Checkpoint:
    """WeightSource over a store."""

    def __init__(
        self,
        config: DecoderConfig,
        store: TensorStore,
        names: TensorNames,
        *,
        norm_offset: float = 0.0,
        interleaved_rotary: bool = False,
    ) -> None:
        self._config = config
        self._store = store
        self._shapes = tensor_shapes(config)
        self._places = names.locate(config)
        self._norm_offset = np.float32(norm_offset)
        self._interleaved_rotary = interleaved_rotary
        self._check(names)

    @property
    def config(self) -> DecoderConfig:
        return self._config

    def read(self, name: str) -> npt.NDArray[np.float32]:
        place = self._place(name)
        array = self._reorder(name, self._store.read(place.name, _rows(place)))
        if name.endswith("norm.weight"):
            array = array + self._norm_offset
        return np.array(array, dtype=np.float32, order="C", copy=not _is_owned(array))

    def read_stored(self, name: str) -> StoredMatrix:
        place = self._place(name)
        num_rows, num_columns = self._shapes[name]
        found = self._store.read_stored(place.name, _rows(place))
        if found is None:
            return StoredMatrix(StorageType.F32, num_rows, num_columns, self.read(name).view(np.uint8))
        storage, data = found
        return StoredMatrix(storage, num_rows, num_columns, self._reorder(name, data))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._store.close()

    def _place(self, name: str) -> TensorRows:
        place = self._places.get(name)
        if place is None:
            raise SettingsError([f"{self._store.origin}: {self._config.architecture} has no tensor {name}"])
        return place

    def _reorder(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undo GGUF's interleaving of each head's rotated pairs, so that half rotation applies."""
        module = name.split(".")[-2]
        if not self._interleaved_rotary or module not in ("q", "k"):
            return array
        num_heads = self._config.num_heads if module == "q" else self._config.num_kv_heads
        pairs = array.reshape(num_heads, self._config.head_dim // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    def _check(self, names: TensorNames) -> None:
        shapes, found = self._shapes, self._store.shapes
        origin, problems = self._store.origin, []
        wanted = {place.name: (place.of, *shapes[name][1:]) for name, place in self._places.items()}
        missing = [name for name in wanted if name not in found]
        if missing:
            problems.append(f"{origin}: tensor {_list(missing)} is missing")
        problems += [
            f"{origin}: tensor {name} has size {_format(found[name])}; the configuration says {_format(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ][:_LISTED]
        layers = names.layer_prefix.partition("{")[0]
        unknown = [
            name
            for name in found
            if name.startswith(layers) and name not in wanted and not name.endswith(_NOTHING_TO_COMPUTE)
        ]
        if unknown:
            problems.append(f"{origin}: {self._config.architecture} as we compute it has no tensor {_list(unknown)}")
        if problems:
            raise SettingsError(problems)


def _rows(place: TensorRows) -> slice:
    return slice(place.start, place.start + place.num_rows)


def _is_owned(array: npt.NDArray[Any]) -> bool:
    return bool(array.flags.owndata and array.flags.writeable)


def _list(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _format(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
