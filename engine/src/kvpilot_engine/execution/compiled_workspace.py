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
from kvpilot_engine.kernels.activation_quantization import QuantizedRows
from kvpilot_engine.kernels.paged_attention import ITEM_FIELDS, RUNS, HeadLayout
from kvpilot_engine.models.decoder_config import DecoderConfig

Floats = npt.NDArray[np.float32]

_ROW_ARRAYS = ("hidden", "normed", "rest", "attended", "projected", "gate_up", "gated")
_ROW_QUANTIZED = ("attended_quantized", "gated_quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledWorkspace:
    """Arrays of max_rows rows, float32 unless said otherwise."""

    hidden: Floats
    """[rows, hidden]: the residual; kept until the next step."""
    normed: Floats
    normed_quantized: QuantizedRows
    """Twice the rows: the second half for what the first byte leaves over (kernels/precise_linear.py)."""
    rest: Floats
    qkv: Floats
    """Twice the rows."""
    attended: Floats
    attended_quantized: QuantizedRows
    projected: Floats
    """[rows, hidden]: what is added to the residual next."""
    gate_up: Floats
    gated: Floats
    gated_quantized: QuantizedRows
    logits: Floats
    """[twice the rows of logits at once, vocabulary]"""
    head_input: Floats
    head_quantized: QuantizedRows
    """Twice the rows."""
    head_rest: Floats
    items: Integers
    attention_scratch: Floats
    """[threads, ...]"""
    attention_runs: Integers
    next_item: Integers

    @classmethod
    def allocate(cls, config: DecoderConfig, layout: HeadLayout, *, max_rows: int, num_threads: int) -> Self:
        def floats(*shape: int) -> Floats:
            return np.empty(shape, np.float32)

        hidden, inner, query = config.hidden_size, config.intermediate_size, config.query_size
        at_once = rows_of_logits(config.vocab_size)
        return cls(
            hidden=floats(max_rows, hidden),
            normed=floats(max_rows, hidden),
            normed_quantized=QuantizedRows.allocate(2 * max_rows, hidden),
            rest=floats(max_rows, hidden),
            qkv=floats(2 * max_rows, query + 2 * config.kv_size),
            attended=floats(max_rows, query),
            attended_quantized=QuantizedRows.allocate(max_rows, query),
            projected=floats(max_rows, hidden),
            gate_up=floats(max_rows, 2 * inner),
            gated=floats(max_rows, inner),
            gated_quantized=QuantizedRows.allocate(max_rows, inner),
            logits=floats(2 * at_once, config.vocab_size),
            head_input=floats(at_once, hidden),
            head_quantized=QuantizedRows.allocate(2 * at_once, hidden),
            head_rest=floats(at_once, hidden),
            items=np.empty((max_rows, ITEM_FIELDS), np.int64),
            attention_scratch=floats(num_threads, layout.scratch_floats()),
            attention_runs=np.empty((num_threads, 2, RUNS), np.int64),
            next_item=np.zeros(1, np.int64),
        )

    def first(self, num_rows: int) -> CompiledWorkspace:
        """The same arrays, those with max_rows rows cut to the first; made once a step, for slicing costs."""
        return replace(
            self,
            qkv=self.qkv[: 2 * num_rows],
            normed_quantized=self.normed_quantized.first(2 * num_rows),
            **{name: getattr(self, name)[:num_rows] for name in _ROW_ARRAYS},
            **{name: getattr(self, name).first(num_rows) for name in _ROW_QUANTIZED},
        )

    @property
    def size_bytes(self) -> int:
        arrays = [getattr(self, field.name) for field in fields(self)]
        return sum(array.size_bytes if isinstance(array, QuantizedRows) else array.nbytes for array in arrays)
