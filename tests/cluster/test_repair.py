"""Children are repaired, the operator may die at any moment, and nothing is stuck when it is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpilot_tools.kubectl import Kubectl, wait_for
from kvpilot_tools.manifests import is_ready, variant

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

Applied = Callable[..., dict[str, Any]]
CHILDREN = ("deployment", "service", "poddisruptionbudget")


def uid(cluster: Kubectl, kind: str, name: str) -> str | None:
    item = cluster.get(kind, name)
    return item["metadata"]["uid"] if item else None


def test_deleted_and_edited_children_come_back(cluster: Kubectl, apply_ready: Applied) -> None:  # C5
    name = "mended"
    apply_ready(variant(name))
    for kind in CHILDREN:
        before = uid(cluster, kind, name)
        cluster.delete(kind, name)
        wait_for(lambda k=kind, b=before: uid(cluster, k, name) not in (None, b), f"a new {kind}", limit_s=60)  # type: ignore[misc]
    cluster.delete("configmap", f"{name}-tuning")
    wait_for(lambda: uid(cluster, "configmap", f"{name}-tuning"), "a new tuning ConfigMap", limit_s=60)

    cluster.patch("service", name, {"spec": {"ports": [{"name": "http", "port": 9999, "targetPort": "http"}]}})
    cluster.patch("service", name, {"metadata": {"annotations": {"mine": "kept"}}})

    def restored() -> bool:
        service = cluster.get("service", name)
        return bool(service and service["spec"]["ports"][0]["port"] == 8000)

    wait_for(restored, "the Service's port to be restored", limit_s=60)
    service = cluster.get("service", name)
    assert service is not None
    assert service["metadata"]["annotations"]["mine"] == "kept"


def test_an_operator_killed_in_the_middle_ends_in_the_same_state(
    cluster: Kubectl, operator: Kubectl, apply_ready: Applied
) -> None:  # C6
    name = "steady"
    manifest = variant(name)
    operator.run("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
    cluster.apply(manifest)
    operator.run("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
    operator.run("rollout", "status", "deployment/kvpilot", "--timeout=50s")
    item = apply_ready(manifest)
    assert item["status"]["replicas"] == 1
    for kind in ("deployments", "services", "poddisruptionbudgets"):
        assert [o["metadata"]["name"] for o in cluster.list(kind) if o["metadata"]["name"] != "kubernetes"] == [name]
    sets = cluster.list("replicasets", selector=f"kvpilot.dev/deployment={name}")
    assert len(sets) == 1


def test_an_object_deleted_while_the_operator_is_gone_leaves_nothing(
    cluster: Kubectl, operator: Kubectl, apply_ready: Applied
) -> None:  # C1
    name = "orphanless"
    apply_ready(variant(name))
    operator.run("scale", "deployment/kvpilot", "--replicas=0")
    try:
        wait_for(lambda: not operator.list("pods"), "the operator to be gone", limit_s=60)
        cluster.delete("llmdeployment", name, "--timeout=30s")
        for kind in CHILDREN:
            wait_for(lambda k=kind: cluster.get(k, name) is None, f"the {kind} to be collected", limit_s=60)  # type: ignore[misc]
    finally:
        operator.run("scale", "deployment/kvpilot", "--replicas=1")
        operator.run("rollout", "status", "deployment/kvpilot", "--timeout=50s")


def test_ready_speaks_of_the_present_generation(cluster: Kubectl, apply_ready: Applied) -> None:  # C22
    name = "current"
    apply_ready(variant(name))
    cluster.patch("llmdeployment", name, {"spec": {"engine": {"maxModelLen": 256}}})
    assert not is_ready(cluster.get("llmdeployment", name))

    def rolled() -> bool:
        item = cluster.get("llmdeployment", name)
        return is_ready(item)

    wait_for(rolled, "Ready for the new generation", limit_s=180)
    pods = cluster.list("pods", selector=f"kvpilot.dev/deployment={name}")
    (pod,) = [p for p in pods if "deletionTimestamp" not in p["metadata"]]
    engine = next(c for c in pod["spec"]["containers"] if c["name"] == "engine")
    assert "256" in " ".join(engine["args"])
