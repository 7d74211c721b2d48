"""What a request does to its own logits before a token is chosen: bias, masks and penalties, on a copy of the row.

The order is the one that users of vLLM know: grammar mask, bad words, min_tokens, logit bias, repetition penalty, then
frequency and presence penalty. (Masks give minus infinity, which no later step changes, so that their place does not
matter; a bias is there before the penalties.) Temperature, top_k, top_p and min_p come later, in the kernel.

Invariant: a grammar is never left. Where it allows nothing but what min_tokens or bad_words forbid, those give way.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.scheduler_output import ScheduledSequence
from kvpilot_engine.kernels.logit_edits import copy_allowed, penalize

Row = npt.NDArray[np.float32]


def needs_processing(sequence: ScheduledSequence) -> bool:
    """False when the sequence's token is chosen from the model's logits as they are."""
    sampling = sequence.sampling
    return bool(
        sequence.token_mask is not None or sampling.needs_history or sampling.logit_bias or _forbids_stopping(sequence)
    )


def process(source: Row, sequence: ScheduledSequence, row: Row, counts: npt.NDArray[np.int32]) -> bool:
    """Write the processed logits of one sequence to `row`; False when the model's logits are not finite.

    `counts` is workspace: a 0 for each token of the vocabulary, before and after.
    """
    if not _copy(source, sequence, row):
        return False
    forbidden = _forbidden_tokens(sequence)
    if forbidden:
        row[forbidden] = -np.inf
        if sequence.token_mask is not None and row.max() == -np.inf:
            _copy(source, sequence, row)
    sampling = sequence.sampling
    if sampling.logit_bias:
        tokens = [token for token, _ in sampling.logit_bias]
        row[tokens] += np.array([bias for _, bias in sampling.logit_bias], np.float32)
    if sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty:
        penalize(
            row,
            _to_array(sequence.history),
            sequence.num_prompt_tokens,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            counts,
        )
    return True


def _to_array(tokens: tuple[TokenId, ...]) -> npt.NDArray[np.int32]:
    """Twice as fast as np.array, which looks at the type of each element."""
    return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), np.int32)


def _copy(source: Row, sequence: ScheduledSequence, row: Row) -> bool:
    if sequence.token_mask is None:
        row[:] = source
        # the largest is NaN if any is, and then this is False
        return bool(row.max() < np.inf)
    return bool(copy_allowed(source, np.asarray(sequence.token_mask).view(np.uint32), row))


def _forbids_stopping(sequence: ScheduledSequence) -> bool:
    return bool(sequence.sampling.stop_token_ids) and sequence.num_output_tokens < sequence.sampling.min_tokens


def _forbidden_tokens(sequence: ScheduledSequence) -> list[int]:
    forbidden: list[int] = list(sequence.sampling.stop_token_ids) if _forbids_stopping(sequence) else []
    if sequence.sampling.bad_words:
        output = sequence.history[sequence.num_prompt_tokens :]
        for *before, last in sequence.sampling.bad_words:
            if output[len(output) - len(before) :] == tuple(before):
                forbidden.append(last)
    return forbidden
