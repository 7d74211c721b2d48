"""Who may write the number of replicas, with kubectl and with a real HorizontalPodAutoscaler. # C20"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpilot_tools.kubectl import Kubectl, KubectlError, wait_for
from kvpilot_tools.manifests import Object

pytestmark = pytest.mark.apiserver

# The HPA controller looks every 15 s, and learns of a new kind within 30 s.
HPA_LIMIT_S = 120.0


def create(kubectl: Kubectl, name: str, **spec: Any) -> None:
    """An object with the status that the operator writes, as far as an HPA reads it."""
    item = {
        "apiVersion": "kvpilot.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"source": "hf://owner/model"}, **spec},
    }
    kubectl.run("create", "-f", "-", stdin=json.dumps(item))
    status = {"replicas": 1, "selector": f"kvpilot.dev/deployment={name}"}
    kubectl.patch("llmdeployment", name, {"status": status}, "--subresource=status")


def get(kubectl: Kubectl, kind: str, name: str) -> Object:
    item = kubectl.get(kind, name)
    assert item is not None
    return item


def scale_of(kubectl: Kubectl, name: str) -> Object:
    path = f"/apis/kvpilot.dev/v1alpha1/namespaces/{kubectl.namespace}/llmdeployments/{name}/scale"
    scale: Object = json.loads(kubectl.run("get", "--raw", path))
    return scale


def test_scale_shows_replicas_and_the_selector_of_the_pods(kubectl: Kubectl) -> None:
    create(kubectl, "shown", replicas=3)
    scale = scale_of(kubectl, "shown")
    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == {"replicas": 1, "selector": "kvpilot.dev/deployment=shown"}


def test_kubectl_scale_is_refused_in_auto_and_says_what_to_do(kubectl: Kubectl) -> None:
    create(kubectl, "auto-kubectl")
    with pytest.raises(KubectlError) as refused:
        kubectl.run("scale", "llmdeployment", "auto-kubectl", "--replicas=3")
    assert "spec.replicas" in str(refused.value)
    assert "set scaling.mode to External" in str(refused.value)
    assert get(kubectl, "llmdeployment", "auto-kubectl")["spec"]["replicas"] == 1


def test_kubectl_scale_works_in_external(kubectl: Kubectl) -> None:
    create(kubectl, "external-kubectl", scaling={"mode": "External"})
    kubectl.run("scale", "llmdeployment", "external-kubectl", "--replicas=3")
    assert get(kubectl, "llmdeployment", "external-kubectl")["spec"]["replicas"] == 3


def test_a_whole_scale_object_is_refused_in_auto_as_an_autoscaler_sends_it(kubectl: Kubectl) -> None:
    create(kubectl, "auto-update")
    scale = scale_of(kubectl, "auto-update")
    scale["spec"]["replicas"] = 4
    path = scale["metadata"].get("selfLink") or (
        f"/apis/kvpilot.dev/v1alpha1/namespaces/{kubectl.namespace}/llmdeployments/auto-update/scale"
    )
    with pytest.raises(KubectlError) as refused:
        kubectl.run("replace", "--raw", path, "-f", "-", stdin=json.dumps(scale))
    assert "can't be changed while spec.scaling.mode is Auto" in str(refused.value)


def test_an_hpa_scales_in_external_and_shows_the_message_in_auto(kubectl: Kubectl) -> None:
    """Below minReplicas an HPA acts without any metric, so that none is needed here."""
    for name, mode in (("hpa-auto", "Auto"), ("hpa-external", "External")):
        create(kubectl, name, scaling={"mode": mode})
        hpa = {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": name},
            "spec": {
                "scaleTargetRef": {"apiVersion": "kvpilot.dev/v1alpha1", "kind": "LLMDeployment", "name": name},
                "minReplicas": 3,
                "maxReplicas": 5,
            },
        }
        kubectl.run("create", "-f", "-", stdin=json.dumps(hpa))

    def scaled() -> bool:
        return bool(get(kubectl, "llmdeployment", "hpa-external")["spec"]["replicas"] == 3)

    def refused() -> str:
        conditions = get(kubectl, "hpa", "hpa-auto").get("status", {}).get("conditions", [])
        able: Object = next((c for c in conditions if c["type"] == "AbleToScale"), {})
        return str(able.get("message", "")) if able.get("reason") == "FailedUpdateScale" else ""

    def report() -> str:
        return kubectl.run("describe", "hpa")

    wait_for(scaled, "the HPA to write spec.replicas", limit_s=HPA_LIMIT_S, report=report)
    message = wait_for(refused, "the HPA to show the refusal", limit_s=HPA_LIMIT_S, report=report)
    assert "set scaling.mode to External" in message
    assert get(kubectl, "llmdeployment", "hpa-auto")["spec"]["replicas"] == 1
