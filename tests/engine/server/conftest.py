"""The application on a test server, in front of a real engine child with a fake model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest_asyncio
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from kvpilot_engine.server.app import create_app
from kvpilot_engine.server.app_context import CONTEXT
from kvpilot_engine.server.settings import ServerSettings
from kvpilot_engine.server.testing import make_byte_text
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.service.settings import ServiceSettings
from kvpilot_engine.service.testing import FakeModelLoader

LIMIT_S = 20.0
Client = TestClient[web.Request, web.Application]


@dataclass(slots=True)
class ServerKit:
    """A running server and what tests ask of it."""

    client: Client
    engine: AsyncEngine
    app: web.Application

    async def chat(self, content: Any = "@", **fields: Any) -> ClientResponse:
        body = {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "@", **fields: Any) -> ClientResponse:
        return await self.client.post("/v1/completions", json={"model": "fake", "prompt": prompt, **fields})

    @staticmethod
    async def events(response: ClientResponse) -> list[Any]:
        """Every `data:` of a stream, parsed; the end marker stays text."""
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).split("\n\n") if line.startswith("data: ")]
        return [line if (line := raw[6:]) == "[DONE]" else json.loads(line) for raw in lines]

    @staticmethod
    async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110  the condition is another process
                await asyncio.sleep(0.005)

    def gauges(self) -> tuple[int, int, int]:
        """Running, waiting, used blocks."""
        snapshot = self.engine.snapshot
        assert snapshot is not None
        stats = snapshot.stats
        return stats.num_running, stats.num_waiting_capacity + stats.num_waiting_budget, stats.num_blocks_used

    async def scrape(self) -> dict[str, float]:
        """Sample (name and labels as written) → value."""
        text = await (await self.client.get("/metrics")).text()
        samples = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in samples}


Start = Callable[..., Awaitable[ServerKit]]


@contextlib.asynccontextmanager
async def running_servers() -> AsyncIterator[Start]:
    """Start a server: loader, service settings and server settings as the test names them."""
    running: list[ServerKit] = []

    async def start_server(
        loader: FakeModelLoader | None = None,
        *,
        wait_ready: bool = True,
        with_text: bool = True,
        service: dict[str, Any] | None = None,
        template: str | None = "{% for m in messages %}{{ m.content }}{% endfor %}",
        **server: Any,
    ) -> ServerKit:
        loader = loader or FakeModelLoader()
        settings = ServiceSettings(**{"max_num_seqs": loader.max_num_seqs, **(service or {})})
        engine = AsyncEngine(loader, settings)
        app = create_app(engine, ServerSettings(served_names=("fake", "alias"), **server), CollectorRegistry())
        if with_text:
            app[CONTEXT].text = make_byte_text(template=template)
        client: Client = TestClient(TestServer(app))
        await client.start_server()
        kit = ServerKit(client, engine, app)
        running.append(kit)
        await engine.start()
        if wait_ready:
            await ServerKit.until(lambda: engine.is_ready)
        return kit

    yield start_server
    for kit in running:
        kit.engine.abort_all()
        await kit.client.close()
        await kit.engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def start() -> AsyncIterator[Start]:
    """For tests that need a server of their own."""
    async with running_servers() as start_server:
        yield start_server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def start_shared() -> AsyncIterator[Start]:
    """For servers that several tests of a module share."""
    async with running_servers() as start_server:
        yield start_server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kit(start_shared: Start) -> ServerKit:
    """One server for a module's tests that leave nothing behind."""
    return await start_shared()
