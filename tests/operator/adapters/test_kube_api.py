"""The adapter's errors and preconditions against a scripted HTTP server: what each answer of an API server becomes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from kvpilot_operator.adapters.kube_api import KubernetesApi
from kvpilot_operator.core.resources import DEPLOYMENTS, LLM_DEPLOYMENTS, PODS, ApiResource
from kvpilot_operator.core.rights import RIGHTS, is_covered
from kvpilot_operator.errors import (
    ConflictError,
    InvalidSpecError,
    NamespaceGoingError,
    ObservationError,
    OperatorError,
    RefusedError,
    TransientError,
)

DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"namespace": "team-a", "name": "llama"},
}


@dataclass
class Server:
    """Answers every request with `status` and `body`, and remembers what was asked."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    hang: asyncio.Event | None = None

    async def handle(self, request: web.Request) -> web.Response:
        raw = await request.read()
        query = dict(request.query.items())
        self.requests.append((request.method, request.path, query, json.loads(raw) if raw else None))
        if self.hang is not None:
            await self.hang.wait()
        return web.Response(status=self.status, body=self.body, headers=self.headers, content_type="application/json")


def status_body(message: str, **details: Any) -> bytes:
    return json.dumps({"kind": "Status", "status": "Failure", "message": message, "details": details}).encode()


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[KubernetesApi]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    api = KubernetesApi(ApiClient(configuration), timeout_s=2.0)
    yield api
    await api.close()
    await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, "strict decoding error", InvalidSpecError),
        (401, "Unauthorized", TransientError),
        (403, 'deployments is forbidden: User "x" cannot patch', RefusedError),
        (403, "exceeded quota: gpus, requested: 1, used: 4, limited: 4", RefusedError),
        (404, 'namespaces "team-a" not found', ConflictError),
        (409, "Apply failed with 1 conflict", ConflictError),
        (410, "too old resource version", TransientError),
        (422, "Deployment is invalid: spec.selector: field is immutable", InvalidSpecError),
        (429, "too many requests", TransientError),
        (500, "failed to create typed patch object (team-a/llama): .spec.foo: field not declared", InvalidSpecError),
        (500, "failed to convert new object (team-a/llama)", InvalidSpecError),
        (500, "etcdserver: request timed out", TransientError),
        (503, "apiserver not ready", TransientError),
    ],
)
async def test_each_refusal_of_the_api_server_is_one_of_our_errors(
    server: Server, api: KubernetesApi, status: int, message: str, expected: type[OperatorError]
) -> None:
    server.status, server.body = status, status_body(message)
    with pytest.raises(OperatorError) as caught:
        await api.apply(DEPLOYMENT, force=True)
    assert type(caught.value) is expected
    assert message in str(caught.value)
    assert "patch deployments team-a/llama" in str(caught.value)


async def test_a_body_that_is_no_status_is_not_quoted(server: Server, api: KubernetesApi) -> None:
    server.status, server.body = 502, b"<html>token=abc</html>"
    with pytest.raises(TransientError) as caught:
        await api.list_objects(PODS, "team-a")
    assert "token" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "details", "expected"),
    [({"Retry-After": "7"}, {}, 7.0), ({}, {"retryAfterSeconds": 3}, 3.0), ({"Retry-After": "soon"}, {}, None)],
)
async def test_the_servers_wish_when_to_come_back_is_kept(
    server: Server, api: KubernetesApi, headers: dict[str, str], details: dict[str, Any], expected: float | None
) -> None:
    server.status, server.headers, server.body = 429, headers, status_body("slow down", **details)
    with pytest.raises(TransientError) as caught:
        await api.list_objects(PODS, "team-a")
    assert caught.value.retry_after_s == expected


async def test_what_is_published_is_read_without_a_right_of_ours(server: Server, api: KubernetesApi) -> None:  # C25
    server.body = b'{"components": {}}'
    assert await api.get_openapi("/openapi/v3/apis/a/v1") == {"components": {}}
    assert server.requests[-1] == ("GET", "/openapi/v3/apis/a/v1", {}, None)
    server.status = 404
    assert await api.get_openapi("/openapi/v3/apis/a/v1") is None
    server.status, server.body = 403, status_body("forbidden")
    with pytest.raises(RefusedError):
        await api.get_openapi("/openapi/v3/apis/a/v1")


async def test_not_found_is_none_where_it_is_an_outcome(server: Server, api: KubernetesApi) -> None:
    server.status, server.body = 404, status_body("not found")
    assert await api.get_object(LLM_DEPLOYMENTS, "team-a", "llama") is None
    assert await api.annotate_pod("team-a", "p", "uid", {"a": "b"}) is None
    await api.delete_pod("team-a", "p", "uid")
    assert server.requests[-1] == ("DELETE", "/api/v1/namespaces/team-a/pods/p", {}, {"preconditions": {"uid": "uid"}})


