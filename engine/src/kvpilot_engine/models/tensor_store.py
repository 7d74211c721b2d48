"""The port to the tensors of a checkpoint by the checkpoint's own names: one implementation per file format.

Not for what the names mean (architecture.py) nor for our own names (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpilot_engine.models.weight_source import StorageType


class TensorStore(Protocol):
    """Opened files. Rows are counted along the first dimension."""

    @property
    def origin(self) -> str:
        """The file or folder, for messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor, outermost dimension first."""
        ...

    def read(self, name: str, rows: slice) -> npt.NDArray[np.float32]:
        """Rows as float32; perhaps a view of the mapped file."""
        ...

    def read_stored(self, name: str, rows: slice) -> tuple[StorageType, npt.NDArray[np.uint8]] | None:
        """[rows, bytes of a row] as they lie in the file; None for a type that StorageType does not list."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...
