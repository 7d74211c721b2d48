"""The adapter against a real API server: preconditions, field ownership and refusals are the server's own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_kube_config

from kvpilot_operator.adapters.kube_api import KubernetesApi
from kvpilot_operator.core.resources import DEPLOYMENTS, LLM_DEPLOYMENTS, PODS, SERVICES
from kvpilot_operator.errors import ConflictError, InvalidSpecError
from kvpilot_operator.testing import make_object
from kvpilot_tools.cluster.api_server import ApiServer
from kvpilot_tools.kubectl import Kubectl, wait_for
from kvpilot_tools.repository import ROOT

pytestmark = pytest.mark.apiserver

NAMESPACE = f"adapter-{os.getpid()}"


@pytest.fixture(scope="module")
def kubectl(api_server: ApiServer) -> Kubectl:
    client = Kubectl(binary=api_server.kubectl, kubeconfig=api_server.kubeconfig, namespace=NAMESPACE)
    client.run("create", "namespace", NAMESPACE)
    client.run("apply", "--server-side", "-f", str(ROOT / "crds" / "llmdeployments.yaml"))
    wait_for(lambda: "llmdeployments" in client.run("api-resources", "-o", "name"), "our schema", limit_s=30)
    wait_for(lambda: client.get("serviceaccount", "default"), "the account that pods need", limit_s=30)
    return client


@pytest.fixture
async def api(api_server: ApiServer) -> AsyncIterator[KubernetesApi]:
    configuration = Configuration()
    await load_kube_config(  # type: ignore[no-untyped-call]
        config_file=str(api_server.kubeconfig), client_configuration=configuration
    )
    api = KubernetesApi(ApiClient(configuration))
    yield api
    await api.close()


def make_manifest(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    version = "apps/v1" if kind == "Deployment" else "v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"namespace": NAMESPACE, "name": name}, "spec": spec}


def make_deployment(name: str, **pod_spec: Any) -> dict[str, Any]:
    labels = {"app": name}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "engine", "image": "e"}], **pod_spec},
    }
    return make_manifest("Deployment", name, {"selector": {"matchLabels": labels}, "template": template})


def make_service(name: str, port: int) -> dict[str, Any]:
    return make_manifest("Service", name, {"ports": [{"name": "http", "port": port}]})


async def test_a_field_of_another_manager_is_a_conflict_unless_forced(api: KubernetesApi, kubectl: Kubectl) -> None:
    kubectl.apply(make_service("foreign", 80) | {"spec": {"type": "NodePort", "ports": [{"name": "http", "port": 80}]}})
    ours = make_manifest("Service", "foreign", {"type": "ClusterIP"})
    with pytest.raises(ConflictError):
        await api.apply(ours, force=False)
    answer = await api.apply(ours, force=True)
    assert answer["spec"]["type"] == "ClusterIP"


async def test_scaling_survives_an_apply_that_does_not_name_replicas(
    api: KubernetesApi, kubectl: Kubectl
) -> None:  # C20
    await api.apply(make_deployment("scaled"), force=False)
    await api.set_replicas(DEPLOYMENTS, NAMESPACE, "scaled", 4)
    answer = await api.apply(make_deployment("scaled", terminationGracePeriodSeconds=5), force=True)
    assert answer["spec"]["replicas"] == 4


@pytest.mark.parametrize(
    "pod_spec",
    [{"nodeSelector": "gpu"}, {"unknownField": 1}, {"tolerations": {"key": "a"}}, {"priority": "high"},
     {"containers": [{"name": "Not A Name", "image": "e"}]}],
    ids=["a string for a map", "an unknown field", "a map for a list", "a string for a number", "an invalid name"],
)  # fmt: skip
async def test_a_template_that_is_none_is_the_users_error(
    api: KubernetesApi, kubectl: Kubectl, pod_spec: dict[str, Any]
) -> None:
    with pytest.raises(InvalidSpecError):
        await api.apply(make_deployment("bad", **pod_spec), force=False)


async def test_a_status_is_not_written_over_a_version_that_was_not_seen(api: KubernetesApi, kubectl: Kubectl) -> None:
    kubectl.apply(make_object("stale", NAMESPACE))
    seen = await api.get_object(LLM_DEPLOYMENTS, NAMESPACE, "stale")
    assert seen is not None
    kubectl.patch("llmdeployment", "stale", {"spec": {"service": {"port": 9000}}})
    with pytest.raises(ConflictError):
        await api.patch_status(NAMESPACE, "stale", {"replicas": 1}, seen["metadata"]["resourceVersion"])


async def test_the_objects_own_scale_is_written_in_external_mode_only(api: KubernetesApi, kubectl: Kubectl) -> None:
    kubectl.apply(make_object("outside", NAMESPACE, scaling={"mode": "External"}))
    await api.set_replicas(LLM_DEPLOYMENTS, NAMESPACE, "outside", 3)
    found = await api.get_object(LLM_DEPLOYMENTS, NAMESPACE, "outside")
    assert found is not None
    assert found["spec"]["replicas"] == 3
    kubectl.apply(make_object("inside", NAMESPACE))
    with pytest.raises(InvalidSpecError, match="replicas"):
        await api.set_replicas(LLM_DEPLOYMENTS, NAMESPACE, "inside", 3)


async def test_pods_are_annotated_and_deleted_by_uid(api: KubernetesApi, kubectl: Kubectl) -> None:
    spec = {"containers": [{"name": "engine", "image": "e"}]}
    kubectl.apply(make_manifest("Pod", "engine-0", spec))
    (pod,) = await api.list_objects(PODS, NAMESPACE, name="engine-0")
    uid = pod["metadata"]["uid"]
    other = "00000000-0000-0000-0000-000000000000"
    assert await api.annotate_pod(NAMESPACE, "engine-0", other, {"example.com/a": "1"}) is None
    changed = await api.annotate_pod(NAMESPACE, "engine-0", uid, {"example.com/a": "1"})
    assert changed is not None
    assert changed["metadata"]["annotations"]["example.com/a"] == "1"
    changed = await api.annotate_pod(NAMESPACE, "engine-0", uid, {"example.com/a": None})
    assert changed is not None
    assert "example.com/a" not in changed["metadata"].get("annotations", {})
    await api.delete_pod(NAMESPACE, "engine-0", other)
    assert len(await api.list_objects(PODS, NAMESPACE, name="engine-0")) == 1
    await api.delete_pod(NAMESPACE, "engine-0", uid)
    assert await api.list_objects(PODS, NAMESPACE, name="engine-0") == []
    await api.delete_pod(NAMESPACE, "engine-0", uid)


async def test_a_list_by_name_finds_what_has_none_of_our_labels(api: KubernetesApi, kubectl: Kubectl) -> None:
    kubectl.apply(make_service("unlabelled", 80))
    assert await api.list_objects(SERVICES, NAMESPACE, labels="kvpilot.dev/deployment=unlabelled") == []
    (found,) = await api.list_objects(SERVICES, NAMESPACE, name="unlabelled")
    assert (found["kind"], found["apiVersion"]) == ("Service", "v1")


async def test_a_write_that_changes_nothing_makes_no_new_version(api: KubernetesApi, kubectl: Kubectl) -> None:
    first = await api.apply(make_service("same", 80), force=False)
    second = await api.apply(make_service("same", 80), force=True)
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
