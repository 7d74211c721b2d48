"""From what should be and what is to what is done: a list of actions, each with its reason. Pure, so a table in a test.

Decides no policy (how many replicas, which share) and does nothing itself. Invariants: no action on an object that
is not ours; nothing is written that is already so; actions come in an order in which each is safe by itself, so that a
crash between two of them leaves a state which the next pass completes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvpilot_operator.core.drift import ChildKey, Drift, child_key, find_drift
from kvpilot_operator.core.naming import ANNOTATION_RENDER_HASH
from kvpilot_operator.core.observation import ChildObservation, DeploymentObservation, ReplicaObservation
from kvpilot_operator.core.observing import has_replicas_owner
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.resources import CHILD_RESOURCES, CONFIG_MAPS, CONTROLLER_REVISIONS, DEPLOYMENTS

MAX_PATHS_NAMED = 5


class ApplyReason(StrEnum):
    MISSING = "Missing"
    CHANGED = "Changed"
    """We render something else than what was applied last."""
    DRIFTED = "Drifted"
    """Somebody changed what we had applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Server-side apply of a whole child."""

    manifest: Manifest
    reason: ApplyReason
    detail: str = ""
    """The places that drifted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDeployment:
    """Write the Deployment's replicas through its scale subresource."""

    name: str
    replicas: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSpecReplicas:
    """Write the running count to the object's own scale, once, when it enters External mode."""

    replicas: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatePod:
    """Set pod annotations; None removes one."""

    name: str
    uid: str
    annotations: Mapping[str, str | None]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Its Deployment makes another."""

    name: str
    uid: str
    reason: str


Action = Apply | ScaleDeployment | WriteSpecReplicas | AnnotatePod | DeletePod


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the policies want beside the children; the defaults want nothing."""

    replicas: int | None = None
    """Of the Deployment; None writes none (paused, a foreign scaler)."""
    replicas_reason: str = ""
    spec_replicas: int | None = None
    """Of the object, on entering External mode."""
    pod_annotations: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """By pod UID."""
    pod_deletions: Mapping[str, str] = field(default_factory=dict)
    """Reason by pod UID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilePlan:
    actions: tuple[Action, ...] = ()
    conflicts: tuple[ChildKey, ...] = ()
    """Objects in the place of a child that are not ours: reason NameConflict."""


def plan(
    rendered: Sequence[Manifest],
    observation: DeploymentObservation,
    wanted: Wanted,
    residues: Mapping[ChildKey, frozenset[Drift]],
) -> ReconcilePlan:
    """`rendered` are all children as they should be, in any order."""
    observed = {ChildKey(child.kind, child.name): child for child in observation.children}
    conflicts = find_conflicts(rendered, observation.children)
    actions: list[Action] = []
    if wanted.spec_replicas is not None:
        # First of all: the count that the object asks for is read by the next pass.
        actions.append(WriteSpecReplicas(replicas=wanted.spec_replicas, reason="EnteredExternalMode"))
    blocked = set(conflicts)
    if any(key.kind in (CONFIG_MAPS.kind, CONTROLLER_REVISIONS.kind) for key in conflicts):
        # Its pods would read somebody else's tuning file, or its template would be nowhere stored.
        blocked.update(child_key(manifest) for manifest in rendered if manifest["kind"] == DEPLOYMENTS.kind)
    for manifest in _in_order(rendered):
        key = child_key(manifest)
        if key in blocked:
            continue
        apply = _plan_apply(manifest, observed.get(key), residues.get(key, frozenset()))
        if apply is not None:
            actions.append(apply)
    deployment = next((child_key(m) for m in rendered if m["kind"] == DEPLOYMENTS.kind), None)
    if deployment is not None and deployment not in blocked:
        actions.extend(_plan_scale(deployment.name, observation, wanted))
    actions.extend(_plan_pods(observation.replicas, wanted))
    return ReconcilePlan(actions=tuple(actions), conflicts=conflicts)


def claim_replicas(
    planned: ReconcilePlan, name: str, replicas: int | None, children: Iterable[ChildObservation]
) -> ReconcilePlan:
    """Write the replicas once although they are right already: from then on the server notes who writes them."""
    is_planned = any(isinstance(action, ScaleDeployment) for action in planned.actions)
    is_blocked = any(conflict.kind == DEPLOYMENTS.kind for conflict in planned.conflicts)
    child = next((c for c in children if (c.kind, c.name) == (DEPLOYMENTS.kind, name)), None)
    is_made = any(isinstance(a, Apply) and a.manifest["kind"] == DEPLOYMENTS.kind for a in planned.actions)
    if replicas is None or is_planned or is_blocked or (child is None and not is_made):
        return planned
    if child is not None and has_replicas_owner(child.manifest):
        return planned
    claim = ScaleDeployment(name=name, replicas=replicas, reason="claimed")
    return replace(planned, actions=(*planned.actions, claim))


def find_conflicts(rendered: Iterable[Manifest], children: Iterable[ChildObservation]) -> tuple[ChildKey, ...]:
    """Places of our children that an object holds which we don't control."""
    foreign = {ChildKey(child.kind, child.name) for child in children if not child.controlled}
    return tuple(sorted(foreign & {child_key(manifest) for manifest in rendered}))


def _in_order(rendered: Sequence[Manifest]) -> list[Manifest]:
    order = [resource.kind for resource in CHILD_RESOURCES]
    return sorted(rendered, key=lambda manifest: order.index(manifest["kind"]))


def _plan_apply(manifest: Manifest, child: ChildObservation | None, residue: frozenset[Drift]) -> Apply | None:
    if child is None:
        return Apply(manifest=manifest, reason=ApplyReason.MISSING)
    if _render_hash(manifest) != _render_hash(child.manifest):
        return Apply(manifest=manifest, reason=ApplyReason.CHANGED)
    drift = find_drift(manifest, child.manifest)
    if not drift or drift == residue:
        return None
    paths = sorted(place.path for place in drift - residue) or sorted(place.path for place in residue)
    more = f" and {len(paths) - MAX_PATHS_NAMED} more" if len(paths) > MAX_PATHS_NAMED else ""
    return Apply(manifest=manifest, reason=ApplyReason.DRIFTED, detail=", ".join(paths[:MAX_PATHS_NAMED]) + more)


def _render_hash(manifest: Mapping[str, object]) -> object:
    metadata = manifest.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    return annotations.get(ANNOTATION_RENDER_HASH) if isinstance(annotations, Mapping) else None


def _plan_scale(name: str, observation: DeploymentObservation, wanted: Wanted) -> list[Action]:
    if wanted.replicas is None:
        return []
    # A Deployment that this plan creates starts with the API server's default.
    current = 1 if observation.replicas_wanted is None else observation.replicas_wanted
    if wanted.replicas == current:
        return []
    return [ScaleDeployment(name=name, replicas=wanted.replicas, reason=wanted.replicas_reason)]


def _plan_pods(replicas: Sequence[ReplicaObservation], wanted: Wanted) -> list[Action]:
    actions: list[Action] = []
    for replica in replicas:
        if replica.terminating:
            continue
        if replica.uid in wanted.pod_deletions:
            reason = wanted.pod_deletions[replica.uid]
            actions.append(DeletePod(name=replica.name, uid=replica.uid, reason=reason))
            continue
        annotations = {
            key: value
            for key, value in wanted.pod_annotations.get(replica.uid, {}).items()
            if replica.annotations.get(key) != value
        }
        if annotations:
            actions.append(
                AnnotatePod(name=replica.name, uid=replica.uid, annotations=annotations, reason=", ".join(annotations))
            )
    return actions
