"""A request as the core takes it: ids instead of text, valid by construction."""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot_engine.core.grammar import GrammarSpec
from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate. `n` choices are n requests; they share prompt blocks through the prefix cache."""

    request_id: RequestId
    prompt_token_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    choice: int = 0
    """Index among the choices of one API call; part of the sampling key."""
    priority: int = 0
    """Lower is served first; among equals the earlier one. May be negative."""
    grammar: GrammarSpec | None = None
    """What the output must match; None: anything."""
    cache_salt: str = ""
    """Requests with different salts never share cached blocks."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequestError("the prompt has no tokens; at least 1 is needed", param="prompt")
