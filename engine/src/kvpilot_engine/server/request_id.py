"""The id of one HTTP call, in logs and in the answer: the client's `x-request-id` if it is sane, else a new one."""

from __future__ import annotations

import re
import secrets

from aiohttp import web

REQUEST_ID_HEADER = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_KEY = web.RequestKey("request_id", str)


def assign_request_id(request: web.Request) -> str:
    wanted = request.headers.get(REQUEST_ID_HEADER, "")
    request_id = wanted if _SANE.fullmatch(wanted) else secrets.token_hex(16)
    request[_KEY] = request_id
    return request_id


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """For the application's on_response_prepare."""
    request_id = request.get(_KEY)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id
