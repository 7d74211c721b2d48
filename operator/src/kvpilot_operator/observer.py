"""Look at everything that belongs to one object: its children, its pods, its engines. Reads only.

Children are found by label; where one is missing its place is looked at by name too, since an object without our label
may stand there. Lists of one pass are sent together, and engines are read once the pods are known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvpilot_operator.core import naming
from kvpilot_operator.core.memory_events import HandledMark, handled_seq
from kvpilot_operator.core.naming import FIELD_MANAGER, Owner
from kvpilot_operator.core.observation import ChildObservation, DeploymentObservation, EngineState, Unknown
from kvpilot_operator.core.observing import (
    deployment_conditions,
    find_foreign_scaler,
    is_scrapable,
    observe_child,
    observe_pod,
)
from kvpilot_operator.core.ports import EngineClient, EngineTarget, KubeApi, Manifest
from kvpilot_operator.core.resources import (
    CHILD_RESOURCES,
    CONFIG_MAPS,
    DEPLOYMENTS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    ApiResource,
)

_NOT_RUNNING = Unknown("NotRunning")


class Observer:
    """One for the whole operator; keeps nothing between calls."""

    def __init__(self, api: KubeApi, engines: EngineClient) -> None:
        self._api = api
        self._engines = engines

    async def list_children(self, owner: Owner) -> tuple[ChildObservation, ...]:
        """Ours, and whatever else stands in the place of one that is missing."""
        labels = naming.selector_string(owner.name)
        lists = await asyncio.gather(
            *(self._api.list_objects(resource, owner.namespace, labels=labels) for resource in CHILD_RESOURCES)
        )
        found = [manifest for manifests in lists for manifest in manifests]
        present = {(str(manifest["kind"]), str(manifest["metadata"]["name"])) for manifest in found}
        missing = [(resource, name) for resource, name in _places(owner) if (resource.kind, name) not in present]
        others = await asyncio.gather(
            *(self._api.list_objects(resource, owner.namespace, name=name) for resource, name in missing)
        )
        found.extend(manifest for manifests in others for manifest in manifests)
        return tuple(observe_child(manifest, owner.name, owner.uid) for manifest in found)

    async def observe(
        self, owner: Owner, generation: int, children: tuple[ChildObservation, ...], marks: tuple[HandledMark, ...]
    ) -> DeploymentObservation:
        """The whole picture; `marks` say which OOM events of which engine are known already."""
        deployment = _own_deployment(owner, children)
        pods = await self._list_pods(owner)
        states = await self._read_engines(pods, marks)
        replicas = tuple(observe_pod(pod, states.get(pod["metadata"]["uid"], _NOT_RUNNING)) for pod in pods)
        spec, status = deployment.get("spec", {}), deployment.get("status", {})
        current = deployment.get("metadata", {}).get("generation", 0)
        return DeploymentObservation(
            generation=generation,
            replicas_wanted=spec.get("replicas"),
            replicas=replicas,
            children=children,
            deployment_conditions=deployment_conditions(deployment),
            deployment_observed_generation_is_current=status.get("observedGeneration", 0) >= current,
            foreign_scaler=find_foreign_scaler(deployment, own_manager=FIELD_MANAGER),
        )

    async def _list_pods(self, owner: Owner) -> list[Manifest]:
        """Pods of our label that a ReplicaSet made: one that a person labelled is neither scaled nor counted."""
        pods = await self._api.list_objects(PODS, owner.namespace, labels=naming.selector_string(owner.name))
        ours = (pod for pod in pods if _is_made_by_replica_set(pod))
        return sorted(ours, key=lambda pod: str(pod["metadata"]["name"]))

    async def _read_engines(
        self, pods: Iterable[Manifest], marks: tuple[HandledMark, ...]
    ) -> dict[str, EngineState | Unknown]:
        targets = []
        for pod in pods:
            if is_scrapable(pod):
                known = observe_pod(pod, _NOT_RUNNING)
                since = handled_seq(marks, known.uid, known.restart_count)
                targets.append(EngineTarget(known.uid, known.pod_ip, since))
        return await self._engines.fetch_states(targets)


def _places(owner: Owner) -> tuple[tuple[ApiResource, str], ...]:
    """Where our children stand, the stored templates apart: a hash in the name is conflict enough."""
    return (
        (CONFIG_MAPS, naming.tuning_config_map_name(owner)),
        (SERVICES, naming.service_name(owner)),
        (POD_DISRUPTION_BUDGETS, naming.pdb_name(owner)),
        (DEPLOYMENTS, naming.deployment_name(owner)),
    )


def _is_made_by_replica_set(pod: Manifest) -> bool:
    references = pod["metadata"].get("ownerReferences") or ()
    return any(reference.get("controller") and reference.get("kind") == "ReplicaSet" for reference in references)


def _own_deployment(owner: Owner, children: Iterable[ChildObservation]) -> Manifest:
    """Empty when there is none, or when what stands there is not ours."""
    name = naming.deployment_name(owner)
    for child in children:
        if child.kind == DEPLOYMENTS.kind and child.name == name and child.controlled:
            return child.manifest
    return {}
