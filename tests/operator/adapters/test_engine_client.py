"""Reading engines over HTTP: whatever an engine answers, the result is a state or a named reason, in bounded time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from kvpilot_operator.adapters.engine_client import HttpEngineClient
from kvpilot_operator.core.observation import EngineLoad, EngineState, Unknown
from kvpilot_operator.core.ports import EngineTarget

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[int]]


def make_body(**changes: Any) -> dict[str, Any]:
    load = {
        "kv_usage_ratio": 0.71, "kv_cached_ratio": 0.1, "running": 4, "waiting": 2, "waiting_capacity": 1,
        "waiting_budget": 1, "blocks_total": 120, "preemptions_total": 12,
    }  # fmt: skip
    return {
        "schema": 1, "state": "ready", "state_reason": "", "snapshot_age_s": 0.02, "load": load, "memory": None,
        "tuning": None, "oom_seq": 0, "oom_events": [], "start_failures": [], **changes,
    }  # fmt: skip


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []

    async def start(handler: Handler) -> int:
        app = web.Application()
        app.router.add_get("/engine/state", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        port: int = runner.addresses[0][1]
        return port

    yield start
    for runner in runners:
        await runner.cleanup()


async def fetch(port: int, *, deadline_s: float = 5.0) -> EngineState | Unknown:
    async with HttpEngineClient(deadline_s=deadline_s, port=port) as client:
        return (await client.fetch_states([EngineTarget("uid", "127.0.0.1")]))["uid"]


def answering(body: bytes, *, status: int = 200) -> Handler:
    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status)

    return handler


async def test_a_good_state_is_parsed(serve: Serve) -> None:
    state = await fetch(await serve(answering(json.dumps(make_body()).encode())))
    assert isinstance(state, EngineState)
    assert isinstance(state.load, EngineLoad)
    assert state.load.kv_usage_ratio == 0.71
    assert state.load.age_s == 0.02


async def test_the_last_handled_event_is_named_in_the_request(serve: Serve) -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.query_string)
        return web.json_response(make_body())

    port = await serve(handler)
    async with HttpEngineClient(deadline_s=5, port=port) as client:
        await client.fetch_states([EngineTarget("uid", "127.0.0.1", since=7)])
    assert asked == ["since=7"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "EmptyBody"),
        (b"  \n", "EmptyBody"),
        (b"<html><body>Bad gateway</body></html>", "NotJSON"),
        (json.dumps(make_body()).encode()[:-20], "NotJSON"),
        (b"[1, 2]", "NotAnObject"),
        (b"null", "NotAnObject"),
        (b"\xff\xfe\x00", "NotJSON"),
        (b"[" * 100_000, "NotJSON"),
        (json.dumps(make_body(schema=2)).encode(), "UnsupportedSchema"),
        (json.dumps(make_body(state="sleeping")).encode(), "BadValue"),
        (json.dumps(make_body(snapshot_age_s=float("nan"))).encode(), "BadValue"),
        (b" " * 300_000 + b"{}", "TooLarge"),
    ],
)
async def test_a_body_that_tells_nothing_is_unknown_with_its_reason(  # D9
    serve: Serve, body: bytes, reason: str
) -> None:
    assert await fetch(await serve(answering(body))) == Unknown(reason)


@pytest.mark.parametrize(
    ("usage", "reason"),
    [("-0.1", "OutOfRange"), ("1.7", "OutOfRange"), ("65", "OutOfRange"), ('"0.5"', "BadValue"), ("true", "BadValue"),
     ("null", "MissingValue"), ("1e999", "BadValue")],
)  # fmt: skip
async def test_a_usage_that_is_no_ratio_is_unknown_and_never_a_low_load(  # D9
    serve: Serve, usage: str, reason: str
) -> None:
    body = json.dumps(make_body()).replace("0.71", usage).encode()
    state = await fetch(await serve(answering(body)))
    assert isinstance(state, EngineState)
    assert state.load == Unknown(reason)


@pytest.mark.parametrize("usage", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_json_does_not_have_spoil_the_whole_answer(serve: Serve, usage: str) -> None:  # D9
    body = json.dumps(make_body()).replace("0.71", usage).encode()
    assert await fetch(await serve(answering(body))) == Unknown("BadValue")


@pytest.mark.parametrize("status", [404, 500, 503, 302])
async def test_any_status_but_200_is_unknown(serve: Serve, status: int) -> None:
    assert await fetch(await serve(answering(json.dumps(make_body()).encode(), status=status))) == Unknown("BadStatus")


async def test_a_body_cut_short_is_unknown(serve: Serve) -> None:  # D9
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"schema": 1')
        assert request.transport is not None
        request.transport.close()
        return response

    assert await fetch(await serve(handler)) == Unknown("Truncated")


async def test_nobody_listening_is_unknown() -> None:
    assert await fetch(1) == Unknown("Unreachable")


async def test_a_pod_without_an_address_is_not_asked() -> None:
    async with HttpEngineClient(deadline_s=5) as client:
        assert await client.fetch_states([EngineTarget("uid", "")]) == {"uid": Unknown("NoAddress")}


async def test_engines_that_accept_and_never_answer_cost_one_deadline_together(serve: Serve) -> None:  # C15, D1
    release = asyncio.Event()

    async def hang(_request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    port = await serve(hang)
    errors: list[str] = []
    targets = [EngineTarget(f"uid-{number}", "127.0.0.1") for number in range(30)]
    async with HttpEngineClient(deadline_s=0.2, port=port, on_error=errors.append) as client:
        async with asyncio.timeout(5):
            states = await client.fetch_states(targets)
    release.set()
    assert states == {target.uid: Unknown("Timeout") for target in targets}
    assert errors == ["Timeout"] * 30
