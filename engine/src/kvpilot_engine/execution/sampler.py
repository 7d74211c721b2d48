"""Logits to tokens: a pure function of each row, its parameters, its choice and its position; no state.

Every row is treated alone and in float64, so that a neighbour changes nothing and a tiny temperature can't overflow:
the largest logit is subtracted first, and what is divided is never positive.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.core.scheduler_output import ScheduledSequence
from kvpilot_engine.errors import ModelExecutionError
from kvpilot_engine.execution.counter_random import uniform

_FIRST_CANDIDATES = 1024
"""Sorting these first is enough for nearly every top-p; the whole vocabulary is sorted only when it is not."""


def sample(logits: Tensor, sequences: Iterable[ScheduledSequence]) -> list[TokenId]:
    """The next token of each sequence from its row of [sequences, vocabulary] logits."""
    return [
        sample_row(row, sequence.sampling, choice=sequence.choice, position=sequence.end_position)
        for row, sequence in zip(logits, sequences, strict=True)
    ]


def sample_row(logits: Tensor, params: SamplingParams, *, choice: int, position: int) -> TokenId:
    """Choose from [vocabulary] logits; `position` is the place that the token will take in its sequence."""
    highest = logits.max()
    if not torch.isfinite(highest):
        raise ModelExecutionError(f"the logits at position {position} are not finite")
    if params.is_greedy:
        # not argmax: among equal logits it may return any
        return TokenId(int((logits == highest).nonzero()[0]))
    weights = ((logits.double() - highest) / params.temperature).exp_()
    tokens: Tensor | None = None
    if params.top_k or params.top_p < 1.0:
        weights, tokens = _most_probable(weights, params)
    cumulative = weights.cumsum(0)
    draw = uniform(params.seed, choice, position) * cumulative[-1]
    # the first token whose cumulative weight exceeds the draw; rounding may push the draw onto the end
    index = min(int(torch.searchsorted(cumulative, draw, right=True)), weights.numel() - 1)
    return TokenId(int(tokens[index]) if tokens is not None else index)


def _most_probable(weights: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Weights and ids of the tokens that top_k and top_p keep, in falling order of weight, ties by id."""
    total = float(weights.sum())
    limit = min(params.top_k or weights.numel(), weights.numel())
    size = min(limit, _FIRST_CANDIDATES)
    while True:
        kept, tokens = _largest(weights, size)
        if params.top_k:
            total = float(kept.sum()) if size == limit else total
        before = kept.cumsum(0) - kept
        num_kept = int((before < params.top_p * total).sum()) if params.top_p < 1.0 else size
        if size == limit or (params.top_p < 1.0 and not params.top_k and num_kept < size):
            return kept[: max(1, num_kept)], tokens[: max(1, num_kept)]
        size = limit


def _largest(weights: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest weights in falling order with their ids; among equal ones the lower id first."""
    if size == weights.numel():
        return torch.sort(weights, descending=True, stable=True)
    threshold = torch.kthvalue(weights, weights.numel() - size + 1).values
    candidates = (weights >= threshold).nonzero().squeeze(1)
    kept, order = torch.sort(weights[candidates], descending=True, stable=True)
    return kept[:size], candidates[order][:size]
