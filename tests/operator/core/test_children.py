"""The child objects as manifests."""

from __future__ import annotations

from typing import Any

import pytest

from kvpilot_operator.core import children, naming
from kvpilot_operator.core.api_types import parse_spec
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.ports import Manifest

OWNER = naming.Owner(NamespacedName("ns", "llama"), "uid-1")
TEMPLATE: dict[str, Any] = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "engine"}]}}


def build_all(**spec: Any) -> dict[str, Manifest]:
    parsed = parse_spec({"spec": {"model": {"source": "hf://owner/model"}, **spec}})
    built = (
        children.build_deployment(parsed, OWNER, TEMPLATE, "hash"),
        children.build_service(parsed, OWNER),
        children.build_tuning_configmap(OWNER, {"tuning.json": "{}"}),
        children.build_pdb(OWNER),
        children.build_template_revision(OWNER, TEMPLATE, template_hash="hash", inputs_hash="in", revision=3),
    )
    return {manifest["kind"]: manifest for manifest in built}


@pytest.mark.parametrize("kind", build_all())
def test_child_is_owned_labelled_and_hashed(kind: str) -> None:
    metadata = build_all()[kind]["metadata"]
    assert metadata["namespace"] == "ns"
    assert metadata["labels"].items() >= naming.child_labels(OWNER).items()
    (reference,) = metadata["ownerReferences"]
    assert (reference["uid"], reference["controller"], reference["kind"]) == ("uid-1", True, "LLMDeployment")
    assert len(metadata["annotations"][naming.ANNOTATION_RENDER_HASH]) == 10


def test_names_are_those_of_the_contract() -> None:
    assert {kind: manifest["metadata"]["name"] for kind, manifest in build_all().items()} == {
        "Deployment": "llama",
        "Service": "llama",
        "ConfigMap": "llama-tuning",
        "PodDisruptionBudget": "llama",
        "ControllerRevision": "llama-template-hash",
    }


def test_deployment_never_holds_replicas() -> None:
    assert "replicas" not in build_all(replicas=3)["Deployment"]["spec"]


def test_pods_carry_selector_and_template_hash() -> None:
    deployment = build_all()["Deployment"]
    template = children.build_deployment(
        parse_spec({"spec": {"model": {"source": "hf://a/b"}}}),
        OWNER,
        {"metadata": {"labels": naming.child_labels(OWNER)}, "spec": {}},
        "hash",
    )["spec"]["template"]
    assert deployment["spec"]["selector"] == {"matchLabels": {"kvpilot.dev/deployment": "llama"}}
    assert template["metadata"]["labels"]["kvpilot.dev/deployment"] == "llama"
    assert template["metadata"]["labels"]["kvpilot.dev/template"] == "hash"
    assert TEMPLATE["metadata"] == {"labels": {"a": "b"}}  # what was given stays as it was


def test_default_roll_out_needs_no_spare_device() -> None:
    """# C17"""
    assert build_all()["Deployment"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    chosen = build_all(rollout={"maxSurge": "25%", "maxUnavailable": 0})["Deployment"]["spec"]["strategy"]
    assert chosen["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 0}


def test_progress_deadline_is_above_the_start_budget() -> None:
    deployment = build_all(startup={"timeoutSeconds": 4000})["Deployment"]
    assert deployment["spec"]["progressDeadlineSeconds"] > 4000


def test_budget_never_blocks_a_drain() -> None:
    """# C26"""
    spec = build_all()["PodDisruptionBudget"]["spec"]
    assert spec["maxUnavailable"] == 1
    assert "minAvailable" not in spec
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_service_has_the_users_annotations_and_the_pods_port_by_name() -> None:
    service = build_all(service={"type": "NodePort", "port": 80, "annotations": {"a": "b"}})["Service"]
    assert service["metadata"]["annotations"]["a"] == "b"
    assert service["spec"]["type"] == "NodePort"
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "http")


def test_hash_changes_with_the_content_only() -> None:
    def hash_of(manifest: Manifest) -> str:
        found: str = manifest["metadata"]["annotations"][naming.ANNOTATION_RENDER_HASH]
        return found

    assert hash_of(build_all()["Service"]) == hash_of(build_all()["Service"])
    assert hash_of(build_all()["Service"]) != hash_of(build_all(service={"port": 80})["Service"])
    assert hash_of(build_all()["Deployment"]) == hash_of(build_all(service={"port": 80})["Deployment"])
