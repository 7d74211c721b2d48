"""One API call between its body and its answer: what the engine gets and how its outputs are to be told. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.text.output_plan import OutputPlan
from kvpilot_engine.text.prompt_text import PromptText


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a call brings beside its body."""

    created: int
    """Seconds since 1970."""
    cache_salt: str = ""
    """From the trusted header, where one is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """Candidate i is requests[i]; num_candidates of them belong to one prompt, of which num_choices are answered."""

    call_id: str
    created: int
    model: str
    requests: tuple[GenerationRequest, ...]
    num_choices: int
    num_candidates: int
    stop_strings: tuple[str, ...]
    own_stop_ids: frozenset[TokenId]
    """stop_token_ids of the body, without the model's own end tokens."""
    keeps_stop: bool
    skip_specials: bool
    plan: OutputPlan
    """The form of the outputs: how tool calls are read from them."""
    echoes: tuple[PromptText, ...]
    """One per prompt; empty when the answer does not begin with the prompt."""
    num_top: int | None
    """Log-probabilities are told, with those of so many most probable tokens; None: none are told."""
    shows_prompt_logprobs: bool
    """The answer has prompt_logprobs of its own (beside or without an echo)."""
    tokens_as_ids: bool
    tells_ids: bool
    """The answer has the ids of prompt and output."""
    is_streamed: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts; a prompt counts once, however many choices it has."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.num_candidates])

    def echo_of(self, candidate: int) -> PromptText | None:
        return self.echoes[candidate // self.num_candidates] if self.echoes else None
