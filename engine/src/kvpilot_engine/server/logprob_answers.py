"""Log-probabilities in the shapes of OpenAI's two APIs, and prompt log-probabilities in vLLM's. Pure.

Numbers are finite: minus infinity is told as FLOOR. A token that is part of a character has U+FFFD in its text; its
`bytes` are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.errors import ModelExecutionError
from kvpilot_engine.server.deltas import ToldToken
from kvpilot_engine.text.tokenizer import Tokenizer

FLOOR = -9999.0


def floor_logprob(value: float) -> float:
    """A number that JSON can hold. NaN is a fault of the model's arithmetic, never a value."""
    if math.isnan(value):
        raise ModelExecutionError("the model's log-probabilities are not numbers")
    return value if value > FLOOR else FLOOR


class LogprobShape:
    """One per call; `as_ids` names tokens `token_id:N` instead of by their text, which may be ambiguous."""

    def __init__(self, tokenizer: Tokenizer, *, num_top: int, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids
        self._texts: dict[TokenId, str] = {}

    def chat(self, tokens: Iterable[ToldToken]) -> dict[str, object]:
        """`logprobs` of a chat choice or chunk."""
        content = []
        for token in tokens:
            entry = token.logprobs
            top = () if entry is None else entry.top[: self._num_top]
            content.append(
                {
                    **self._chat_token(token.token_id, 0.0 if entry is None else entry.logprob),
                    "top_logprobs": [self._chat_token(token_id, logprob) for token_id, logprob in top],
                }
            )
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[ToldToken]) -> dict[str, object]:
        """`logprobs` of a completion: four lists of one entry per token."""
        entries = [token.logprobs for token in tokens]
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [None if entry is None else floor_logprob(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top_by_name(entry) for entry in entries],
            "text_offset": [token.offset for token in tokens],
        }

    def prompt(self, entries: Iterable[TokenLogprobs]) -> list[dict[str, object] | None]:
        """`prompt_logprobs`: None for the first token, then each token and the most probable ones by id."""
        return [None, *(self._prompt_position(entry) for entry in entries)]

    def _prompt_position(self, entry: TokenLogprobs) -> dict[str, object]:
        position: dict[str, object] = {}
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
        for token_id, logprob, rank in [(entry.token_id, entry.logprob, entry.rank), *ranked]:
            position[str(token_id)] = {
                "logprob": floor_logprob(logprob),
                "rank": rank,
                "decoded_token": self._text(token_id),
            }
        return position

    def _top_by_name(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, and the token itself; of two with one name the more probable stays."""
        named: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._num_top], (entry.token_id, entry.logprob)):
            named.setdefault(self._name(token_id), floor_logprob(logprob))
        return named

    def _chat_token(self, token_id: TokenId, logprob: float) -> dict[str, object]:
        return {
            "token": self._name(token_id),
            "logprob": floor_logprob(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _name(self, token_id: TokenId) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._text(token_id)

    def _text(self, token_id: TokenId) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
            self._texts[token_id] = text
        return text
