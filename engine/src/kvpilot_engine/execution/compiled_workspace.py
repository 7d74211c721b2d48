"""The arena of the compiled path: every array that a step computes in, allocated once for the token budget.

A step allocates nothing that grows with the model beyond it; its size is what the memory budget counts as activations.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from kvpilot_engine.execution.batch_inputs import Integers
from kvpilot_engine.execution.step_runner import rows_of_logits
from kvpilot_engine.kernels.attention_runs import RUNS
from kvpilot_engine.kernels.linear_input import LinearInput
from kvpilot_engine.kernels.paged_attention import ITEM_FIELDS, HeadLayout
from kvpilot_engine.models.decoder_config import DecoderConfig

Floats = npt.NDArray[np.float32]

_ROW_ARRAYS = ("hidden", "projected", "gate_up")
_INPUTS = ("normed", "attended", "gated")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledWorkspace:
    """Arrays of max_rows rows, float32 unless said otherwise."""

    hidden: Floats
    """[rows, hidden]: the residual; kept until the next step."""
    normed: LinearInput
    qkv: Floats
    """Twice the rows where the input is precise."""
    attended: LinearInput
    projected: Floats
    """[rows, hidden]: what is added to the residual next."""
    gate_up: Floats
    gated: LinearInput
    logits: Floats
    """[rows of logits at once, twice where their input is precise; vocabulary]"""
    head: LinearInput
    items: Integers
    attention_scratch: Floats
    """[threads, ...]"""
    attention_runs: Integers
    next_item: Integers

    @classmethod
    def allocate(
        cls, config: DecoderConfig, layout: HeadLayout, *, max_rows: int, num_threads: int, in_tiles: bool
    ) -> Self:
        def floats(*shape: int) -> Floats:
            return np.empty(shape, np.float32)

        hidden, inner, query = config.hidden_size, config.intermediate_size, config.query_size
        at_once = rows_of_logits(config.vocab_size)
        copies = 1 if in_tiles else 2
        return cls(
            hidden=floats(max_rows, hidden),
            normed=LinearInput.allocate(max_rows, hidden, in_tiles=in_tiles, is_precise=True),
            qkv=floats(copies * max_rows, query + 2 * config.kv_size),
            attended=LinearInput.allocate(max_rows, query, in_tiles=in_tiles),
            projected=floats(max_rows, hidden),
            gate_up=floats(max_rows, 2 * inner),
            gated=LinearInput.allocate(max_rows, inner, in_tiles=in_tiles),
            logits=floats(copies * at_once, config.vocab_size),
            head=LinearInput.allocate(at_once, hidden, in_tiles=in_tiles, is_precise=True),
            items=np.empty((max_rows, ITEM_FIELDS), np.int64),
            attention_scratch=floats(num_threads, layout.scratch_floats()),
            attention_runs=np.empty((num_threads, 2, RUNS), np.int64),
            next_item=np.zeros(1, np.int64),
        )

    def first(self, num_rows: int) -> CompiledWorkspace:
        """The same arrays, those with max_rows rows cut to the first; made once a step, for slicing costs."""
        copies = 1 if self.normed.rest is None else 2
        return replace(
            self,
            qkv=self.qkv[: copies * num_rows],
            **{name: getattr(self, name)[:num_rows] for name in _ROW_ARRAYS},
            **{name: getattr(self, name).first(num_rows) for name in _INPUTS},
        )

    @property
    def size_bytes(self) -> int:
        arrays = [getattr(self, field.name) for field in fields(self)]
        return sum(array.size_bytes if isinstance(array, LinearInput) else array.nbytes for array in arrays)
