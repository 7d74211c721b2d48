"""The `KubeApi` port over a dictionary.

Honest where the operator depends on the server (apply owns its fields and drops those it no longer names,
preconditions, resource versions, generations, who wrote replicas) and no more: it validates nothing, and what the real
server does to objects beyond that is tested against the real server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.naming import LABEL_DEPLOYMENT
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.resources import DEPLOYMENTS, EVENTS, LEASES, LLM_DEPLOYMENTS, PODS, ApiResource, resource_of
from kvpilot_operator.errors import ConflictError

_Ref = tuple[str, str, str]


class Crash(BaseException):
    """The process dies here: nothing may catch it."""


class FakeKubeApi:
    """The `KubeApi` port over a dictionary."""

    def __init__(self) -> None:
        self.objects: dict[_Ref, Manifest] = {}
        self.writes: list[tuple[str, str, str]] = []
        """(verb, resource, name) of every write that took place."""
        self.reads: list[tuple[str, str]] = []
        """(verb, resource) of every read."""
        self.crash_before_write: int | None = None
        """Raise `Crash` instead of the write of this index, counted from 0 over all writes."""
        self.errors: dict[tuple[str, str], Exception] = {}
        """Raise this for (verb, resource), every time until it is removed."""
        self.next_errors: dict[tuple[str, str], Exception] = {}
        """Raise this for (verb, resource) once."""
        self.watcher: Callable[[NamespacedName], None] = lambda _owner: None
        """Told the object whose child changed, as a watch on our label would."""
        self.openapi: dict[str, Manifest] = {}
        """Published documents by path."""
        self._applied: dict[_Ref, Manifest] = {}
        self._version = 100
        self._uid = 0

    # --- what a test does by hand

    def put(self, manifest: Mapping[str, Any]) -> Manifest:
        """Create or replace an object as somebody else would; metadata is completed."""
        value = copy.deepcopy(dict(manifest))
        ref = _ref(resource_of(value), value["metadata"]["namespace"], value["metadata"]["name"])
        return self._store(ref, value)

    def remove(self, resource: ApiResource, namespace: str, name: str) -> None:
        gone = self.objects.pop(_ref(resource, namespace, name), None)
        self._applied.pop(_ref(resource, namespace, name), None)
        if gone is not None:
            self._tell(gone)

    def peek(self, resource: ApiResource, namespace: str, name: str) -> Manifest | None:
        """A copy of what is stored."""
        return copy.deepcopy(self.objects.get(_ref(resource, namespace, name)))

    def all_of(self, resource: ApiResource) -> list[Manifest]:
        return [copy.deepcopy(value) for (kind, _, _), value in sorted(self.objects.items()) if kind == resource.kind]

    def scale_as(self, manager: str, namespace: str, name: str, replicas: int) -> None:
        """Another writer sets a Deployment's replicas through /scale."""
        self._set_replicas(_ref(DEPLOYMENTS, namespace, name), replicas, manager)

    # --- the port

    async def get_object(self, resource: ApiResource, namespace: str, name: str) -> Manifest | None:
        self.reads.append(("get", resource.plural))
        self._maybe_fail("get", resource.plural)
        return self.peek(resource, namespace, name)

    async def list_objects(
        self, resource: ApiResource, namespace: str | None, *, labels: str = "", name: str = ""
    ) -> list[Manifest]:
        self.reads.append(("list", resource.plural))
        self._maybe_fail("list", resource.plural)
        return [
            value
            for value in self.all_of(resource)
            if (namespace is None or value["metadata"]["namespace"] == namespace)
            and (not name or value["metadata"]["name"] == name)
            and _matches(value, labels)
        ]

    async def get_openapi(self, path: str) -> Manifest | None:
        self.reads.append(("get", "openapi"))
        self._maybe_fail("get", "openapi")
        return copy.deepcopy(self.openapi.get(path))

    async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
        resource = resource_of(manifest)
        ref = _ref(resource, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        self._before_write("patch", resource.plural, ref[2])
        current = self.objects.get(ref)
        if current is not None and ref not in self._applied and not force:
            raise ConflictError(f"apply {ref}: fields of another manager")
        merged = _merge(_drop(copy.deepcopy(current or {}), self._applied.get(ref, {}), manifest), manifest)
        self._applied[ref] = copy.deepcopy(manifest)
        if resource is DEPLOYMENTS:
            merged["spec"].setdefault("replicas", 1)
        return copy.deepcopy(self._store(ref, merged))

    async def replace_spec(self, manifest: Manifest) -> Manifest:
        resource = resource_of(manifest)
        ref = _ref(resource, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        self._before_write("patch", resource.plural, ref[2])
        value = copy.deepcopy(self._existing(ref))
        value["spec"] = _merge_patch(value["spec"], manifest["spec"])
        return copy.deepcopy(self._store(ref, value))

    async def set_replicas(self, resource: ApiResource, namespace: str, name: str, replicas: int) -> None:
        self._before_write("patch", f"{resource.plural}/scale", name)
        self._set_replicas(_ref(resource, namespace, name), replicas, "kvpilot")

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], resource_version: str
    ) -> Manifest:
        self._before_write("patch", "llmdeployments/status", name)
        ref = _ref(LLM_DEPLOYMENTS, namespace, name)
        current = self._existing(ref)
        if current["metadata"]["resourceVersion"] != resource_version:
            raise ConflictError(f"status of {name}: the object has been modified")
        value = copy.deepcopy(current)
        value["status"] = _merge_patch(value.get("status", {}), status)
        return copy.deepcopy(self._store(ref, value))

    async def annotate_pod(
        self, namespace: str, name: str, uid: str, annotations: Mapping[str, str | None]
    ) -> Manifest | None:
        self._before_write("patch", "pods", name)
        current = self.objects.get(_ref(PODS, namespace, name))
        if current is None or current["metadata"]["uid"] != uid:
            return None
        value = copy.deepcopy(current)
        metadata = value["metadata"]
        metadata["annotations"] = _merge_patch(metadata.get("annotations", {}), annotations)
        return copy.deepcopy(self._store(_ref(PODS, namespace, name), value))

    async def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        self._before_write("delete", "pods", name)
        current = self.objects.get(_ref(PODS, namespace, name))
        if current is not None and current["metadata"]["uid"] == uid:
            self.remove(PODS, namespace, name)

    async def create_event(self, manifest: Manifest) -> None:
        self._before_write("create", "events", manifest["metadata"]["name"])
        ref = _ref(EVENTS, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if ref in self.objects:
            raise ConflictError(f"event {ref[2]} exists already")
        self._store(ref, copy.deepcopy(manifest))

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        self._before_write("patch", "events", name)
        ref = _ref(EVENTS, namespace, name)
        self._store(ref, _merge_patch(self._existing(ref), patch))

    async def get_lease(self, namespace: str, name: str) -> Manifest | None:
        return await self.get_object(LEASES, namespace, name)

    async def create_lease(self, manifest: Manifest) -> Manifest:
        ref = _ref(LEASES, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        self._before_write("create", "leases", ref[2])
        if ref in self.objects:
            raise ConflictError("the lease exists already")
        return copy.deepcopy(self._store(ref, copy.deepcopy(manifest)))

    async def update_lease(self, manifest: Manifest) -> Manifest:
        ref = _ref(LEASES, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        self._before_write("update", "leases", ref[2])
        if self._existing(ref)["metadata"]["resourceVersion"] != manifest["metadata"].get("resourceVersion"):
            raise ConflictError("the lease has been modified")
        return copy.deepcopy(self._store(ref, copy.deepcopy(manifest)))

    # --- inside

    def _existing(self, ref: _Ref) -> Manifest:
        if ref not in self.objects:
            raise ConflictError(f"{ref} is gone")
        return self.objects[ref]

    def _maybe_fail(self, verb: str, resource: str) -> None:
        error = self.next_errors.pop((verb, resource), None) or self.errors.get((verb, resource))
        if error is not None:
            raise error

    def _before_write(self, verb: str, resource: str, name: str) -> None:
        self._maybe_fail(verb, resource)
        if self.crash_before_write == len(self.writes):
            raise Crash(f"before {verb} {resource} {name}")
        self.writes.append((verb, resource, name))

    def _set_replicas(self, ref: _Ref, replicas: int, manager: str) -> None:
        value = copy.deepcopy(self._existing(ref))
        value["spec"]["replicas"] = replicas
        entries = [entry for entry in value["metadata"].get("managedFields", []) if entry["subresource"] != "scale"]
        owned: dict[str, Any] = {"f:spec": {"f:replicas": {}}}
        value["metadata"]["managedFields"] = [
            *entries, {"manager": manager, "operation": "Update", "subresource": "scale", "fieldsV1": owned}
        ]  # fmt: skip
        self._store(ref, value)

    def _store(self, ref: _Ref, value: Manifest) -> Manifest:
        old = self.objects.get(ref)
        metadata = value["metadata"]
        before = {**old, "metadata": {**old["metadata"], "resourceVersion": ""}} if old is not None else None
        if before is not None and before == {**value, "metadata": {**metadata, "resourceVersion": ""}}:
            assert old is not None  # noqa: S101 - for the type checker
            return old  # nothing changed: no new version, as on the real server
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        if "uid" not in metadata:
            self._uid += 1
            metadata["uid"] = f"uid-{self._uid}"
        generation = (old or {}).get("metadata", {}).get("generation", 0)
        changed = old is None or old.get("spec") != value.get("spec")
        metadata["generation"] = generation + 1 if changed else generation
        if ref[0] == DEPLOYMENTS.kind:
            # Its controller keeps up at once.
            value["status"] = {**value.get("status", {}), "observedGeneration": metadata["generation"]}
        self.objects[ref] = value
        self._tell(value)
        return value

    def _tell(self, value: Manifest) -> None:
        owner = value["metadata"].get("labels", {}).get(LABEL_DEPLOYMENT)
        if owner:
            self.watcher(NamespacedName(value["metadata"]["namespace"], owner))


def _ref(resource: ApiResource, namespace: str, name: str) -> _Ref:
    return resource.kind, namespace, name


def _matches(manifest: Manifest, selector: str) -> bool:
    labels = manifest["metadata"].get("labels", {})
    for part in filter(None, selector.split(",")):
        key, _, value = part.partition("=")
        if key not in labels or (value and labels[key] != value):
            return False
    return True


def _drop(value: Manifest, before: Mapping[str, Any], after: Mapping[str, Any]) -> Manifest:
    """Remove what the manager's last apply set and this one does not name."""
    for key, old in before.items():
        if key not in after:
            value.pop(key, None)
        elif isinstance(old, Mapping) and isinstance(after[key], Mapping) and isinstance(value.get(key), dict):
            value[key] = _drop(value[key], old, after[key])
    return value


def _merge(value: Manifest, patch: Mapping[str, Any]) -> Manifest:
    for key, new in patch.items():
        if isinstance(new, Mapping) and isinstance(value.get(key), dict):
            value[key] = _merge(value[key], new)
        else:
            value[key] = copy.deepcopy(new)
    return value


def _merge_patch(value: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7386."""
    result = dict(value)
    for key, new in patch.items():
        if new is None:
            result.pop(key, None)
        elif isinstance(new, Mapping):
            inner = result.get(key)
            result[key] = _merge_patch(inner if isinstance(inner, Mapping) else {}, new)
        else:
            result[key] = copy.deepcopy(new)
    return result
