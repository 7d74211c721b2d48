"""C9: a watch that has expired is listed anew, whichever way the API server says so. A proxy says it here."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from kvpilot_operator.testing import make_object

if TYPE_CHECKING:
    from tests.operator.handlers.conftest import Cluster
else:
    Cluster = Any

pytestmark = pytest.mark.apiserver

GONE = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410,
        "message": "too old resource version"}  # fmt: skip


class ExpiringProxy:
    """Hands everything on; once expired, cuts the watches of objects and answers new ones with 410 until renewed."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        self._server = config["clusters"][0]["cluster"]["server"]
        self._ca = config["clusters"][0]["cluster"]["certificate-authority"]
        self._token = config["users"][0]["user"]["token"]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._watches: set[asyncio.Task[Any]] = set()
        self.mode = ""
        self.num_expired = 0
        self.num_lists = 0
        self.port = 0

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def expire(self, mode: str) -> None:
        self.num_lists = 0
        self.mode = mode
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._watches])

    async def _start(self) -> None:
        context = ssl.create_default_context(cafile=self._ca)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._runner.cleanup()
        handlers = asyncio.all_tasks() - {asyncio.current_task()}
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        closed = asyncio.Event()
        connector = self._session.connector
        assert connector is not None
        self._loop.call_later(0.1, closed.set)  # TLS connections say good-bye after close() has returned
        await self._session.close()
        await closed.wait()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        is_object_list = request.method == "GET" and request.path.endswith("/llmdeployments")
        is_watch = request.query.get("watch") == "true"
        if is_object_list and not is_watch:
            self.num_lists += 1
            if self.mode == "event":
                self.mode = ""  # what is listed now is fresh
        if is_object_list and is_watch and self.mode:
            self.num_expired += 1
            if self.mode == "status":
                return web.json_response(GONE, status=410)
            return web.Response(text=json.dumps({"type": "ERROR", "object": GONE}) + "\n")
        headers = {key: value for key, value in request.headers.items() if key in ("Content-Type", "Accept")}
        headers["Authorization"] = f"Bearer {self._token}"
        async with self._session.request(
            request.method,
            self._server + request.raw_path,
            headers=headers,
            data=await request.read() or None,
            skip_auto_headers=["Content-Type"],
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            task = asyncio.current_task()
            if is_object_list and is_watch and task is not None:
                self._watches.add(task)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            except (asyncio.CancelledError, ConnectionError):
                pass
            finally:
                self._watches.discard(task)
            return response


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ExpiringProxy]:
    proxy = ExpiringProxy(cluster.make_account(clusterwide=False))
    proxy.start()
    yield proxy
    proxy.stop()


def write_kubeconfig(cluster: Cluster, port: int) -> str:
    path: Path = cluster.folder / "kubeconfig-proxy"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_an_expired_watch_told_in_the_stream_is_listed_anew(cluster: Cluster, proxy: ExpiringProxy) -> None:  # C9
    operator = cluster.start_operator(KUBECONFIG=write_kubeconfig(cluster, proxy.port))
    cluster.apply(make_object("before", cluster.namespace))
    cluster.wait(lambda: cluster.condition("Ready", "before"), "the first object")
    proxy.expire("event")
    cluster.apply(make_object("between", cluster.namespace))
    cluster.wait(lambda: cluster.condition("Ready", "between"), "what was made in between")
    assert proxy.num_expired == 1
    assert proxy.num_lists >= 1
    assert operator.process.poll() is None


def test_an_expired_watch_told_by_status_ends_the_process_and_the_next_one_lists(  # C9
    cluster: Cluster, proxy: ExpiringProxy
) -> None:
    kubeconfig = write_kubeconfig(cluster, proxy.port)
    operator = cluster.start_operator(KUBECONFIG=kubeconfig)
    cluster.apply(make_object("before", cluster.namespace))
    cluster.wait(lambda: cluster.condition("Ready", "before"), "the first object")
    proxy.expire("status")
    cluster.apply(make_object("between", cluster.namespace))
    assert operator.process.wait(30) == 70
    assert proxy.num_expired == 1
    proxy.mode = ""
    cluster.start_operator(KUBECONFIG=kubeconfig)  # as the kubelet does
    cluster.wait(lambda: cluster.condition("Ready", "between"), "what was made in between")
