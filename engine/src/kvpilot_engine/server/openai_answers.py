"""The shapes of OpenAI's answers, whole and in chunks. Pure: plain data in, JSON data out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvpilot_engine.server.generation import Delta, Usage
from kvpilot_engine.server.request_builder import PreparedCall


class AnswerShape(Protocol):
    """What differs between chat and completions."""

    def whole_choice(self, index: int, text: str, finish_reason: str) -> dict[str, object]: ...

    def opening_choice(self, index: int) -> dict[str, object] | None:
        """The chunk before the first text of a choice; None: there is none."""
        ...

    def chunk_choice(self, delta: Delta) -> Iterable[dict[str, object]]:
        """The choice objects that carry this delta, one per chunk."""
        ...

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_choice(self, index: int, text: str, finish_reason: str) -> dict[str, object]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def opening_choice(self, index: int) -> dict[str, object]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def chunk_choice(self, delta: Delta) -> Iterable[dict[str, object]]:
        if delta.text:
            yield self._chunk(delta.choice, {"content": delta.text}, None)
        if delta.finish_reason:
            yield self._chunk(delta.choice, {}, delta.finish_reason)

    def _chunk(self, index: int, content: dict[str, object], finish_reason: str | None) -> dict[str, object]:
        return {"index": index, "delta": content, "logprobs": None, "finish_reason": finish_reason}


class CompletionShape:
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole_choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, object]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def opening_choice(self, index: int) -> None:  # noqa: ARG002  the shape's signature
        return None

    def chunk_choice(self, delta: Delta) -> Iterable[dict[str, object]]:
        yield self.whole_choice(delta.choice, delta.text, delta.finish_reason)


def build_answer(
    shape: AnswerShape, call: PreparedCall, texts: list[str], finish_reasons: list[str], usage: Usage
) -> dict[str, object]:
    choices = [
        shape.whole_choice(index, text, reason)
        for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True))
    ]
    return {**_head(shape.whole_object, call), "choices": choices, "usage": usage.body}


def build_chunk(shape: AnswerShape, call: PreparedCall, choice: dict[str, object]) -> dict[str, object]:
    """One event. `usage: null` is there exactly when usage was asked for: it comes in the last chunk then."""
    chunk = {**_head(shape.chunk_object, call), "choices": [choice]}
    if call.include_usage:
        chunk["usage"] = None
    return chunk


def build_usage_chunk(shape: AnswerShape, call: PreparedCall, usage: Usage) -> dict[str, object]:
    return {**_head(shape.chunk_object, call), "choices": [], "usage": usage.body}


def _head(kind: str, call: PreparedCall) -> dict[str, object]:
    return {"id": call.call_id, "object": kind, "created": call.created, "model": call.model}
