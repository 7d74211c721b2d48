"""A real engine child with a fake model, started by the test with the settings that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest_asyncio

from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.sampling_params import SamplingParams
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.service.settings import ServiceSettings
from kvpilot_engine.service.testing import END, FakeModelLoader

LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class EngineKit:
    """What the tests of this folder share."""

    start: Callable[..., Awaitable[AsyncEngine]]

    @staticmethod
    def request(request_id: str, prompt: str = "@", **sampling: Any) -> GenerationRequest:
        options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "stop_token_ids": frozenset({END})}
        return GenerationRequest(
            request_id=RequestId(request_id),
            prompt_token_ids=tuple(TokenId(byte) for byte in prompt.encode()),
            sampling=SamplingParams(**{**options, **sampling}),
        )

    @staticmethod
    async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Wait for a condition with a limit."""
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110  the condition is another process
                await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def kit() -> AsyncIterator[EngineKit]:
    started: list[AsyncEngine] = []

    async def start(
        loader: FakeModelLoader | None = None,
        *,
        wait_ready: bool = True,
        configure_child_logging: Callable[[], None] | None = None,
        **settings: Any,
    ) -> AsyncEngine:
        engine = AsyncEngine(
            loader or FakeModelLoader(), ServiceSettings(**settings), configure_child_logging=configure_child_logging
        )
        started.append(engine)
        await engine.start()
        if wait_ready:
            await EngineKit.until(lambda: engine.is_ready)
        return engine

    yield EngineKit(start)
    for engine in started:
        await engine.stop()
