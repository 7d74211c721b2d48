"""Names that others rely on: labels, annotations, child names, ports, mounts, and the hashes in them.

The written contract is `docs/contracts/labels-and-annotations.md`. Nothing here decides anything. Names and label keys
never change after a release: a changed selector would orphan every running pod.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.resources import LLM_DEPLOYMENTS

FIELD_MANAGER = "kvpilot"

LABEL_DEPLOYMENT = "kvpilot.dev/deployment"
"""The selector: on every child and pod, with the object's name."""
LABEL_TEMPLATE = "kvpilot.dev/template"
"""On pods, the Deployment and the stored template: which pod template this is."""
LABEL_TEMPLATE_INPUTS = "kvpilot.dev/template-inputs"
"""On the stored template: hash of the pod-relevant spec that it was rendered from."""
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "kvpilot"

ANNOTATION_RENDER_HASH = "kvpilot.dev/render-hash"
ANNOTATION_TUNING_TOUCH = "kvpilot.dev/tuning-touch"
ANNOTATION_POD_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
ANNOTATION_ACCEPT_UPDATE = "kvpilot.dev/accept-update"
ANNOTATION_PAUSED = "kvpilot.dev/paused"
ANNOTATION_SCHEMA_VERSION = "kvpilot.dev/schema-version"

SCHEMA_VERSION = 2
"""The version of `crds/llmdeployments.yaml` that this operator reads and writes."""

CONTAINER_ENGINE = "engine"
PORT_NAME = "http"
PORT = 8000

TUNING_DIR = "/etc/kvpilot"
TUNING_KEY = "tuning.json"
TUNING_FILE = f"{TUNING_DIR}/{TUNING_KEY}"
STATE_DIR = "/var/lib/kvpilot/state"
CACHE_DIR = "/var/lib/kvpilot/cache"
MODEL_DIR = "/var/lib/kvpilot/model"

LEARNED_CONFIG_MAP = "kvpilot-learned"
OPERATOR_LEASE = "kvpilot-operator"

_HASH_LENGTH = 10


class Owner(NamedTuple):
    """The LLMDeployment that children belong to."""

    key: NamespacedName
    uid: str

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def namespace(self) -> str:
        return self.key.namespace


def deployment_name(owner: Owner) -> str:
    return owner.name


def service_name(owner: Owner) -> str:
    return owner.name


def pdb_name(owner: Owner) -> str:
    return owner.name


def tuning_config_map_name(owner: Owner) -> str:
    return f"{owner.name}-tuning"


def template_revision_name(owner: Owner, template: str) -> str:
    return f"{owner.name}-template-{template}"


def selector_labels(owner: Owner) -> dict[str, str]:
    return {LABEL_DEPLOYMENT: owner.name}


def selector_string(name: str) -> str:
    """The same selector as text, for `status.selector` and list calls."""
    return f"{LABEL_DEPLOYMENT}={name}"


def child_labels(owner: Owner) -> dict[str, str]:
    return {
        LABEL_NAME: "kvpilot-engine",
        LABEL_INSTANCE: owner.name,
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_DEPLOYMENT: owner.name,
    }


def owner_reference(owner: Owner) -> dict[str, Any]:
    """The controller reference: deleting the object deletes the child, without a finalizer (C1)."""
    return {
        "apiVersion": LLM_DEPLOYMENTS.api_version,
        "kind": LLM_DEPLOYMENTS.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def content_hash(value: object) -> str:
    """A short hash of a JSON value; equal values hash equally whatever the order of their keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
