"""Raw objects of the API server into the frozen facts of `observation`.

Pure: takes manifests as JSON gave them and changes none of them. Decides nothing; whatever a pod leaves out stays at
"not known" rather than at a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from kvpilot_operator.core.naming import ANNOTATION_RENDER_HASH, CONTAINER_ENGINE, LABEL_DEPLOYMENT, LABEL_TEMPLATE
from kvpilot_operator.core.observation import (
    ChildObservation,
    EngineState,
    ReplicaObservation,
    Termination,
    Unknown,
)
from kvpilot_operator.core.timestamps import parse_time


def observe_pod(pod: Mapping[str, Any], engine: EngineState | Unknown) -> ReplicaObservation:
    """One engine pod, with what its engine said."""
    metadata = pod.get("metadata", {})
    status = pod.get("status", {})
    container = _engine_status(status.get("containerStatuses"))
    waiting = _waiting(status, container)
    return ReplicaObservation(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        ready=_condition(status, "Ready").get("status") == "True",
        terminating="deletionTimestamp" in metadata,
        phase=status.get("phase") or "Unknown",
        scheduled=bool(pod.get("spec", {}).get("nodeName")),
        unschedulable_message=_unschedulable_message(status),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        template_hash=metadata.get("labels", {}).get(LABEL_TEMPLATE, ""),
        node=pod.get("spec", {}).get("nodeName", ""),
        pod_ip=status.get("podIP", ""),
        created_at=parse_time(metadata.get("creationTimestamp")),
        started_at=_started_at(container),
        restart_count=_restart_count(container),
        last_termination=_last_termination(container),
        pod_reason=status.get("reason", ""),
        annotations=dict(metadata.get("annotations") or {}),
        engine=engine,
    )


def is_scrapable(pod: Mapping[str, Any]) -> bool:
    """Whether an engine may answer in this pod: it has an address and its engine container runs."""
    status = pod.get("status", {})
    container = _engine_status(status.get("containerStatuses"))
    return bool(status.get("podIP")) and "running" in container.get("state", {})


def observe_child(manifest: dict[str, Any], owner_name: str, owner_uid: str) -> ChildObservation:
    """One object that stands where a child of ours belongs: ours by its controller's UID, or an orphan to take back."""
    metadata = manifest.get("metadata", {})
    return ChildObservation(
        kind=manifest.get("kind", ""),
        name=metadata.get("name", ""),
        controlled=is_controlled_by(manifest, owner_uid) or is_orphan_of(manifest, owner_name),
        manifest=manifest,
    )


def is_orphan_of(manifest: Mapping[str, Any], owner_name: str) -> bool:
    """Made by us for an object of this name, without a controller since that was deleted with `--cascade=orphan`."""
    metadata = manifest.get("metadata", {})
    labels = metadata.get("labels") or {}
    if labels.get(LABEL_DEPLOYMENT) != owner_name or ANNOTATION_RENDER_HASH not in (metadata.get("annotations") or {}):
        return False
    return not any(reference.get("controller") for reference in metadata.get("ownerReferences") or ())


def is_controlled_by(manifest: Mapping[str, Any], owner_uid: str) -> bool:
    """By UID: an object of our name and kind that owns it may be an earlier one, deleted since."""
    references: Sequence[Mapping[str, Any]] = manifest.get("metadata", {}).get("ownerReferences") or ()
    return any(reference.get("controller") is True and reference.get("uid") == owner_uid for reference in references)


_BEFORE_FIRST_APPLY = "before-first-apply"
"""Nobody: the API server's own note for values that were there, unowned, when a field was first applied."""


def find_foreign_scaler(deployment: Mapping[str, Any], *, own_manager: str) -> str:
    """Which controller else writes the Deployment's replicas; empty when none does.

    There is no right to list HPAs, and none is needed: who wrote a field last is in managedFields, and a write through
    `/scale` is marked as such. A person (`kubectl scale`, `kubectl edit`) is no scaler: that is drift, and repaired.
    It is also how the replicas are handed back once the HPA is gone, since the mark of its last write stays.
    """
    for entry in deployment.get("metadata", {}).get("managedFields") or ():
        manager = str(entry.get("manager", ""))
        is_scaler = manager not in (own_manager, _BEFORE_FIRST_APPLY) and not manager.startswith("kubectl")
        if not is_scaler or entry.get("subresource") != "scale":
            continue
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {}):
            return f"({manager} through /scale)"
    return ""


def has_replicas_owner(deployment: Mapping[str, Any]) -> bool:
    """Whether the server keeps track of who writes the replicas: only once somebody has applied them."""
    entries = deployment.get("metadata", {}).get("managedFields") or ()
    return any("f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {}) for entry in entries)


def deployment_conditions(deployment: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """Type, status, reason and message of each condition."""
    conditions: Iterable[Mapping[str, Any]] = deployment.get("status", {}).get("conditions") or ()
    return tuple(
        {key: str(condition.get(key, "")) for key in ("type", "status", "reason", "message")}
        for condition in conditions
    )


def _engine_status(statuses: object) -> Mapping[str, Any]:
    if not isinstance(statuses, list):
        return {}
    return next((status for status in statuses if status.get("name") == CONTAINER_ENGINE), {})


def _waiting(status: Mapping[str, Any], container: Mapping[str, Any]) -> Mapping[str, Any]:
    """Why the engine waits; an init container that is stuck is the reason while it is."""
    for init in status.get("initContainerStatuses") or ():
        waiting: Mapping[str, Any] = init.get("state", {}).get("waiting") or {}
        if waiting and waiting.get("reason") != "PodInitializing":
            return waiting
    return container.get("state", {}).get("waiting") or {}


def _condition(status: Mapping[str, Any], type_: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or () if c.get("type") == type_), {})


def _unschedulable_message(status: Mapping[str, Any]) -> str:
    condition = _condition(status, "PodScheduled")
    if condition.get("status") == "False" and condition.get("reason") == "Unschedulable":
        return str(condition.get("message", "")) or "unschedulable"
    return ""


def _started_at(container: Mapping[str, Any]) -> datetime | None:
    return parse_time(container.get("state", {}).get("running", {}).get("startedAt"))


def _restart_count(container: Mapping[str, Any]) -> int:
    count = container.get("restartCount", 0)
    return count if isinstance(count, int) else 0


def _last_termination(container: Mapping[str, Any]) -> Termination | None:
    """The newest end of a run: the present one if it has ended, else the one before."""
    state, count = container.get("state", {}), _restart_count(container)
    ended = state.get("terminated")
    run = count
    if not ended:
        ended = container.get("lastState", {}).get("terminated")
        # A container that waits for its restart still has the count of the run that ended.
        run = count if "waiting" in state else count - 1
    if not ended:
        return None
    exit_code = ended.get("exitCode")
    return Termination(
        exit_code=exit_code if isinstance(exit_code, int) else -1,
        reason=ended.get("reason", ""),
        message=ended.get("message", ""),
        finished_at=parse_time(ended.get("finishedAt")),
        run=max(0, run),
    )
