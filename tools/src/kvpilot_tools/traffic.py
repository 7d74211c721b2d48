"""Chat requests against one engine Service: a single question, and bounded load whose every outcome is counted."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

REQUEST_TIMEOUT_S = 300.0
ROUTE_LIMIT_S = 30.0
"""A Service's rules on the node follow a pod's readiness by a moment."""


@dataclass(slots=True)
class Outcomes:
    """What became of the requests; every started request is in exactly one of them."""

    finished: Counter[str] = field(default_factory=Counter)
    """By finish reason."""
    refused: Counter[int] = field(default_factory=Counter)
    """By HTTP status; 429 and 503 are retried by real clients."""
    lost: list[str] = field(default_factory=list)
    """Broken connections and streams that ended without a finish reason."""
    tokens: int = 0

    @property
    def started(self) -> int:
        return sum(self.finished.values()) + sum(self.refused.values()) + len(self.lost)


def wait_routed(base_url: str) -> None:
    """Wait until the Service leads to a ready pod; raises TimeoutError after ROUTE_LIMIT_S."""
    deadline = time.monotonic() + ROUTE_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(f"{base_url}/readyz", timeout=5):  # noqa: S310 - always http, made here
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{base_url}/readyz did not answer within {ROUTE_LIMIT_S:g} s: {error}") from error
        time.sleep(0.2)


async def ask(base_url: str, model: str, question: str, *, max_tokens: int = 64) -> str:
    """One question, greedy; returns the answer. Raises aiohttp.ClientError with the server's words on a bad status."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{base_url}/v1/chat/completions", json=body) as response,
    ):
        if response.status != 200:
            raise aiohttp.ClientError(f"{response.status}: {await response.text()}")
        answer: str = (await response.json())["choices"][0]["message"]["content"]
        return answer


async def stream_once(session: aiohttp.ClientSession, base_url: str, body: dict[str, object], seen: Outcomes) -> None:
    """One streamed completion; its outcome goes to `seen`."""
    reason = None
    try:
        async with session.post(f"{base_url}/v1/completions", json={**body, "stream": True}) as response:
            if response.status != 200:
                seen.refused[response.status] += 1
                return
            async for raw in response.content:
                line = raw.decode().strip()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    seen.lost.append(chunk["error"]["message"])
                    return
                for choice in chunk["choices"]:
                    seen.tokens += 1
                    reason = choice["finish_reason"] or reason
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.lost.append(f"{time.strftime('%X')} {type(error).__name__}: {error}")
        return
    if reason is None:
        seen.lost.append("the stream ended without a finish reason")
    else:
        seen.finished[reason] += 1


async def drive(
    base_url: str, model: str, *, streams: int, seconds: float, prompt_words: int, max_tokens: int, seen: Outcomes
) -> None:
    """Keep `streams` requests running for `seconds`, each with another prompt, and let the last ones finish."""
    deadline = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    # One connection a request: Kubernetes balances connections, and a new replica must get its share.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one_stream(number: int) -> None:
            turn = 0
            while time.monotonic() < deadline:
                words = " ".join(f"w{number}x{turn}y{i}" for i in range(prompt_words))
                body = {"model": model, "prompt": words, "max_tokens": max_tokens, "ignore_eos": True}
                refused_before = sum(seen.refused.values())
                await stream_once(session, base_url, body, seen)
                turn += 1
                if sum(seen.refused.values()) > refused_before:
                    await asyncio.sleep(1.0)

        await asyncio.gather(*(one_stream(number) for number in range(streams)))
