"""JSON in and out of HTTP: bodies with a limit that is ours, answers that are strict JSON.

aiohttp's own limit (1 MiB) is too small for long prompts and can't follow the model's length, so bodies are read here.
"""

from __future__ import annotations

import json

from aiohttp import web

from kvpilot_engine.errors import InvalidRequestError

BASE_BYTES = 4 * 1024 * 1024
BYTES_PER_TOKEN = 64
"""A token of text is about 4 characters, escaped as \\uXXXX at most 24 bytes; the rest is room for long tokens."""


def body_limit(max_model_len: int) -> int:
    """Most bytes of a request body, decompressed."""
    return BASE_BYTES + BYTES_PER_TOKEN * max_model_len


async def read_body(request: web.Request, *, limit_bytes: int) -> bytes:
    """The body; 413 as soon as it is known to be too large, with and without Content-Length. 415 for forms."""
    kind = request.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise web.HTTPUnsupportedMediaType(text=f"Content-Type is {kind[:80]}; application/json is needed")
    if request.content_length is not None and request.content_length > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    try:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > limit_bytes:
                raise _too_large(limit_bytes)
    except (web.RequestPayloadError, ValueError) as error:
        raise InvalidRequestError("the body can't be read as its headers say it is encoded") from error
    return bytes(body)


def _too_large(limit_bytes: int) -> web.HTTPRequestEntityTooLarge:
    return web.HTTPRequestEntityTooLarge(limit_bytes, text=f"the body is larger than {limit_bytes} bytes")


def encode_json(value: object) -> bytes:
    """Compact and strict: NaN is an error of ours, never sent."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def json_response(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(value), status=status, content_type="application/json", headers=headers)
