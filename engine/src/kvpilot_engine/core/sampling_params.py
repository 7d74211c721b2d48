"""How the next token of a request is chosen. Frozen and valid by construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import InvalidRequestError

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one sequence; raises InvalidRequestError naming the field, the value and the limit."""

    max_tokens: int
    """Most tokens to generate; 0 only together with prompt_logprobs, for a request that scores its prompt."""
    temperature: float = 1.0
    """0 is greedy; up to 2."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this share as probable as the most probable one, in [0, 1]; 0 keeps all."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output holds, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; greater than 0."""
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    """Added to single logits, each in [-100, 100]."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Token sequences that the output may not contain: the last token of each is forbidden after the others."""
    min_tokens: int = 0
    """No stop token is sampled before so many tokens were generated."""
    logprobs: int | None = None
    """Report each token's log-probability and those of so many most probable ones; None: report nothing."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt (all but the first)."""
    seed: int = 0
    """Key of the counter-based generator; a request without one draws it at admission, at the door."""
    stop_token_ids: frozenset[TokenId] = frozenset()
    """Tokens that end the sequence (the model's end tokens are included by the door)."""
    ignore_eos: bool = False
    """Go on past stop_token_ids until max_tokens."""

    def __post_init__(self) -> None:
        least = 0 if self.prompt_logprobs is not None else 1
        if self.max_tokens < least:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens}; it must be at least {least}", param="max_tokens"
            )
        self._require_between("temperature", 0.0, MAX_TEMPERATURE)
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequestError(f"top_p is {self.top_p}; it must be greater than 0 and at most 1", param="top_p")
        if self.top_k < 0:
            raise InvalidRequestError(f"top_k is {self.top_k}; it must be 0 (off) or more", param="top_k")
        self._require_between("min_p", 0.0, 1.0)
        self._require_between("presence_penalty", -MAX_PENALTY, MAX_PENALTY)
        self._require_between("frequency_penalty", -MAX_PENALTY, MAX_PENALTY)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise InvalidRequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must be greater than 0",
                param="repetition_penalty",
            )
        for token_id, bias in self.logit_bias:
            if not (math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS):
                raise InvalidRequestError(
                    f"logit_bias of token {token_id} is {bias}; it must be between -{MAX_LOGIT_BIAS:g} and "
                    f"{MAX_LOGIT_BIAS:g}",
                    param="logit_bias",
                )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}; it must be between 0 and max_tokens, which is {self.max_tokens}",
                param="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and wanted < 0:
                raise InvalidRequestError(f"{name} is {wanted}; it must be 0 or more", param=name)

    def _require_between(self, name: str, lowest: float, highest: float) -> None:
        value = getattr(self, name)
        if not (math.isfinite(value) and lowest <= value <= highest):
            raise InvalidRequestError(f"{name} is {value}; it must be between {lowest:g} and {highest:g}", param=name)

    @property
    def needs_history(self) -> bool:
        """True when the choice depends on the tokens before it, not only on the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.bad_words)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1
