"""The `KubeApi` port over `kubernetes.aio`: raw JSON in and out, a deadline on every call, our errors only.

All requests go through one method, which refuses what `core.rights` does not cover and reports each answer to a hook.
Retries nothing: the queue does. Parses no models: a list of pods as model objects costs more than the request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient

from kvpilot_operator.adapters.kube_errors import build_error
from kvpilot_operator.core.naming import FIELD_MANAGER
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.resources import DEPLOYMENTS, EVENTS, LEASES, LLM_DEPLOYMENTS, PODS, ApiResource, resource_of
from kvpilot_operator.core.rights import is_covered
from kvpilot_operator.errors import ConflictError, InvalidSpecError, ObservationError, TransientError

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"

_METHODS = {"get": "GET", "list": "GET", "create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}

OnCall = Callable[[str, str, int], None]
"""Called with (verb, resource, HTTP status) after each answer; status 0 when there was none."""
OnWritten = Callable[[Manifest], None]
"""Called with every object that a write returned."""


class KubernetesApi:
    """One connection pool. Build it inside the event loop; close it."""

    def __init__(
        self,
        client: ApiClient,
        *,
        timeout_s: float = 15.0,
        on_call: OnCall = lambda _verb, _resource, _status: None,
        on_written: OnWritten = lambda _manifest: None,
    ) -> None:
        self._client = client
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._on_call = on_call
        self._on_written = on_written

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get_object(self, resource: ApiResource, namespace: str, name: str) -> Manifest | None:
        return await self._request("get", resource, namespace, name, missing_ok=True)

    async def list_objects(
        self, resource: ApiResource, namespace: str | None, *, labels: str = "", name: str = ""
    ) -> list[Manifest]:
        query = {"labelSelector": labels, "fieldSelector": f"metadata.name={name}" if name else ""}
        answer = await self._request("list", resource, namespace, query=query)
        items = (answer or {}).get("items")
        if not isinstance(items, list):
            raise ObservationError(f"list {resource.plural}: the answer holds no items")
        # Items of a list carry neither kind nor apiVersion; what reads them later wants both.
        return [{"apiVersion": resource.api_version, "kind": resource.kind, **item} for item in items]

    async def get_openapi(self, path: str) -> Manifest | None:
        # No resource, so no right of ours: the server's own role system:discovery lets everyone who is logged in.
        what = f"get {path}"
        status, payload, retry_after = await self._send("get", "openapi", path, what, None, None, _JSON)
        return None if status == 404 else _parse(status, payload, what, retry_after)

    async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
        metadata = manifest["metadata"]
        return await self._write(
            "patch",
            resource_of(manifest),
            metadata["namespace"],
            metadata["name"],
            body=manifest,
            content_type=_APPLY,
            query={"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"},
        )

    async def replace_spec(self, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        return await self._write(
            "patch",
            resource_of(manifest),
            metadata["namespace"],
            metadata["name"],
            body={"spec": manifest["spec"]},
            content_type=_MERGE,
            query={"fieldManager": FIELD_MANAGER},
        )

    async def set_replicas(self, resource: ApiResource, namespace: str, name: str, replicas: int) -> None:
        query = {"fieldManager": FIELD_MANAGER}
        body: Manifest = {"spec": {"replicas": replicas}}
        content_type = _MERGE
        if resource is DEPLOYMENTS:
            # Applied, not patched: the server notes nobody's writes to a field that was never applied (or created with
            # an owner), and so an autoscaler's later ones could not be told from ours.
            body |= {
                "apiVersion": "autoscaling/v1",
                "kind": "Scale",
                "metadata": {"namespace": namespace, "name": name},
            }
            content_type, query["force"] = _APPLY, "true"
        await self._write(
            "patch", resource, namespace, name, subresource="scale", body=body, content_type=content_type, query=query
        )

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], resource_version: str
    ) -> Manifest:
        return await self._write(
            "patch",
            LLM_DEPLOYMENTS,
            namespace,
            name,
            subresource="status",
            body={"metadata": {"resourceVersion": resource_version}, "status": status},
            content_type=_MERGE,
            query={"fieldManager": FIELD_MANAGER},
        )

    async def annotate_pod(
        self, namespace: str, name: str, uid: str, annotations: Mapping[str, str | None]
    ) -> Manifest | None:
        try:
            return await self._request(
                "patch",
                PODS,
                namespace,
                name,
                body={"metadata": {"uid": uid, "annotations": dict(annotations)}},
                content_type=_MERGE,
                query={"fieldManager": FIELD_MANAGER},
                missing_ok=True,
            )
        except (ConflictError, InvalidSpecError):
            # Another pod of that name by now: the UID in the patch is our precondition.
            return None

    async def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        try:
            await self._request("delete", PODS, namespace, name, body={"preconditions": {"uid": uid}}, missing_ok=True)
        except ConflictError:
            return  # a pod of that name, but not that pod: ours is gone

    async def create_event(self, manifest: Manifest) -> None:
        await self._write("create", EVENTS, manifest["metadata"]["namespace"], body=manifest)

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        await self._write("patch", EVENTS, namespace, name, body=dict(patch), content_type=_MERGE)

    async def get_lease(self, namespace: str, name: str) -> Manifest | None:
        return await self.get_object(LEASES, namespace, name)

    async def create_lease(self, manifest: Manifest) -> Manifest:
        return await self._write("create", LEASES, manifest["metadata"]["namespace"], body=manifest)

    async def update_lease(self, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        return await self._write("update", LEASES, metadata["namespace"], metadata["name"], body=manifest)

    async def _write(self, verb: str, resource: ApiResource, namespace: str, name: str = "", **rest: Any) -> Manifest:
        answer = await self._request(verb, resource, namespace, name, **rest)
        if answer is None:
            raise ObservationError(f"{verb} {resource.plural} {namespace}/{name}: empty answer")
        return answer

    async def _request(
        self,
        verb: str,
        resource: ApiResource,
        namespace: str | None,
        name: str = "",
        *,
        subresource: str = "",
        body: object = None,
        content_type: str = _JSON,
        query: Mapping[str, str] | None = None,
        missing_ok: bool = False,
    ) -> Manifest | None:
        """The one door to the API server. None only for a 404 that `missing_ok` allows."""
        target = f"{resource.plural}/{subresource}" if subresource else resource.plural
        if not is_covered(verb, resource.group, target):
            raise AssertionError(f"{verb} {target} is missing in core.rights.RIGHTS")
        path = resource.root
        for part in ("namespaces" if namespace else "", namespace, resource.plural, name, subresource):
            if part:
                path += f"/{part}"
        what = f"{verb} {target} {namespace or ''}/{name}"
        status, payload, retry_after = await self._send(verb, target, path, what, query, body, content_type)
        if status == 404 and missing_ok:
            return None
        answer = _parse(status, payload, what, retry_after)
        if verb not in ("get", "list", "delete") and answer.get("kind") == resource.kind:
            self._on_written(answer)
        return answer

    async def _send(
        self,
        verb: str,
        target: str,
        path: str,
        what: str,
        query: Mapping[str, str] | None,
        body: object,
        content_type: str,
    ) -> tuple[int, bytes, str | None]:
        given = {key: value for key, value in (query or {}).items() if value}
        headers = {"Content-Type": content_type, "Accept": _JSON, "User-Agent": "kvpilot-operator"}
        url = f"{self._client.configuration.host}{path}{'?' + urlencode(given) if given else ''}"
        status = 0
        try:
            # The token may have been rotated: the client's configuration reads its file anew once a minute.
            await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, verb, body)
            answer = await self._client.rest_client.request(  # type: ignore[no-untyped-call]
                _METHODS[verb], url, headers=headers, body=body, _request_timeout=self._timeout
            )
            payload: bytes = await answer.read()
            status = answer.status
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise TransientError(f"{what}: {type(error).__name__}") from error
        finally:
            self._on_call(verb, target, status)
        return status, payload, answer.getheader("Retry-After")


def _parse(status: int, payload: bytes, what: str, retry_after: str | None) -> Manifest:
    if not 200 <= status <= 299:
        raise build_error(status, payload, what, retry_after)
    try:
        answer = json.loads(payload)
    except ValueError as error:
        raise ObservationError(f"{what}: HTTP {status} without JSON") from error
    if not isinstance(answer, dict):
        raise ObservationError(f"{what}: HTTP {status}, the JSON is no object")
    return answer
