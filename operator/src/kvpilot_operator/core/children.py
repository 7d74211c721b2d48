"""The child objects of an LLMDeployment as manifests for server-side apply. Pure builders; nothing is compared here.

Invariants: every child is owned and labelled; the Deployment never holds `replicas` (they are written through /scale,
and a field that an apply drops later would be reset to 1); each manifest carries the hash of what is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpilot_operator.core import naming
from kvpilot_operator.core.api_types import LLMDeploymentSpec
from kvpilot_operator.core.naming import Owner
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.resources import (
    CONFIG_MAPS,
    CONTROLLER_REVISIONS,
    DEPLOYMENTS,
    POD_DISRUPTION_BUDGETS,
    SERVICES,
    ApiResource,
)

PROGRESS_MARGIN_S = 600
"""What a roll-out may take beside the engine's start: scheduling, pulling a large image."""


def build_deployment(
    spec: LLMDeploymentSpec, owner: Owner, template: Mapping[str, Any], template_hash: str
) -> Manifest:
    """`template` is the chosen (stored) pod template, labelled here with its hash."""
    label = {naming.LABEL_TEMPLATE: template_hash}
    metadata = template.get("metadata", {})
    manifest = _build_child(DEPLOYMENTS, owner, naming.deployment_name(owner), labels=label)
    manifest["spec"] = {
        "selector": {"matchLabels": naming.selector_labels(owner)},
        "progressDeadlineSeconds": spec.startup.timeout_seconds + PROGRESS_MARGIN_S,
        "revisionHistoryLimit": 3,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable},
        },
        "template": {**template, "metadata": {**metadata, "labels": {**metadata.get("labels", {}), **label}}},
    }
    return _with_render_hash(manifest)


def build_service(spec: LLMDeploymentSpec, owner: Owner) -> Manifest:
    manifest = _build_child(SERVICES, owner, naming.service_name(owner), annotations=spec.service.annotations)
    manifest["spec"] = {
        "type": str(spec.service.type),
        "selector": naming.selector_labels(owner),
        "ports": [
            {
                "name": naming.PORT_NAME,
                "port": spec.service.port,
                "targetPort": naming.PORT_NAME,
                "protocol": "TCP",
                "appProtocol": "http",
            }
        ],
    }
    return _with_render_hash(manifest)


def build_tuning_configmap(owner: Owner, data: Mapping[str, str]) -> Manifest:
    """`data` holds the engine's tuning file under TUNING_KEY, and whatever must be written in the same moment."""
    manifest = _build_child(CONFIG_MAPS, owner, naming.tuning_config_map_name(owner))
    manifest["data"] = dict(data)
    return _with_render_hash(manifest)


def build_pdb(owner: Owner) -> Manifest:
    """At most one pod is evicted at a time; never a drain that can't end, not even with one replica (C26)."""
    manifest = _build_child(POD_DISRUPTION_BUDGETS, owner, naming.pdb_name(owner))
    manifest["spec"] = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": naming.selector_labels(owner)},
    }
    return _with_render_hash(manifest)


def build_template_revision(
    owner: Owner, template: Mapping[str, Any], *, template_hash: str, inputs_hash: str, revision: int
) -> Manifest:
    """The stored pod template. Its data can never be changed, its number can: the highest one is in use."""
    labels = {naming.LABEL_TEMPLATE: template_hash, naming.LABEL_TEMPLATE_INPUTS: inputs_hash}
    name = naming.template_revision_name(owner, template_hash)
    manifest = _build_child(CONTROLLER_REVISIONS, owner, name, labels=labels)
    manifest["revision"] = revision
    manifest["data"] = {"template": dict(template)}
    return _with_render_hash(manifest)


def _build_child(
    resource: ApiResource,
    owner: Owner,
    name: str,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": {**naming.child_labels(owner), **(labels or {})},
            "annotations": dict(annotations or {}),
            "ownerReferences": [naming.owner_reference(owner)],
        },
    }


def _with_render_hash(manifest: Manifest) -> Manifest:
    metadata = manifest["metadata"]
    annotations = {**metadata["annotations"], naming.ANNOTATION_RENDER_HASH: naming.content_hash(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
