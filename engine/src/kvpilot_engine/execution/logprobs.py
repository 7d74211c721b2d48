"""Log-probabilities of single tokens and of the most probable ones, from the model's own logits.

Natural logarithms of the softmax: before temperature, penalties and masks. Rows are treated alone.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.kernels.token_rating import rate_tokens


def compute_logprobs(
    logits: npt.NDArray[np.float32],
    target_ids: npt.ArrayLike,
    num_top: int | npt.NDArray[np.int64],
    *,
    rows: npt.NDArray[np.int64] | None = None,
) -> list[TokenLogprobs | None]:
    """The log-probability of each target in its row of [targets, vocabulary] logits; None for a row that holds NaN.

    `rows` says which rows of the logits are meant, one for each target; absent, all in order. Among equal logits the
    lower id counts as the more probable, as in greedy sampling.
    """
    targets = np.asarray(target_ids, np.int64)
    chosen = np.arange(targets.size, dtype=np.int64) if rows is None else rows
    num_tops = np.minimum(np.broadcast_to(np.asarray(num_top, np.int64), targets.shape), logits.shape[1])
    logprobs, ranks, top_ids, top_logprobs = rate_tokens(np.ascontiguousarray(logits), chosen, targets, num_tops)
    return [
        None
        if math.isnan(logprob)
        else TokenLogprobs(
            TokenId(target),
            logprob,
            rank,
            tuple(zip(map(TokenId, ids[:count].tolist()), values[:count].tolist(), strict=True)),
        )
        for target, logprob, rank, ids, values, count in zip(
            targets.tolist(), logprobs.tolist(), ranks.tolist(), top_ids, top_logprobs, num_tops.tolist(), strict=True
        )
    ]
