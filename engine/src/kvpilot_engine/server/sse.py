"""Server-sent events: one `data:` line per event, a comment when nothing was sent for a while.

Not here: what the events say. Invariant: an event is written whole, so that a keep-alive never lands inside one.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from aiohttp import web

from kvpilot_engine.server.json_body import encode_json

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """Use as an async context manager: headers go out on entering, the end of the body on leaving."""

    def __init__(self, request: web.Request, *, keep_alive_s: float) -> None:
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._response = web.StreamResponse(headers=HEADERS)
        self._response.content_type = "text/event-stream"
        self._response.charset = "utf-8"
        self._pinger: asyncio.Task[None] | None = None
        self._wrote_at = 0.0

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, events: bytes) -> None:
        """Write one or more whole events."""
        await self._write(events)

    async def send_json(self, value: object) -> None:
        await self._write(b"data: " + encode_json(value) + b"\n\n")

    async def __aenter__(self) -> Self:
        await self._response.prepare(self._request)
        self._wrote_at = asyncio.get_running_loop().time()
        self._pinger = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pinger is not None:
            self._pinger.cancel()
        if error is None:
            with contextlib.suppress(ConnectionResetError):
                await self._response.write_eof()

    async def _write(self, data: bytes) -> None:
        self._wrote_at = asyncio.get_running_loop().time()
        await self._response.write(data)

    async def _ping(self) -> None:
        """Keep proxies from closing a stream whose request still waits."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while True:
                silent_s = loop.time() - self._wrote_at
                if silent_s >= self._keep_alive_s:
                    await self._write(b": keep-alive\n\n")
                    silent_s = 0.0
                await asyncio.sleep(self._keep_alive_s - silent_s)
