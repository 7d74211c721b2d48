"""What a generation tells the answer: news of one candidate, and the counts of a call. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.text.tool_parser import ToolCallDelta


@dataclass(frozen=True, slots=True)
class ToldToken:
    """One token of prompt or output with its log-probabilities."""

    token_id: TokenId
    offset: int
    """Where it begins, in characters of the answer's text."""
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt: nothing precedes it."""


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one candidate: text that may be sent (perhaps none), and why it ended if it did."""

    candidate: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or the id of stop_token_ids that ended it."""
    tokens: tuple[ToldToken, ...] = ()
    """The tokens that this text consists of, when log-probabilities are told."""
    calls: tuple[ToolCallDelta, ...] = ()
    """News of tool calls, at most one entry per call."""
    output_ids: tuple[TokenId, ...] = ()
    """All tokens generated since the last news, when ids are told."""

    @property
    def is_news(self) -> bool:
        return bool(self.text or self.calls or self.finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
