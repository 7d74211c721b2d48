"""Memory that runs out in each way that the operator tells apart, with real pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpilot_tools.kubectl import Kubectl, wait_for
from kvpilot_tools.manifests import condition, variant

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

Waited = Callable[..., dict[str, Any]]


def status(cluster: Kubectl, name: str) -> dict[str, Any]:
    item = cluster.get("llmdeployment", name)
    assert item is not None
    found: dict[str, Any] = item.get("status", {})
    return found


def tuning(cluster: Kubectl, name: str) -> str:
    item = cluster.get("configmap", f"{name}-tuning")
    assert item is not None
    text: str = item["data"]["tuning.json"]
    return text


def test_a_kernel_oom_kill_advises_host_memory_and_leaves_the_cap(cluster: Kubectl, wait_condition: Waited) -> None:
    """The limit is below what the process needs to start, so the kernel kills it for real. C27"""
    name = "squeezed"
    cluster.apply(variant(name, resources={"requests": {"memory": "64Mi"}, "limits": {"memory": "80Mi"}}))
    found = wait_condition(name, "Ready", "HostOOMKilled")
    assert found["status"] == "False"
    assert "resources.limits.memory" in found["message"]
    (pod,) = cluster.list("pods", selector=f"kvpilot.dev/deployment={name}")
    container = pod["status"]["containerStatuses"][0]
    ended = container["state"].get("terminated") or container["lastState"]["terminated"]
    assert ended["reason"] == "OOMKilled"
    cap = variant(name)["spec"]["memory"]["utilization"]
    assert f'"default": {cap}' in tuning(cluster, name).replace('"default":', '"default": ').replace("  ", " ")
    assert not [d for d in status(cluster, name).get("decisions", []) if d["loop"] == "Memory" and d["to"] != d["from"]]


def test_a_cap_below_the_weights_is_raised_when_the_device_has_room(
    cluster: Kubectl, apply_ready: Callable[..., dict[str, Any]]
) -> None:
    """Exit 72 names the share that would do; the operator goes there within the maximum."""
    name = "starved"
    item = apply_ready(variant(name, memory={"utilization": 0.12, "tuning": {"mode": "Auto", "min": 0.1, "max": 0.95}}))
    raised = [d for d in item["status"]["decisions"] if d["loop"] == "Memory" and d["to"] > d["from"]]
    assert raised
    assert item["status"]["memory"]["utilization"] > 0.12
    assert item["status"]["memory"]["utilization"] <= 0.95


def test_a_model_that_can_not_fit_says_so_with_numbers(cluster: Kubectl, wait_condition: Waited) -> None:
    name = "too-big"
    cluster.apply(variant(name, memory={"utilization": 0.12, "tuning": {"mode": "Auto", "min": 0.1, "max": 0.15}}))
    found = wait_condition(name, "Ready", "ModelDoesNotFit")
    assert found["status"] == "False"
    assert any(character.isdigit() for character in found["message"])


def test_a_device_oom_at_load_is_tried_a_bounded_number_of_times(cluster: Kubectl, wait_condition: Waited) -> None:
    """The engine steps down by itself from its start ledger, the operator lowers the cap, and both stop in the end."""
    name = "unlucky"
    inject = {"name": "KVPILOT_INJECT_OOM_AT", "value": "load"}
    manifest = variant(name)
    pod = manifest["spec"]["podTemplate"]["spec"]
    engine = next(c for c in pod["containers"] if c["name"] == "engine")
    engine["env"] = [*engine.get("env", []), inject]
    cluster.apply(manifest)
    found = wait_condition(name, "Ready", "OOMUnresolved", limit_s=240)
    assert found["status"] == "False"
    assert any(character.isdigit() for character in found["message"])

    def restarts() -> int:
        pods = cluster.list("pods", selector=f"kvpilot.dev/deployment={name}")
        return sum(c["restartCount"] for p in pods for c in p["status"].get("containerStatuses", []))

    lowered = [d for d in status(cluster, name)["decisions"] if d["loop"] == "Memory" and d["to"] < d["from"]]
    assert lowered, status(cluster, name)
    # It is held now: neither side goes on trying.
    settled, revision = restarts(), status(cluster, name)["memory"]["revision"]
    held = condition(cluster.get("llmdeployment", name) or {}, "MemoryTuned")
    assert held["status"] != "True"
    wait_for(lambda: status(cluster, name)["observedGeneration"] >= 1, "another look", limit_s=5)
    assert restarts() <= settled + 1
    assert status(cluster, name)["memory"]["revision"] == revision
