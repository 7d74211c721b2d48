"""Logits to tokens: a pure function of each row, its parameters, its choice and its position; no state.

Every row is treated alone, so that a neighbour changes nothing, and its weights are float64 after the largest logit was
subtracted, so that a tiny temperature can't overflow. A row without a usable logit fails alone.

Order: the request's own processing of the logits (`logit_processing`), temperature, min_p, top_k, top_p, draw.
Temperature 0 and top_k 1 take the largest logit, the lowest id among equal ones. min_p and top_p look at what the
earlier ones left: top_p is a share of the weight of those tokens alone. Tokens that are kept are drawn in order of id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.scheduler_output import ScheduledSequence
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.execution.logit_processing import needs_processing, process
from kvpilot_engine.execution.logprobs import compute_logprobs
from kvpilot_engine.kernels.counter_random import uniforms
from kvpilot_engine.kernels.logit_rows import NOT_FINITE, NOTHING_ALLOWED
from kvpilot_engine.kernels.sampling import choose_tokens

_PROCESSED_BYTES = 16 * 2**20
"""Most bytes of processed copies at once (one row at least): rows with processing are taken in chunks of this size."""

Logits = npt.NDArray[np.float32]
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The same three parts of a ModelRunnerOutput."""

    sampled: dict[RequestId, TokenId] = field(default_factory=dict)
    logprobs: dict[RequestId, TokenLogprobs] = field(default_factory=dict)
    failed: dict[RequestId, str] = field(default_factory=dict)


def sample(logits: Logits, sequences: Iterable[ScheduledSequence]) -> SamplerOutput:
    """The next token of each sequence from its row of [sequences, vocabulary] logits, which are only read."""
    output = SamplerOutput()
    all_sequences = tuple(sequences)
    if len(all_sequences) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits for {len(all_sequences)} sequences")
    if not all_sequences:
        return output
    logits = np.ascontiguousarray(logits)
    plain = np.array([i for i, s in enumerate(all_sequences) if not needs_processing(s)], np.int64)
    processed = np.array([i for i, s in enumerate(all_sequences) if needs_processing(s)], np.int64)
    tokens = np.empty(len(all_sequences), np.int64)
    tokens[plain] = _choose(logits, plain, [all_sequences[i] for i in plain])
    chunk_size = max(1, _PROCESSED_BYTES // (logits.shape[1] * logits.itemsize))
    for start in range(0, processed.size, chunk_size):
        chunk = processed[start : start + chunk_size]
        tokens[chunk] = _choose_processed(logits, chunk, [all_sequences[i] for i in chunk])
    for sequence, token in zip(all_sequences, tokens.tolist(), strict=True):
        if token == NOT_FINITE:
            output.failed[sequence.request_id] = f"the logits at position {sequence.end_position} are not finite"
        elif token == NOTHING_ALLOWED:
            output.failed[sequence.request_id] = f"no token is allowed at position {sequence.end_position}"
        else:
            output.sampled[sequence.request_id] = TokenId(token)
    _add_logprobs(output, logits, all_sequences, tokens)
    return output


def _choose(logits: Logits, rows: _Rows, sequences: list[ScheduledSequence]) -> npt.NDArray[np.int64]:
    params = [s.sampling for s in sequences]
    draws = uniforms(
        np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], np.uint64),
        np.array([s.choice for s in sequences], np.uint64),
        np.array([s.end_position for s in sequences], np.uint64),
    )
    return choose_tokens(
        logits,
        rows,
        np.array([p.temperature for p in params], np.float64),
        np.array([p.top_k for p in params], np.int64),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.min_p for p in params], np.float64),
        draws,
    )


def _choose_processed(logits: Logits, rows: _Rows, sequences: list[ScheduledSequence]) -> npt.NDArray[np.int64]:
    copies = np.empty((rows.size, logits.shape[1]), np.float32)
    counts = np.zeros(logits.shape[1], np.int32)
    usable = [process(logits[row], s, copy, counts) for row, s, copy in zip(rows, sequences, copies, strict=True)]
    tokens = _choose(copies, np.arange(rows.size, dtype=np.int64), sequences)
    return np.where(usable, tokens, NOT_FINITE)


def _add_logprobs(
    output: SamplerOutput, logits: Logits, sequences: tuple[ScheduledSequence, ...], tokens: npt.NDArray[np.int64]
) -> None:
    wanted = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None and tokens[i] >= 0]
    if not wanted:
        return
    num_top = np.array([sequences[i].sampling.logprobs for i in wanted], np.int64)
    rated = compute_logprobs(logits, tokens[wanted], num_top, rows=np.array(wanted, np.int64))
    for i, logprobs in zip(wanted, rated, strict=True):
        if logprobs is not None:
            output.logprobs[sequences[i].request_id] = logprobs
