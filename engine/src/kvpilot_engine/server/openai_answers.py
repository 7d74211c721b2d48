"""The shapes of OpenAI's answers, whole and in chunks. Pure: plain data in, JSON out.

Chunks are written as bytes, from parts that are encoded once per call: at 32 streams a server writes a thousand a
second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Protocol

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.core.token_logprobs import TokenLogprobs
from kvpilot_engine.server.deltas import Delta, ToldToken, Usage
from kvpilot_engine.server.json_body import encode_json
from kvpilot_engine.server.logprob_answers import LogprobShape
from kvpilot_engine.server.prepared_call import PreparedCall
from kvpilot_engine.server.tool_calls import WholeCalls, chunk_calls


@dataclass(slots=True)
class WholeChoice:
    """Everything that was told of one candidate."""

    text: list[str] = field(default_factory=list)
    tokens: list[ToldToken] = field(default_factory=list)
    calls: WholeCalls = field(default_factory=WholeCalls)
    output_ids: list[TokenId] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    prompt_ids: Sequence[TokenId] = ()

    def take(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.calls.take(delta.calls)
        self.output_ids += delta.output_ids
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class AnswerShape(Protocol):
    """What differs between chat and completions. `logprobs` is None when a call does not want them."""

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    @property
    def tells_prompt_once(self) -> bool:
        """What is told of the prompt stands beside the choices, not in each of them."""
        ...

    def whole_choice(self, index: int, choice: WholeChoice, logprobs: LogprobShape | None) -> dict[str, object]: ...

    def opening_choice(self, index: int) -> bytes | None:
        """The chunk before the first text of a choice; None: there is none."""
        ...

    def chunk_choices(self, index: int, delta: Delta, logprobs: LogprobShape | None) -> Iterable[bytes]:
        """The choice objects that carry this delta, one per chunk."""
        ...


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    tells_prompt_once = True

    def whole_choice(self, index: int, choice: WholeChoice, logprobs: LogprobShape | None) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        if calls := choice.calls.body:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": None if logprobs is None else logprobs.chat(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def opening_choice(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return encode_json({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk_choices(self, index: int, delta: Delta, logprobs: LogprobShape | None) -> Iterable[bytes]:
        told = b"null" if logprobs is None or not delta.tokens else encode_json(logprobs.chat(delta.tokens))
        if delta.text:
            text = encode_basestring(delta.text).encode()
            yield b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % (index, text, told)
            told = b"null"
        if delta.calls:
            calls = encode_json(chunk_calls(delta.calls))
            yield b'{"index":%d,"delta":{"tool_calls":%b},"logprobs":%b,"finish_reason":null}' % (index, calls, told)
            told = b"null"
        if delta.finish_reason:
            yield b'{"index":%d,"delta":{},"logprobs":%b,"finish_reason":"%b","stop_reason":%b}' % (
                index,
                told,
                delta.finish_reason.encode(),
                encode_json(delta.stop_reason),
            )


class CompletionShape:
    whole_object = "text_completion"
    chunk_object = "text_completion"
    tells_prompt_once = False

    def whole_choice(self, index: int, choice: WholeChoice, logprobs: LogprobShape | None) -> dict[str, object]:
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": None if logprobs is None else logprobs.completion(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def opening_choice(self, index: int) -> None:  # noqa: ARG002  the shape's signature
        return None

    def chunk_choices(self, index: int, delta: Delta, logprobs: LogprobShape | None) -> Iterable[bytes]:
        told = b"null" if logprobs is None or not delta.tokens else encode_json(logprobs.completion(delta.tokens))
        text = encode_basestring(delta.text).encode()
        end = b"null"
        if delta.finish_reason:
            end = b'"%b","stop_reason":%b' % (delta.finish_reason.encode(), encode_json(delta.stop_reason))
        yield b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, text, told, end)


class AnswerWriter:
    """The answers of one call."""

    def __init__(self, shape: AnswerShape, call: PreparedCall, logprobs: LogprobShape, *, fingerprint: str) -> None:
        self._shape = shape
        self._call = call
        self._logprobs = logprobs
        self._token_logprobs = None if call.num_top is None else logprobs
        self._fingerprint = fingerprint
        self._opened: set[int] = set()
        head = encode_json(self._head(shape.chunk_object))
        self._chunk_start = b"data: " + head[:-1] + b',"choices":['
        # `usage: null` is there exactly when usage was asked for: it comes in the last chunk then.
        self._chunk_end = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, object]:
        """The answer of a call that is not streamed."""
        answer = {**self._head(self._shape.whole_object), "choices": self._whole_choices(choices), "usage": usage.body}
        if self._call.shows_prompt_logprobs and self._shape.tells_prompt_once:
            answer["prompt_logprobs"] = self._logprobs.prompt(choices[0].prompt_logprobs)
        if self._call.tells_ids and self._shape.tells_prompt_once:
            answer["prompt_token_ids"] = choices[0].prompt_ids
        return answer

    def events(self, delta: Delta, usage: Usage | None) -> bytes:
        """The events that carry a delta. `usage` where each chunk is to tell it."""
        index = delta.candidate
        parts: list[bytes] = []
        is_first = index not in self._opened
        if is_first:
            self._opened.add(index)
            opening = self._shape.opening_choice(index)
            if opening is not None:
                parts.append(opening)
        parts += self._shape.chunk_choices(index, delta, self._token_logprobs)
        if self._call.tells_ids:
            self._add_ids(parts, delta, is_first=is_first)
        end = self._chunk_end if usage is None else b'],"usage":%b}\n\n' % encode_json(usage.body)
        return b"".join([b"%b%b%b" % (self._chunk_start, part, end) for part in parts])

    def _add_ids(self, parts: list[bytes], delta: Delta, *, is_first: bool) -> None:
        """The prompt's ids go with the first chunk of a choice, the output's with the last one of this delta."""
        if is_first:
            ids = encode_json(self._call.requests[delta.candidate].prompt_token_ids)
            parts[0] = b'%b,"prompt_token_ids":%b}' % (parts[0][:-1], ids)
        parts[-1] = b'%b,"token_ids":%b}' % (parts[-1][:-1], encode_json(delta.output_ids))

    def usage_event(self, usage: Usage) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._chunk_start, encode_json(usage.body))

    def _whole_choices(self, choices: Sequence[WholeChoice]) -> list[dict[str, object]]:
        told: list[dict[str, object]] = []
        for choice in choices:
            answer = self._shape.whole_choice(len(told), choice, self._token_logprobs)
            if self._call.shows_prompt_logprobs and not self._shape.tells_prompt_once:
                answer["prompt_logprobs"] = self._logprobs.prompt(choice.prompt_logprobs)
            if self._call.tells_ids:
                answer["token_ids"] = choice.output_ids
                if not self._shape.tells_prompt_once:
                    answer["prompt_token_ids"] = choice.prompt_ids
            told.append(answer)
        return told

    def _head(self, kind: str) -> dict[str, object]:
        return {
            "id": self._call.call_id,
            "object": kind,
            "created": self._call.created,
            "model": self._call.model,
            "system_fingerprint": self._fingerprint,
        }
