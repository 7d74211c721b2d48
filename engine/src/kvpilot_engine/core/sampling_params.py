"""How the next token of a request is chosen. Frozen and valid by construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import InvalidRequestError

MAX_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one sequence; raises InvalidRequestError naming the field, the value and the limit."""

    max_tokens: int
    """Most tokens to generate, at least 1."""
    temperature: float = 1.0
    """0 is greedy; up to 2."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    seed: int = 0
    """Key of the counter-based generator; a request without one draws it at admission, at the door."""
    stop_token_ids: frozenset[TokenId] = frozenset()
    """Tokens that end the sequence (the model's end tokens are included by the door)."""
    ignore_eos: bool = False
    """Go on past stop_token_ids until max_tokens."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {self.max_tokens}; it must be at least 1", param="max_tokens")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= MAX_TEMPERATURE):
            raise InvalidRequestError(
                f"temperature is {self.temperature}; it must be between 0 and {MAX_TEMPERATURE:g}", param="temperature"
            )
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequestError(f"top_p is {self.top_p}; it must be greater than 0 and at most 1", param="top_p")
        if self.top_k < 0:
            raise InvalidRequestError(f"top_k is {self.top_k}; it must be 0 (off) or more", param="top_k")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1
