"""The port to an opened checkpoint: tensors by our own names, whatever the format and the architecture call them.

    embedding.weight                         [vocabulary, hidden]
    norm.weight                              [hidden]
    head.weight                              [vocabulary, hidden]; not there when the head is tied to the embedding
    layers.{i}.attention_norm.weight         [hidden]
    layers.{i}.{q,k,v}.weight / .bias        [heads * head_dim, hidden] in half-rotation order / [heads * head_dim]
    layers.{i}.{q_norm,k_norm}.weight        [head_dim], with qk_norm
    layers.{i}.o.weight / .bias              [hidden, heads * head_dim]
    layers.{i}.attention_post_norm.weight    [hidden], with post_norms
    layers.{i}.mlp_norm.weight               [hidden]
    layers.{i}.{gate,up}.weight              [intermediate, hidden]
    layers.{i}.down.weight                   [hidden, intermediate]
    layers.{i}.mlp_post_norm.weight          [hidden], with post_norms

Norm weights are what the normalized row is multiplied by (Gemma's stored w is read as 1 + w). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from kvpilot_engine.models.decoder_config import DecoderConfig


class StorageType(StrEnum):
    """How a checkpoint keeps numbers: GGUF's block formats, or plain ones."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix as it lies in the checkpoint, rows in our order."""

    storage: StorageType
    num_rows: int
    num_columns: int
    data: npt.NDArray[np.uint8]
    """[rows, bytes of a row]; perhaps a view of the mapped file, valid until the source is closed."""


class WeightSource(Protocol):
    """An opened checkpoint. Closing it drops its file mappings; arrays from read() stay valid."""

    @property
    def config(self) -> DecoderConfig: ...

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32, owned by the caller; SettingsError when it is missing or can't be read."""
        ...

    def read_stored(self, name: str) -> StoredMatrix:
        """A matrix without conversion; types that StorageType does not list come as F32."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
