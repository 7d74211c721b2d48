"""What the reconciler needs from outside, as Protocols: the API server, the engines, the clock.

Nothing here does I/O. Adapters implement these, `kvpilot_operator.testing` fakes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.observation import EngineState, Unknown
from kvpilot_operator.core.resources import ApiResource

Manifest = dict[str, Any]
"""One Kubernetes object as JSON gives it. Readers must not change what they were handed."""


class KubeApi(Protocol):
    """The API server. Errors are those of `kvpilot_operator.errors`; not found is None where it is an outcome."""

    async def get_object(self, resource: ApiResource, namespace: str, name: str) -> Manifest | None: ...

    async def list_objects(
        self, resource: ApiResource, namespace: str | None, *, labels: str = "", name: str = ""
    ) -> list[Manifest]:
        """All that match; `namespace` None means cluster-wide, `labels` is a selector, `name` one object's name."""
        ...

    async def get_openapi(self, path: str) -> Manifest | None:
        """One OpenAPI document that the API server publishes; None when it has none there."""
        ...

    async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
        """Server-side apply as `kvpilot`. Without `force` a field of another manager is a ConflictError."""
        ...

    async def replace_spec(self, manifest: Manifest) -> Manifest:
        """Merge-patch the child's spec: unlike an apply it replaces whole lists, others' elements included."""
        ...

    async def set_replicas(self, resource: ApiResource, namespace: str, name: str, replicas: int) -> None:
        """Write the scale subresource."""
        ...

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], resource_version: str
    ) -> Manifest:
        """Merge-patch the status of an LLMDeployment; ConflictError when it is no longer at `resource_version`."""
        ...

    async def annotate_pod(
        self, namespace: str, name: str, uid: str, annotations: Mapping[str, str | None]
    ) -> Manifest | None:
        """Set (or with None remove) pod annotations; None when the pod of that UID is gone."""
        ...

    async def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """Delete the pod of that UID; gone already is success."""
        ...

    async def create_event(self, manifest: Manifest) -> None:
        """ConflictError when there is one of that name already."""
        ...

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Merge-patch: the same thing happened again."""
        ...

    async def get_lease(self, namespace: str, name: str) -> Manifest | None: ...

    async def create_lease(self, manifest: Manifest) -> Manifest: ...

    async def update_lease(self, manifest: Manifest) -> Manifest:
        """Replace at its resourceVersion; ConflictError when somebody was first."""
        ...


class EngineTarget(NamedTuple):
    """Where one engine answers, and from which OOM event on it should tell."""

    uid: str
    pod_ip: str
    since: int = 0
    """Sequence number of the last OOM event that was handled; 0 asks for all it remembers."""


class EngineClient(Protocol):
    """Reads engines. Never raises for a bad engine: that is `Unknown(reason)`."""

    async def fetch_states(self, targets: Sequence[EngineTarget]) -> dict[str, EngineState | Unknown]:
        """State by pod UID, for every target; bounded in time and in concurrency."""
        ...


class Recorder(Protocol):
    """Where the figures of each object go (metrics)."""

    def set_object(self, key: NamespacedName, *, replicas: Mapping[str, int], utilization: float | None) -> None: ...

    def count_oom(self, key: NamespacedName, kind: str) -> None: ...

    def forget_object(self, key: NamespacedName) -> None: ...


class Clock(Protocol):
    """Time comes from here, so that tests own it."""

    def now(self) -> datetime:
        """The wall clock, UTC, aware."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...
