"""/v1 and its neighbours: read the body, run the generation, hand it to its answer.

Invariant: whichever way a handler ends (answer, error, client gone), what it started in the engine has ended too.
"""

from __future__ import annotations

import math
from functools import partial

from aiohttp import web

from kvpilot_engine.errors import InvalidRequestError, ModelNotServedError
from kvpilot_engine.server.answering import answer_stream, answer_whole
from kvpilot_engine.server.app_context import CONTEXT, AppContext
from kvpilot_engine.server.call_log import CallLog, start_call_log
from kvpilot_engine.server.generation import Generation
from kvpilot_engine.server.json_body import body_limit, json_response, read_body
from kvpilot_engine.server.logprob_answers import LogprobShape
from kvpilot_engine.server.openai_answers import AnswerShape, AnswerWriter, ChatShape, CompletionShape
from kvpilot_engine.server.prepared_call import CallOptions
from kvpilot_engine.server.sampling_fields import MAX_SALT

TIMEOUT_HEADER = "x-request-timeout"
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
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": context.started_at,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "kvpilot",
        "root": context.settings.model_root or context.settings.served_names[0],
        "parent": None,
        "max_model_len": context.engine.max_model_len or None,
        "permission": [permission],
    }


async def _answer(request: web.Request, shape: AnswerShape, *, is_chat: bool) -> web.StreamResponse:
    context = request.app[CONTEXT]
    log = start_call_log(request, arrived_at=context.monotonic())
    context.num_calls += 1
    try:
        return await _generate(request, context, shape, log, is_chat=is_chat)
    finally:
        context.num_calls -= 1


async def _generate(
    request: web.Request, context: AppContext, shape: AnswerShape, log: CallLog, *, is_chat: bool
) -> web.StreamResponse:
    builder, text = context.require_builder()
    deadline_s = _deadline_s(request, context.settings.request_timeout_s)
    options = CallOptions(created=context.unix_time(), cache_salt=_cache_salt(request, context))
    raw = await read_body(request, limit_bytes=body_limit(context.engine.max_model_len))
    prepare = builder.prepare_chat if is_chat else builder.prepare_completion
    call = await context.in_text_thread(partial(prepare, raw, options))
    log.call_id, log.model, log.is_streamed, log.num_choices = (
        call.call_id,
        call.model,
        call.is_streamed,
        len(call.requests),
    )
    generation = Generation(
        call,
        context.engine,
        text.tokenizer,
        context.metrics,
        arrived_at=log.arrived_at,
        deadline_s=deadline_s,
        now=context.monotonic,
    )
    logprobs = LogprobShape(text.tokenizer, num_top=call.num_top or 0, as_ids=call.tokens_as_ids)
    writer = AnswerWriter(shape, call, logprobs, fingerprint=context.fingerprint)
    try:
        if call.is_streamed:
            return await answer_stream(request, call, generation, writer, log)
        return await answer_whole(request, call, generation, writer, log)
    finally:
        generation.close()
        usage = generation.usage
        log.prompt_tokens, log.cached_tokens = usage.num_prompt_tokens, usage.num_cached_tokens
        log.output_tokens = usage.num_output_tokens
        first_token_s = generation.first_token_s
        log.first_token_s = None if first_token_s is None else round(first_token_s, 4)


def _deadline_s(request: web.Request, longest_s: float) -> float:
    """The client's own deadline, never beyond the server's."""
    raw = request.headers.get(TIMEOUT_HEADER)
    if raw is None:
        return longest_s
    try:
        wanted = float(raw)
    except ValueError:
        wanted = math.nan
    if not wanted > 0:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} is {raw[:40]!r}; a number of seconds above 0 is needed", param=TIMEOUT_HEADER
        )
    return min(wanted, longest_s)


def _cache_salt(request: web.Request, context: AppContext) -> str:
    header = context.settings.cache_salt_header
    salt = request.headers.get(header, "") if header else ""
    if len(salt) > MAX_SALT:
        raise InvalidRequestError(f"{header} has {len(salt)} characters; at most {MAX_SALT} are allowed", param=header)
    return salt
