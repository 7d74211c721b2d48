"""The log-probabilities of one position, as the sampler reports them."""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot_engine.core.ids import TokenId


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token that stands (or was sampled) at a position, and the most probable ones there.

    Natural logarithms of the model's own distribution: before temperature, penalties and masks.
    """

    token_id: TokenId
    logprob: float
    rank: int
    """1 for the most probable token."""
    top: tuple[tuple[TokenId, float], ...] = ()
    """The most probable tokens with their log-probabilities, falling; as many as were asked for."""
