"""Carry out a plan against the API server, in an order in which a crash between two writes does no harm.

Children first (the tuning ConfigMap first of all: the cap and the events that led to it are one write), then the pods'
annotations, which the kubelet and the ReplicaSet controller act on, then deletions, and replicas last of all. Decides
nothing. What the server refused as invalid is not sent again before it has changed, or some time has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvpilot_operator.core.drift import ChildKey, Drift, Residues, child_key
from kvpilot_operator.core.naming import ANNOTATION_RENDER_HASH, Owner
from kvpilot_operator.core.observation import ChildObservation
from kvpilot_operator.core.plan import (
    Action,
    AnnotatePod,
    Apply,
    ApplyReason,
    DeletePod,
    ScaleDeployment,
    WriteSpecReplicas,
)
from kvpilot_operator.core.ports import Clock, KubeApi, Manifest
from kvpilot_operator.core.resources import DEPLOYMENTS, LLM_DEPLOYMENTS
from kvpilot_operator.errors import InvalidSpecError

logger = logging.getLogger(__name__)

REFUSAL_MEMORY_S = 300.0
"""What the object names (a class, a quota, an admission rule) may have changed meanwhile: try again after this."""

_ORDER: tuple[type[Action], ...] = (WriteSpecReplicas, Apply, AnnotatePod, DeletePod, ScaleDeployment)


@dataclass(frozen=True, slots=True)
class _Refusal:
    render_hash: str
    at: float
    message: str


class Executor:
    """One for the whole operator. What it remembers may be lost at any time: that costs a request, never a mistake."""

    def __init__(self, api: KubeApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._residues = Residues()
        self._refusals: dict[tuple[str, ChildKey], _Refusal] = {}

    def residues_of(self, owner: Owner) -> dict[ChildKey, frozenset[Drift]]:
        return self._residues.of_owner(owner.uid)

    def forget(self, owner_uid: str) -> None:
        """The object is gone."""
        self._residues.forget(owner_uid)
        for entry in [entry for entry in self._refusals if entry[0] == owner_uid]:
            del self._refusals[entry]

    async def execute(
        self, owner: Owner, actions: Sequence[Action], children: Sequence[ChildObservation], done: list[Action]
    ) -> None:
        """All of `actions`, each noted in `done`; the first error ends it, and the next pass plans what is left."""
        observed = {ChildKey(child.kind, child.name) for child in children if child.controlled}
        for action in sorted(actions, key=lambda action: _ORDER.index(type(action))):
            await self._execute(owner, action, observed)
            done.append(action)

    async def _execute(self, owner: Owner, action: Action, observed: set[ChildKey]) -> None:
        extra = {"key": str(owner.key), "event": type(action).__name__}
        match action:
            case Apply():
                await self._apply(owner, action, is_ours=child_key(action.manifest) in observed)
                if action.reason is not ApplyReason.CHANGED:
                    child = child_key(action.manifest)
                    logger.info("%s %s: %s %s", child.kind, child.name, action.reason, action.detail, extra=extra)
            case ScaleDeployment():
                logger.info("replicas of %s: %d (%s)", action.name, action.replicas, action.reason, extra=extra)
                await self._api.set_replicas(DEPLOYMENTS, owner.namespace, action.name, action.replicas)
            case WriteSpecReplicas():
                logger.info("spec.replicas: %d (%s)", action.replicas, action.reason, extra=extra)
                await self._api.set_replicas(LLM_DEPLOYMENTS, owner.namespace, owner.name, action.replicas)
            case AnnotatePod():
                await self._api.annotate_pod(owner.namespace, action.name, action.uid, action.annotations)
            case DeletePod():
                logger.info("pod %s is deleted: %s", action.name, action.reason, extra=extra)
                await self._api.delete_pod(owner.namespace, action.name, action.uid)

    async def _apply(self, owner: Owner, action: Apply, *, is_ours: bool) -> None:
        place = (owner.uid, child_key(action.manifest))
        render_hash = _render_hash(action.manifest)
        refusal = self._refusals.get(place)
        now = self._clock.monotonic()
        if refusal is not None and refusal.render_hash == render_hash and now - refusal.at < REFUSAL_MEMORY_S:
            raise InvalidSpecError(refusal.message)
        try:
            # By force only over what is ours: an object that appeared since it was looked for is not taken over.
            answer = await self._apply_or_replace(action.manifest, is_ours=is_ours)
        except InvalidSpecError as error:
            self._refusals[place] = _Refusal(render_hash, now, str(error))
            raise
        self._refusals.pop(place, None)
        self._residues.record(owner.uid, action.manifest, answer)

    async def _apply_or_replace(self, manifest: Manifest, *, is_ours: bool) -> Manifest:
        """Apply; where somebody's edit stands in the way, put our spec in the place of theirs.

        An apply keeps others' list elements, and one of them can make the whole invalid: a second port of one name.
        """
        try:
            return await self._api.apply(manifest, force=is_ours)
        except InvalidSpecError as refused:
            if not is_ours or "spec" not in manifest:
                raise
            try:
                await self._api.replace_spec(manifest)
            except InvalidSpecError:
                raise refused from None  # it is our render that is invalid
            return await self._api.apply(manifest, force=True)


def _render_hash(manifest: Manifest) -> str:
    return str(manifest["metadata"]["annotations"][ANNOTATION_RENDER_HASH])