async def test_a_pod_of_the_same_name_but_another_uid_is_left_alone(server: Server, api: KubernetesApi) -> None:
    server.status, server.body = 409, status_body("Precondition failed: UID in precondition")
    assert await api.annotate_pod("team-a", "p", "old", {"a": "b"}) is None
    await api.delete_pod("team-a", "p", "old")


async def test_apply_names_the_field_manager_and_forces_only_when_told(server: Server, api: KubernetesApi) -> None:
    await api.apply(DEPLOYMENT, force=False)
    await api.apply(DEPLOYMENT, force=True)
    assert [request[2] for request in server.requests] == [
        {"fieldManager": "kvpilot", "force": "false"},
        {"fieldManager": "kvpilot", "force": "true"},
    ]
    assert server.requests[0][1] == "/apis/apps/v1/namespaces/team-a/deployments/llama"


async def test_lists_carry_selectors_and_their_items_a_kind(server: Server, api: KubernetesApi) -> None:
    server.body = json.dumps({"items": [{"metadata": {"name": "a"}}]}).encode()
    items = await api.list_objects(DEPLOYMENTS, None, labels="kvpilot.dev/deployment=a", name="a")
    assert items == [{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}}]
    assert server.requests == [
        ("GET", "/apis/apps/v1/deployments",
         {"labelSelector": "kvpilot.dev/deployment=a", "fieldSelector": "metadata.name=a"}, None)
    ]  # fmt: skip


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"items": null}'])
async def test_an_answer_that_is_no_list_is_an_error_and_not_an_empty_list(
    server: Server, api: KubernetesApi, body: bytes
) -> None:
    server.body = body
    with pytest.raises(ObservationError):
        await api.list_objects(PODS, "team-a")


async def test_a_server_that_does_not_answer_costs_the_time_out_and_is_transient(server: Server) -> None:
    server.hang = asyncio.Event()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    calls: list[tuple[str, str, int]] = []
    api = KubernetesApi(ApiClient(configuration), timeout_s=0.1, on_call=lambda *call: calls.append(call))
    with pytest.raises(TransientError):
        await api.list_objects(PODS, "team-a")
    assert calls == [("list", "pods", 0)]
    server.hang.set()
    await api.close()
    await runner.cleanup()


async def test_a_server_that_is_not_there_is_transient() -> None:
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:1"
    api = KubernetesApi(ApiClient(configuration))
    with pytest.raises(TransientError):
        await api.list_objects(PODS, "team-a")
    await api.close()


async def test_a_request_outside_the_rights_never_leaves(server: Server, api: KubernetesApi) -> None:  # C14
    with pytest.raises(AssertionError, match="get pods"):
        await api.get_object(PODS, "team-a", "p")
    with pytest.raises(AssertionError, match="list secrets"):
        await api.list_objects(ApiResource("", "v1", "secrets", "Secret"), "team-a")
    assert server.requests == []


async def test_written_objects_are_reported(server: Server, api: KubernetesApi) -> None:
    seen: list[Any] = []
    api._on_written = seen.append
    server.body = json.dumps({**DEPLOYMENT, "metadata": {"resourceVersion": "7"}}).encode()
    await api.apply(DEPLOYMENT, force=True)
    await api.get_object(LLM_DEPLOYMENTS, "team-a", "x")
    assert [manifest["metadata"]["resourceVersion"] for manifest in seen] == ["7"]


def test_no_right_is_a_wildcard_and_none_reads_secrets() -> None:
    assert not [right for right in RIGHTS if "*" in (right.group, right.resource, *right.verbs)]
    assert not is_covered("get", "", "secrets")


@pytest.mark.parametrize("check", [lambda right: right.reason, lambda right: right.verbs])
def test_every_right_says_what_it_is_for(check: Callable[[Any], object]) -> None:
    assert all(check(right) for right in RIGHTS)


async def test_a_namespace_that_is_being_deleted_is_told_apart(server: Server, api: KubernetesApi) -> None:
    cause = {"reason": "NamespaceTerminating", "message": "namespace team-a is being terminated"}
    server.status, server.body = 403, status_body("is forbidden", causes=[cause])
    with pytest.raises(NamespaceGoingError):
        await api.apply(DEPLOYMENT, force=True)
    server.body = status_body('User "x" cannot patch resource')
    with pytest.raises(RefusedError) as refused:
        await api.apply(DEPLOYMENT, force=True)
    assert not isinstance(refused.value, NamespaceGoingError)
