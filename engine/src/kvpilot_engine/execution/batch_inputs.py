"""A step's plan as arrays. Pure: the same plan gives the same arrays; nothing here knows the model or torch.

Rows are the scheduled tokens, sequence after sequence. All integers are int64.

    rows        | seq 0 ... | seq 1 ... |        query_start[i] .. query_start[i + 1]
    positions     the last rows of the sequence: seq_lens[i] - rows .. seq_lens[i]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpilot_engine.core.ids import NULL_BLOCK
from kvpilot_engine.core.scheduler_output import ScheduledSequence, SchedulerOutput

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    token_ids: Integers
    """[rows]"""
    positions: Integers
    """[rows]"""
    query_start: Integers
    """[sequences + 1]: first row of each sequence, then the number of rows."""
    seq_lens: Integers
    """[sequences]: tokens of the sequence after this step."""
    block_tables: Integers
    """[sequences, longest table]: block ids; padded with the null block."""
    slot_mapping: Integers
    """[rows]: block_id * block_size + offset, where the row's key and value are written."""
    block_size: int
    sample_rows: Integers
    """[sampled]: the last row of each sequence that samples."""
    sampled: tuple[ScheduledSequence, ...]
    """Those sequences, in the order of sample_rows."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def build_batch_inputs(plan: SchedulerOutput, block_size: int) -> BatchInputs:
    """The arrays of a plan with at least one sequence."""
    scheduled = plan.scheduled
    counts = np.array([len(s.token_ids) for s in scheduled], dtype=np.int64)
    starts = np.array([s.start_position for s in scheduled], dtype=np.int64)
    query_start = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    tables = np.full((len(scheduled), max(len(s.block_ids) for s in scheduled)), NULL_BLOCK, dtype=np.int64)
    for index, sequence in enumerate(scheduled):
        tables[index, : len(sequence.block_ids)] = sequence.block_ids
    row_sequence = np.repeat(np.arange(len(scheduled)), counts)
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[row_sequence]
    slots = tables[row_sequence, positions // block_size] * block_size + positions % block_size
    samples = np.array([s.samples for s in scheduled], dtype=bool)
    return BatchInputs(
        token_ids=np.array([token for s in scheduled for token in s.token_ids], dtype=np.int64),
        positions=positions,
        query_start=query_start,
        seq_lens=starts + counts,
        block_tables=tables,
        slot_mapping=slots,
        block_size=block_size,
        sample_rows=(query_start[1:] - 1)[samples],
        sampled=tuple(s for s in scheduled if s.samples),
    )
