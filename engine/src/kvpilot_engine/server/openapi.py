"""The OpenAPI description of this server, at /openapi.json: every route, every status, limits of the loaded model.

Invariant: each route of the application is described (a test compares them).
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from kvpilot_engine.server.app_context import CONTEXT
from kvpilot_engine.server.json_body import json_response
from kvpilot_engine.server.openapi_answers import ANSWERS, ref
from kvpilot_engine.server.openapi_bodies import PARTS, ModelLimits, Schema, build_body_schemas
from kvpilot_engine.server.ops_routes import ENGINE_VERSION

PATH = "/openapi.json"
routes = web.RouteTableDef()

_ERRORS = {
    400: "a field is missing, wrong or not supported, or the body is not JSON; `param` names the field",
    401: "the API key is missing or wrong",
    404: "no such model",
    413: "the body is larger than 4 MiB and 64 bytes for each token of the context",
    415: "the body is not application/json",
    429: "the queue is full; `Retry-After` says when to ask again",
    500: "the model failed on this request, or a bug",
    503: "loading, draining or gone",
    504: "the deadline has passed",
}
_RETRY_AFTER: Schema = {"description": "seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
_TEXT_BODY_ERRORS = (400, 404, 413, 415, 500, 503)
_GENERATION_ERRORS = (400, 401, 404, 413, 415, 429, 500, 503, 504)


@routes.get(PATH)
async def show_description(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    engine = context.engine
    limits = ModelLimits(
        engine.max_model_len, engine.vocab_size, context.settings.max_logprobs, context.settings.served_names
    )
    return json_response(build_description(limits))


def build_description(limits: ModelLimits) -> Schema:
    """The whole document. Pure."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvpilot engine",
            "version": ENGINE_VERSION,
            "description": "An OpenAI-compatible server for one model. Every answer has the header x-request-id.",
        },
        "paths": _build_paths(limits.served_names),
        "components": {
            "schemas": {**build_body_schemas(limits), **PARTS, **ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _build_paths(served_names: tuple[str, ...]) -> Schema:
    name: Schema = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1, **({"enum": list(served_names)} if served_names else {})},
    }
    since: Schema = {
        "name": "since",
        "in": "query",
        "description": "tell out-of-memory events after this number only",
        "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
    }
    deadline: Schema = {
        "name": "x-request-timeout",
        "in": "header",
        "description": "seconds; never more than the server's own deadline",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }
    probe: Schema = {
        "200": _json("yes", "Probe"),
        "503": _json("no", "Probe"),
    }
    return {
        "/v1/models": {"get": _operation("listModels", "The served names", _json("all", "ModelList"), errors=(401,))},
        "/v1/models/{name}": {
            "get": _operation("showModel", "One of them", _json("it", "Model"), errors=(401, 404), parameters=[name])
        },
        "/v1/chat/completions": {
            "post": _operation(
                "createChatCompletion",
                "Answer a conversation",
                _streamable("ChatCompletion", "ChatCompletionChunk"),
                body="ChatCompletionRequest",
                errors=_GENERATION_ERRORS,
                parameters=[deadline],
            )
        },
        "/v1/completions": {
            "post": _operation(
                "createCompletion",
                "Continue a text, or several",
                _streamable("Completion", "CompletionChunk"),
                body="CompletionRequest",
                errors=_GENERATION_ERRORS,
                parameters=[deadline],
            )
        },
        "/tokenize": {
            "post": _operation(
                "tokenize",
                "Token ids of a text or a conversation",
                _json("ids", "Tokens"),
                body="TokenizeRequest",
                errors=_TEXT_BODY_ERRORS,
            )
        },
        "/detokenize": {
            "post": _operation(
                "detokenize",
                "The text of token ids",
                _json("text", "Text"),
                body="DetokenizeRequest",
                errors=_TEXT_BODY_ERRORS,
            )
        },
        "/livez": {"get": _operation("isAlive", "Whether the engine moves", responses=probe)},
        "/readyz": {"get": _operation("isReady", "Whether a token can be produced", responses=probe)},
        "/health": {"get": _operation("isHealthy", "The same as /readyz", responses=probe)},
        "/version": {"get": _operation("showVersion", "This server's version", _json("it", "Version"))},
        "/metrics": {
            "get": _operation(
                "showMetrics",
                "Metrics for Prometheus",
                {
                    "description": "the exposition format that the header Accept asks for",
                    "content": {
                        kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")
                    },
                },
            )
        },
        "/engine/memory": {"get": _operation("showMemory", "Where the device's bytes go", _json("it", "Memory"))},
        "/engine/state": {
            "get": _operation(
                "showState", "The engine in numbers", _json("it", "State"), errors=(400,), parameters=[since]
            )
        },
        PATH: {
            "get": _operation(
                "showDescription",
                "This description",
                {"description": "it", "content": {"application/json": {"schema": {"type": "object"}}}},
            )
        },
    }


def _operation(
    operation_id: str,
    summary: str,
    answer: Schema | None = None,
    *,
    responses: Schema | None = None,
    body: str | None = None,
    errors: tuple[int, ...] = (),
    parameters: list[Schema] | None = None,
) -> dict[str, Any]:
    all_responses: Schema = dict(responses or {})
    if answer is not None:
        all_responses["200"] = answer
    for status in errors:
        all_responses[str(status)] = _error(status)
    operation: Schema = {"operationId": operation_id, "summary": summary, "responses": all_responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(body)}}}
    if parameters:
        operation["parameters"] = parameters
    if 401 in errors:
        # a server without keys asks for none
        operation["security"] = [{"key": []}, {}]
    return operation


def _error(status: int) -> Schema:
    answer = _json(_ERRORS[status], "Error")
    if status in (429, 503):
        answer["headers"] = {"Retry-After": _RETRY_AFTER}
    return answer


def _json(description: str, schema: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": ref(schema)}}}


def _event(chunk: str) -> Schema:
    """One event of a stream; its data is JSON, but for the end marker."""
    return {
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {
                "type": "string",
                "anyOf": [
                    {"const": "[DONE]"},
                    *(
                        {"contentMediaType": "application/json", "contentSchema": ref(name)}
                        for name in (chunk, "Error")
                    ),
                ],
            },
            "event": {"const": "message"},
        },
    }


def _streamable(whole: str, chunk: str) -> Schema:
    return {
        "description": (
            f'the whole answer; with "stream": true server-sent events, each `data:` one {chunk}, the last [DONE]. '
            "A stream that fails after its first event ends with one `data:` Error and without [DONE]."
        ),
        "content": {
            "application/json": {"schema": ref(whole)},
            "text/event-stream": {"schema": _event(chunk)},
        },
    }
