"""The attention interface: what a step looks like to a backend, as frozen tensors passed explicitly.

Not for the arithmetic (one module per backend) and not for who is scheduled. Invariant: a backend's result for a query
row is a function of that row and of its own sequence's keys and values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The rows of one step, sequence after sequence. All integers are int64.

    rows        | seq 0 ... | seq 1 ... |        query_start[i] .. query_start[i + 1]
    positions     the last rows of the sequence: seq_lens[i] - rows .. seq_lens[i]
    """

    query_start: Tensor
    """[sequences + 1]: first row of each sequence, then the number of rows."""
    seq_lens: Tensor
    """[sequences]: tokens of the sequence after this step."""
    block_tables: Tensor
    """[sequences, longest table]: block ids; padded with the null block."""
    slot_mapping: Tensor
    """[rows]: block_id * block_size + offset, where the row's key and value are written."""
    block_size: int

    @property
    def num_rows(self) -> int:
        return int(self.slot_mapping.numel())


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of one layer: [blocks, kv_heads, block_size, head_dim] each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The head layout and what is done with scores, the same in every layer; and the windows that layers have."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    """Scaled scores become softcap * tanh(score / softcap)."""
    windows: tuple[int | None, ...] = (None,)
    """Those that forward may be called with, each once. None: a query sees all tokens before it."""

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads


class AttentionPlan(Protocol):
    """What a backend derived from the metadata, once per step and used by every layer."""

    @property
    def num_rows(self) -> int: ...


PlanT = TypeVar("PlanT", bound=AttentionPlan)


class AttentionBackend(Protocol[PlanT]):
    """Writes a step's keys and values and attends over the paged cache."""

    def plan(self, metadata: AttentionMetadata) -> PlanT:
        """Derive the index tensors of this step."""
        ...

    def write_kv(self, layer: LayerKV, keys: Tensor, values: Tensor, plan: PlanT) -> None:
        """Store [rows, kv_heads, head_dim] keys and values at the planned slots."""
        ...

    def forward(self, queries: Tensor, layer: LayerKV, plan: PlanT, window: int | None = None) -> Tensor:
        """Causal attention of [rows, heads, head_dim] queries over the cache; write_kv must have run.

        With a window a query sees that many tokens, itself included; blocks wholly before it are not read.
        """
        ...


def empty_layer_kv(num_blocks: int, shape: AttentionShape, block_size: int) -> LayerKV:
    """Uninitialised storage: pages become resident when first written. Block 0 (null) is zeroed, for it is read."""
    size = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
    layer = LayerKV(torch.empty(size, dtype=torch.float32), torch.empty(size, dtype=torch.float32))
    layer.keys[0].zero_()
    layer.values[0].zero_()
    return layer
