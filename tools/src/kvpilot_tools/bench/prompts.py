"""Prompts of an exact number of tokens, all different, from a seed.

The server counts: by its /tokenize where it has one (vLLM's form or llama.cpp's), else by the usage of a request for
one token. Prompts are plain words, the first ones drawn at random, so that no cache of prefixes helps. Where a length
can't be met exactly (a template that needs more than that), the nearest is taken and its true length is told.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from kvpilot_tools.bench.streaming_client import Target

CountTokens = Callable[[str], Awaitable[int]]
_TRIES = 6
_PROBE = "one two three"
# Words that nearly every tokenizer has as one token with their space.
_WORD_TEXT = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea body information
    back parent face others level office door health person art war history party result change morning reason
    research girl guy moment air teacher force education
"""
_WORDS = _WORD_TEXT.split()


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    num_tokens: int
    """As the server counts."""


class PromptSizeError(Exception):
    """The server can't be asked how long a prompt is."""


async def build_prompt(rng: random.Random, num_tokens: int, count_tokens: CountTokens) -> Prompt:
    """A prompt of `num_tokens` tokens, or the nearest that was found."""
    words = [rng.choice(_WORDS) for _ in range(num_tokens)]
    tries: list[Prompt] = []
    for _ in range(_TRIES):
        text = " ".join(words)
        counted = await count_tokens(text)
        tries.append(Prompt(text, counted))
        if counted == num_tokens:
            break
        if counted < num_tokens:
            words += [rng.choice(_WORDS) for _ in range(num_tokens - counted)]
        else:
            # a word is a token at least, so this many fewer words are never too many
            del words[max(1, len(words) - max(1, (counted - num_tokens) * len(words) // counted)) :]
    return min(tries, key=lambda prompt: abs(prompt.num_tokens - num_tokens))


async def choose_counter(session: aiohttp.ClientSession, target: Target) -> CountTokens:
    """The best way to count that this server has; raises PromptSizeError when it has none."""
    for form, fields in enumerate(_tokenize_forms(target, _PROBE)):
        if await _tokenize(session, target, fields):
            return partial(_count_by_tokenize, session, target, form)
    await _usage_of(session, target, _PROBE)
    return partial(_usage_of, session, target)


async def _count_by_tokenize(session: aiohttp.ClientSession, target: Target, form: int, text: str) -> int:
    counted = await _tokenize(session, target, _tokenize_forms(target, text)[form])
    if not counted:
        raise PromptSizeError(f"{target.url}/tokenize answered before and does not now")
    return counted


def message(text: str) -> list[dict[str, str]]:
    """The chat that holds a prompt."""
    return [{"role": "user", "content": text}]


def _tokenize_forms(target: Target, text: str) -> list[dict[str, object]]:
    if target.endpoint == "chat":
        return [{"model": target.model, "messages": message(text)}]
    return [{"model": target.model, "prompt": text}, {"content": text, "add_special": True}]


async def _tokenize(session: aiohttp.ClientSession, target: Target, fields: dict[str, object]) -> int:
    """The number of tokens, 0 when the server does not understand."""
    try:
        async with session.post(f"{target.url}/tokenize", json=fields, headers=target.headers) as response:
            if response.status != 200:
                return 0
            answer: Any = await response.json(content_type=None)
    except (aiohttp.ClientError, ValueError):
        return 0
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0


async def _usage_of(session: aiohttp.ClientSession, target: Target, text: str) -> int:
    asked = {"messages": message(text)} if target.endpoint == "chat" else {"prompt": text}
    body = {"model": target.model, "max_tokens": 1, **asked}
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    try:
        async with session.post(
            target.url + target.path, json=body, headers=target.headers, timeout=timeout
        ) as response:
            if response.status != 200:
                said = (await response.text())[:300]
                raise PromptSizeError(f"{target.url}{target.path} answered {response.status}: {said}")
            answer: Any = await response.json(content_type=None)
    except (aiohttp.ClientError, ValueError, TimeoutError) as error:
        raise PromptSizeError(f"{target.url}{target.path}: {type(error).__name__}: {error}") from error
    usage = answer.get("usage") if isinstance(answer, dict) else None
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(counted, int):
        raise PromptSizeError(f"{target.url}{target.path} tells no usage.prompt_tokens, and there is no /tokenize")
    return counted
