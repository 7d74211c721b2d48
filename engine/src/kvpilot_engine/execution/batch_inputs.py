"""A step's plan as tensors. Pure: the same plan gives the same tensors; nothing here knows the model.

Rows are the scheduled tokens, sequence after sequence, then padding up to whole tiles of the linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpilot_engine.core.ids import NULL_BLOCK
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput
from kvpilot_engine.layers.attention import AttentionMetadata
from kvpilot_engine.layers.linear import padded_rows


@dataclass(frozen=True, slots=True)
class BatchInputs:
    token_ids: Tensor
    """[padded rows]"""
    positions: Tensor
    """[padded rows]"""
    sample_rows: Tensor
    """[sampled]: the last row of each sequence that samples."""
    sampled: tuple[ScheduledSequence, ...]
    """Those sequences, in the order of sample_rows."""
    attention: AttentionMetadata


def build_batch_inputs(plan: SchedulerOutput, block_size: int) -> BatchInputs:
    """The tensors of a plan with at least one sequence."""
    scheduled = plan.scheduled
    counts = np.array([len(s.token_ids) for s in scheduled], dtype=np.int64)
    num_rows = int(counts.sum())
    rows = padded_rows(num_rows)
    token_ids = np.zeros(rows, dtype=np.int64)
    positions = np.zeros(rows, dtype=np.int64)
    slots = np.empty(num_rows, dtype=np.int64)
    tables = np.full((len(scheduled), max(len(s.block_ids) for s in scheduled)), NULL_BLOCK, dtype=np.int64)
    ends = np.cumsum(counts)
    for index, sequence in enumerate(scheduled):
        part = slice(int(ends[index] - counts[index]), int(ends[index]))
        place = np.arange(sequence.start_position, sequence.end_position)
        tables[index, : len(sequence.block_ids)] = sequence.block_ids
        token_ids[part] = sequence.token_ids
        positions[part] = place
        slots[part] = tables[index, place // block_size] * block_size + place % block_size
    samples = np.array([s.samples for s in scheduled], dtype=bool)
    return BatchInputs(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        sample_rows=torch.from_numpy((ends - 1)[samples]),
        sampled=tuple(s for s in scheduled if s.samples),
        attention=AttentionMetadata(
            query_start=torch.from_numpy(np.concatenate([[0], ends])),
            seq_lens=torch.tensor([s.end_position for s in scheduled], dtype=torch.int64),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(slots),
            block_size=block_size,
        ),
    )
