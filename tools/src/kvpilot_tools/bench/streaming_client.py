"""One streamed request to an OpenAI server, and when each piece of its answer came.

Every request ends in exactly one record: with a finish reason, or with the kind of its failure. Nothing is retried: a
refusal under load is a result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import aiohttp

Endpoint = Literal["completions", "chat"]
_PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_DETAIL_LIMIT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and how to ask it."""

    url: str
    """Base URL, without /v1."""
    model: str
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    timeout_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def path(self) -> str:
        return _PATHS[self.endpoint]

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")


def base_url(url: str) -> str:
    """The URL without a trailing slash or /v1, whichever form people have at hand."""
    return url.rstrip("/").removesuffix("/v1")


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What became of one request. All times are seconds since the run began."""

    index: int
    wanted_prompt_tokens: int
    wanted_output_tokens: int
    sent_s: float
    text_s: list[float] = field(default_factory=list)
    """When each event with text came."""
    ended_s: float = 0.0
    prompt_tokens: int | None = None
    """As the server counted."""
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    """Kind of failure: `http 429`, `connection`, `timeout`, `error event`, `cut off`, `bad event`, `no text`."""
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.text_s[0] - self.sent_s if self.text_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between neighbouring events with text."""
        return [later - earlier for earlier, later in zip(self.text_s, self.text_s[1:], strict=False)]

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean over the answer after its first token."""
        if self.output_tokens is None or self.output_tokens < 2 or len(self.text_s) < 2:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.output_tokens - 1)

    def fail(self, kind: str, detail: str) -> None:
        self.error = kind
        self.detail = detail[:_DETAIL_LIMIT]


async def stream_request(
    session: aiohttp.ClientSession,
    target: Target,
    body: Mapping[str, object],
    record: RequestRecord,
    *,
    run_began: float,
    on_text: Callable[[RequestRecord], None] | None = None,
) -> RequestRecord:
    """Send `body` as a stream with usage and fill `record`; never raises for what a server does."""
    payload = {**body, "model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    record.sent_s = time.perf_counter() - run_began
    try:
        async with session.post(
            target.url + target.path, json=payload, headers=target.headers, timeout=timeout
        ) as response:
            if response.status != 200:
                record.fail(f"http {response.status}", await response.text())
            else:
                async for line in response.content:
                    if line.startswith(b"data:"):
                        _take_event(line[5:].strip(), record, time.perf_counter() - run_began, on_text)
                    if record.error is not None:
                        break
    except TimeoutError:
        record.fail("timeout", f"no end within {target.timeout_s:g} s")
    except (aiohttp.ClientError, ConnectionError) as error:
        record.fail("connection", f"{type(error).__name__}: {error}")
    record.ended_s = time.perf_counter() - run_began
    if record.error is None:
        _check_whole(record)
    if record.output_tokens is None and record.text_s:
        record.output_tokens = len(record.text_s)
    return record


def _take_event(
    data: bytes, record: RequestRecord, now_s: float, on_text: Callable[[RequestRecord], None] | None
) -> None:
    if data == b"[DONE]":
        return
    try:
        event = json.loads(data)
    except ValueError as error:
        record.fail("bad event", f"{error}: {data[:100]!r}")
        return
    if "error" in event:
        record.fail("error event", json.dumps(event["error"]))
        return
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            record.text_s.append(now_s)
            if on_text is not None:
                on_text(record)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    usage = event.get("usage")
    if usage:
        record.prompt_tokens = usage.get("prompt_tokens")
        record.output_tokens = usage.get("completion_tokens")


def _check_whole(record: RequestRecord) -> None:
    if record.finish_reason is None:
        record.fail("cut off", "the stream ended without a finish reason")
    elif not record.text_s:
        record.fail("no text", f"finished by {record.finish_reason!r} without any text")
