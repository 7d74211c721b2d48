"""Read `GET /engine/state` of many engines at once. A bad engine is `Unknown(reason)`, never an exception.

Every call is bounded three times: per request, over all requests of one call, and in bytes; a pod that accepts and
never answers costs its own deadline and nobody else's. Counting the failures is the caller's hook, not this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import aiohttp

from kvpilot_operator.core.engine_state import parse_engine_state
from kvpilot_operator.core.observation import EngineState, Unknown
from kvpilot_operator.core.ports import EngineTarget

TIMEOUT = "Timeout"
UNREACHABLE = "Unreachable"
BAD_STATUS = "BadStatus"
TOO_LARGE = "TooLarge"
TRUNCATED = "Truncated"
NO_ADDRESS = "NoAddress"

_MAX_BODY_BYTES = 256 * 1024


class HttpEngineClient:
    """The `EngineClient` port over HTTP. One session for its whole life; close it."""

    def __init__(
        self,
        *,
        deadline_s: float,
        max_concurrency: int = 64,
        port: int = 8000,
        on_error: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """`deadline_s` bounds one engine's answer; `on_error` gets the reason of each read that failed."""
        self._timeout = aiohttp.ClientTimeout(total=deadline_s)
        self._slots = asyncio.Semaphore(max_concurrency)
        self._port = port
        self._on_error = on_error
        # A pod's address is used once a tick: keeping its connection would only pile up dead ones as pods go.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=self._timeout,
            trust_env=False,
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def fetch_states(self, targets: Sequence[EngineTarget]) -> dict[str, EngineState | Unknown]:
        results = await asyncio.gather(*(self._fetch(target) for target in targets))
        for result in results:
            if isinstance(result, Unknown):
                self._on_error(result.reason)
        return {target.uid: result for target, result in zip(targets, results, strict=True)}

    async def _fetch(self, target: EngineTarget) -> EngineState | Unknown:
        if not target.pod_ip:
            return Unknown(NO_ADDRESS)
        host = f"[{target.pod_ip}]" if ":" in target.pod_ip else target.pod_ip
        url = f"http://{host}:{self._port}/engine/state?since={target.since}"
        async with self._slots:
            try:
                return await self._read(url)
            except TimeoutError:
                return Unknown(TIMEOUT)
            except aiohttp.ClientPayloadError:
                return Unknown(TRUNCATED)
            except (aiohttp.ClientError, OSError, ValueError):
                return Unknown(UNREACHABLE)

    async def _read(self, url: str) -> EngineState | Unknown:
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return Unknown(BAD_STATUS)
            body = bytearray()
            async for chunk in response.content.iter_chunked(65536):
                body += chunk
                if len(body) > _MAX_BODY_BYTES:
                    return Unknown(TOO_LARGE)
            return parse_engine_state(bytes(body))
