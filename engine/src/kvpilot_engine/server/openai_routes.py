"""/v1 and its neighbours: read the body, run the generation, write the answer, streamed or whole.

Invariant: whichever way a handler ends (answer, error, client gone), what it started in the engine has ended too.
A streamed answer that fails before its first news is a plain error with its status; after that the stream gets one
`data:` object with `error`, no finish reason and no `[DONE]`, and is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from functools import partial

from aiohttp import web

from kvpilot_engine.errors import ModelNotServedError
from kvpilot_engine.server.app_context import CONTEXT, AppContext
from kvpilot_engine.server.error_mapping import map_error
from kvpilot_engine.server.generation import Delta, Generation
from kvpilot_engine.server.json_body import body_limit, json_response, read_body
from kvpilot_engine.server.openai_answers import (
    AnswerShape,
    ChatShape,
    CompletionShape,
    build_answer,
    build_chunk,
    build_usage_chunk,
)
from kvpilot_engine.server.request_builder import PreparedCall
from kvpilot_engine.server.request_id import REQUEST_ID_HEADER, request_id_of
from kvpilot_engine.server.sse import EventStream

_LOG = logging.getLogger(__name__)
routes = web.RouteTableDef()


@routes.get("/v1/models")
async def list_models(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    models = [_model_card(name, context) for name in context.settings.served_names]
    return json_response({"object": "list", "data": models})


@routes.get("/v1/models/{name:.+}")
async def show_model(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    name = request.match_info["name"]
    if name not in context.settings.served_names:
        raise ModelNotServedError(f"the model {name[:200]!r} does not exist here")
    return json_response(_model_card(name, context))


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, ChatShape(), is_chat=True)


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, CompletionShape(), is_chat=False)


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    builder, _ = context.require_builder()
    raw = await read_body(request, limit_bytes=body_limit(context.engine.max_model_len))
    return json_response(await context.in_text_thread(builder.tokenize, raw))


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    builder, _ = context.require_builder()
    raw = await read_body(request, limit_bytes=body_limit(context.engine.max_model_len))
    return json_response(await context.in_text_thread(builder.detokenize, raw))


def _model_card(name: str, context: AppContext) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "kvpilot",
        "root": context.settings.served_names[0],
        "max_model_len": context.engine.max_model_len or None,
    }


async def _answer(request: web.Request, shape: AnswerShape, *, is_chat: bool) -> web.StreamResponse:
    context = request.app[CONTEXT]
    context.num_calls += 1
    try:
        return await _generate(request, context, shape, is_chat=is_chat)
    finally:
        context.num_calls -= 1


async def _generate(
    request: web.Request, context: AppContext, shape: AnswerShape, *, is_chat: bool
) -> web.StreamResponse:
    arrived_at = context.monotonic()
    builder, text = context.require_builder()
    raw = await read_body(request, limit_bytes=body_limit(context.engine.max_model_len))
    prepare = builder.prepare_chat if is_chat else builder.prepare_completion
    call = await context.in_text_thread(partial(prepare, raw, created=context.unix_time()))
    generation = Generation(
        call,
        context.engine,
        text.tokenizer,
        context.metrics,
        arrived_at=arrived_at,
        deadline_s=context.settings.request_timeout_s,
        now=context.monotonic,
    )
    try:
        async with contextlib.aclosing(generation.deltas()) as deltas:
            if call.is_streamed:
                return await _stream(request, shape, call, generation, deltas)
            return await _collect(shape, call, generation, deltas)
    finally:
        generation.close()
        usage = generation.usage
        _LOG.info(
            "call %s: %d choices, %d prompt tokens, %d output tokens, %.3f s",
            call.call_id,
            len(call.requests),
            usage.num_prompt_tokens,
            usage.num_output_tokens,
            context.monotonic() - arrived_at,
        )


async def _collect(
    shape: AnswerShape, call: PreparedCall, generation: Generation, deltas: AsyncGenerator[Delta, None]
) -> web.Response:
    texts: list[list[str]] = [[] for _ in call.requests]
    reasons = ["" for _ in call.requests]
    async for delta in deltas:
        texts[delta.choice].append(delta.text)
        reasons[delta.choice] = delta.finish_reason or reasons[delta.choice]
    return json_response(build_answer(shape, call, ["".join(parts) for parts in texts], reasons, generation.usage))


async def _stream(
    request: web.Request,
    shape: AnswerShape,
    call: PreparedCall,
    generation: Generation,
    deltas: AsyncGenerator[Delta, None],
) -> web.StreamResponse:
    settings = request.app[CONTEXT].settings
    upcoming = asyncio.ensure_future(anext(deltas))
    try:
        # A refusal by the engine is to have its HTTP status, so the headers wait for the first news; not for ever,
        # since a request may queue for long and proxies want to see something.
        await asyncio.wait({upcoming}, timeout=settings.keep_alive_s)
        first = upcoming.result() if upcoming.done() else None
        events = EventStream(
            request, keep_alive_s=settings.keep_alive_s, headers={REQUEST_ID_HEADER: request_id_of(request)}
        )
        async with events:
            try:
                await _send_all(events, shape, call, first or await upcoming, deltas)
                if call.include_usage:
                    await events.send(build_usage_chunk(shape, call, generation.usage))
                await events.send_done()
            except ConnectionResetError:
                _LOG.info("call %s: the client is gone", call.call_id)
            except Exception as error:  # noqa: BLE001  headers are out: the error can only be told inside the stream
                answer = map_error(error)
                _LOG.warning(
                    "call %s ended by %s", call.call_id, answer.code, exc_info=error if answer.status == 500 else None
                )
                request.app[CONTEXT].metrics.count_rejection(answer.code, is_overload=False)
                await events.send(answer.body)
                events.response.force_close()
        return events.response
    finally:
        if not upcoming.done():
            upcoming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await upcoming


async def _send_all(
    events: EventStream, shape: AnswerShape, call: PreparedCall, first: Delta, deltas: AsyncGenerator[Delta, None]
) -> None:
    opened: set[int] = set()
    delta: Delta | None = first
    while delta is not None:
        if delta.choice not in opened:
            opened.add(delta.choice)
            opening = shape.opening_choice(delta.choice)
            if opening is not None:
                await events.send(build_chunk(shape, call, opening))
        for choice in shape.chunk_choice(delta):
            await events.send(build_chunk(shape, call, choice))
        delta = await anext(deltas, None)
