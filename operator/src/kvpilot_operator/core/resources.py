"""The Kubernetes resources that the operator touches: how each is addressed. No client here."""

from __future__ import annotations

from typing import NamedTuple


class ApiResource(NamedTuple):
    """One resource type: enough to build its REST path and its manifests."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """`/api/v1` or `/apis/GROUP/VERSION`."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


LLM_DEPLOYMENTS = ApiResource("kvpilot.dev", "v1alpha1", "llmdeployments", "LLMDeployment")
DEPLOYMENTS = ApiResource("apps", "v1", "deployments", "Deployment")
CONTROLLER_REVISIONS = ApiResource("apps", "v1", "controllerrevisions", "ControllerRevision")
SERVICES = ApiResource("", "v1", "services", "Service")
CONFIG_MAPS = ApiResource("", "v1", "configmaps", "ConfigMap")
PODS = ApiResource("", "v1", "pods", "Pod")
EVENTS = ApiResource("", "v1", "events", "Event")
POD_DISRUPTION_BUDGETS = ApiResource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
LEASES = ApiResource("coordination.k8s.io", "v1", "leases", "Lease")

CHILD_RESOURCES = (CONFIG_MAPS, CONTROLLER_REVISIONS, SERVICES, POD_DISRUPTION_BUDGETS, DEPLOYMENTS)
"""What a reconcile applies, in the order of creation: what a pod needs comes before what makes pods."""

WATCHED_RESOURCES = (LLM_DEPLOYMENTS, *CHILD_RESOURCES, PODS)

BY_KIND = {resource.kind: resource for resource in (LLM_DEPLOYMENTS, *CHILD_RESOURCES, PODS, EVENTS, LEASES)}


def resource_of(manifest: dict[str, object]) -> ApiResource:
    """The resource of a manifest; KeyError for a kind that the operator does not touch."""
    return BY_KIND[str(manifest.get("kind"))]
