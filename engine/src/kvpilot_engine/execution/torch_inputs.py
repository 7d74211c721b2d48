"""A step's arrays as the tensors that the torch reference takes: rows padded to whole tiles of its linear layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpilot_engine.execution.batch_inputs import BatchInputs, Integers
from kvpilot_engine.layers.attention import AttentionMetadata
from kvpilot_engine.layers.linear import padded_rows


@dataclass(frozen=True, slots=True)
class TorchInputs:
    token_ids: Tensor
    """[padded rows]"""
    positions: Tensor
    """[padded rows]"""
    attention: AttentionMetadata


def build_torch_inputs(inputs: BatchInputs) -> TorchInputs:
    """Padding rows are token 0 at position 0; the metadata knows the real rows only."""
    padding = padded_rows(inputs.num_rows) - inputs.num_rows

    def pad(values: Integers) -> Tensor:
        return torch.from_numpy(np.pad(values, (0, padding)))

    return TorchInputs(
        token_ids=pad(inputs.token_ids),
        positions=pad(inputs.positions),
        attention=AttentionMetadata(
            query_start=torch.from_numpy(inputs.query_start),
            seq_lens=torch.from_numpy(inputs.seq_lens),
            block_tables=torch.from_numpy(inputs.block_tables),
            slot_mapping=torch.from_numpy(inputs.slot_mapping),
            block_size=inputs.block_size,
        ),
    )
