"""Writes the answer of one running generation: whole, or as a stream of events.

A streamed answer that fails before its first news is a plain error with its status; after that the stream gets one
`data:` object with `error`, no finish reason and no `[DONE]`, and is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Protocol

from aiohttp import web

from kvpilot_engine.server.app_context import CONTEXT
from kvpilot_engine.server.call_log import CLIENT_GONE, CallLog
from kvpilot_engine.server.deltas import Delta
from kvpilot_engine.server.error_mapping import map_error
from kvpilot_engine.server.generation import Generation
from kvpilot_engine.server.json_body import encode_json
from kvpilot_engine.server.openai_answers import AnswerWriter, WholeChoice
from kvpilot_engine.server.prepared_call import PreparedCall
from kvpilot_engine.server.sse import EventStream

_LOG = logging.getLogger(__name__)
MANY_TOKENS = 500
Batches = AsyncGenerator[Sequence[Delta], None]


async def answer_whole(
    request: web.Request, call: PreparedCall, generation: Generation, writer: AnswerWriter, log: CallLog
) -> web.Response:
    candidates = [
        WholeChoice(prompt_logprobs=candidate.prompt_logprobs, prompt_ids=candidate.request.prompt_token_ids)
        for candidate in generation.candidates
    ]
    async with contextlib.aclosing(generation.batches()) as batches:
        async for deltas in batches:
            for delta in deltas:
                candidates[delta.candidate].take(delta)
    choices = choose_best(
        candidates, generation.candidates, num_choices=call.num_choices, num_candidates=call.num_candidates
    )
    log.finish_reasons = [choice.finish_reason for choice in choices]
    num_told = sum(len(choice.tokens) + len(choice.prompt_logprobs) for choice in choices)
    usage = generation.usage
    body = await _encode(request, num_told, lambda: encode_json(writer.whole(choices, usage)))
    return web.Response(body=body, content_type="application/json")


async def _encode(request: web.Request, num_told_tokens: int, work: Callable[[], bytes]) -> bytes:
    """Log-probabilities of thousands of tokens take a second to write: other streams must not wait for that."""
    if num_told_tokens < MANY_TOKENS:
        return work()
    return await request.app[CONTEXT].in_text_thread(work)


class _Ranked(Protocol):
    @property
    def mean_logprob(self) -> float: ...


def choose_best(
    candidates: Sequence[WholeChoice], ranks: Sequence[_Ranked], *, num_choices: int, num_candidates: int
) -> list[WholeChoice]:
    """The num_choices likeliest of each prompt's candidates, by the mean log-probability of their tokens."""
    if num_candidates == num_choices:
        return list(candidates)
    chosen: list[WholeChoice] = []
    for start in range(0, len(candidates), num_candidates):
        of_prompt = range(start, start + num_candidates)
        ranked = sorted(of_prompt, key=lambda i: -ranks[i].mean_logprob)
        chosen += [candidates[i] for i in ranked[:num_choices]]
    return chosen


async def answer_stream(
    request: web.Request, call: PreparedCall, generation: Generation, writer: AnswerWriter, log: CallLog
) -> web.StreamResponse:
    async with contextlib.aclosing(generation.batches()) as batches:
        return await _stream(request, _Told(call, generation, writer, log), batches)


async def _stream(request: web.Request, told: _Told, batches: Batches) -> web.StreamResponse:
    settings = request.app[CONTEXT].settings
    upcoming = asyncio.ensure_future(anext(batches))
    try:
        # A refusal by the engine is to have its HTTP status, so the headers wait for the first news; not for ever,
        # since a request may queue for long and proxies want to see something.
        await asyncio.wait({upcoming}, timeout=settings.keep_alive_s)
        first = upcoming.result() if upcoming.done() else None
        async with EventStream(request, keep_alive_s=settings.keep_alive_s) as events:
            try:
                deltas = first or await upcoming
                num_told = sum(len(delta.tokens) for delta in deltas)  # with an echo, all of the prompt's
                await events.send(await _encode(request, num_told, partial(told.events, deltas)))
                async for deltas in batches:
                    await events.send(told.events(deltas))
                await events.send(told.last_events())
            except ConnectionResetError:
                told.log.status = CLIENT_GONE
            except Exception as error:  # noqa: BLE001  headers are out: the error can only be told inside the stream
                answer = map_error(error)
                _LOG.warning("stream ended by %s", answer.code, exc_info=error if answer.is_unexpected else None)
                request.app[CONTEXT].metrics.count_rejection(answer.code, is_overload=False)
                told.log.error = answer.code
                events.response.force_close()
                await events.send_json(answer.body)
        return events.response
    finally:
        if not upcoming.done():
            upcoming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await upcoming


class _Told:
    """What has been streamed of one call."""

    def __init__(self, call: PreparedCall, generation: Generation, writer: AnswerWriter, log: CallLog) -> None:
        self._call = call
        self._generation = generation
        self._writer = writer
        self.log = log
        self._reasons: dict[int, str] = {}

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """One piece of the body for all that came at once."""
        usage = self._generation.usage if self._call.continuous_usage else None
        for delta in deltas:
            if delta.finish_reason is not None:
                self._reasons[delta.candidate] = delta.finish_reason
        return b"".join([self._writer.events(delta, usage) for delta in deltas])

    def last_events(self) -> bytes:
        self.log.finish_reasons = [self._reasons[index] for index in sorted(self._reasons)]
        usage = self._writer.usage_event(self._generation.usage) if self._call.include_usage else b""
        return usage + b"data: [DONE]\n\n"
