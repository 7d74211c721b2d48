"""The operator as it runs: kopf, queue, lease and adapter together, against a real API server."""

from __future__ import annotations

import copy
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from kvpilot_operator.testing import make_object
from kvpilot_tools.repository import ROOT

if TYPE_CHECKING:
    from tests.operator.handlers.conftest import Cluster, OperatorProcess
else:
    Cluster = OperatorProcess = Any

pytestmark = pytest.mark.apiserver

CHILDREN = (
    ("deployment", "llama"),
    ("service", "llama"),
    ("poddisruptionbudget", "llama"),
    ("configmap", "llama-tuning"),
)


def read(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def has_all_children(cluster: Cluster) -> bool:
    return all(cluster.get(kind, name) for kind, name in CHILDREN)


def create(cluster: Cluster, name: str = "llama", **spec: Any) -> None:
    cluster.apply(make_object(name, cluster.namespace, **spec))


def assert_nothing_was_forbidden(operator: OperatorProcess) -> None:
    text = operator.log.read_text()
    assert "HTTP 403" not in text
    assert "orbidden" not in text
    assert not [line for line in operator.lines if line["level"] in ("WARNING", "ERROR", "RAW")], text


@pytest.mark.parametrize("clusterwide", [False, True], ids=["namespaced", "cluster-wide"])
def test_children_appear_with_exactly_the_shipped_rights(cluster: Cluster, *, clusterwide: bool) -> None:  # C14
    create(cluster, replicas=2)
    operator = cluster.start_operator(clusterwide=clusterwide)
    cluster.wait(lambda: cluster.condition("Ready"), "a status")
    assert has_all_children(cluster)
    deployment = cluster.must_get("deployment", "llama")
    assert deployment["spec"]["replicas"] == 2
    status = cluster.llmd()["status"]
    assert status["observedGeneration"] == 1
    assert status["image"] == "engine:1"
    cluster.admin.patch("llmdeployment", "llama", {"spec": {"scaling": {"mode": "External"}}})
    cluster.wait(lambda: cluster.condition("ScalingActive").get("reason") == "ExternalScaler", "External mode")
    cluster.wait(lambda: cluster.admin.list("pods"), "pods of the Deployment")
    code, metrics = read(operator.metrics_port, "/metrics")
    assert code == 200
    assert "kvpilot_operator_lease_held 1.0" in metrics
    assert 'code="403"' not in metrics
    assert_nothing_was_forbidden(operator)


def test_no_object_ever_has_a_finalizer_or_an_annotation_of_the_framework(cluster: Cluster) -> None:  # C1, C2
    create(cluster)
    cluster.start_operator()
    cluster.wait(lambda: cluster.condition("Ready"), "a status")
    cluster.wait(lambda: cluster.admin.list("pods"), "pods of the Deployment")
    objects = [cluster.llmd(), *(cluster.get(kind, name) or {} for kind, name in CHILDREN)]
    objects += cluster.admin.list("pods")
    for manifest in objects:
        metadata = manifest["metadata"]
        assert "finalizers" not in metadata
        assert not [key for key in metadata.get("annotations", {}) if "kopf" in key or "zalando" in key]
    assert "kopf" not in cluster.llmd()["status"]


def test_deleted_and_edited_children_are_restored(cluster: Cluster) -> None:  # C5
    create(cluster)
    cluster.start_operator()
    cluster.wait(lambda: cluster.condition("Ready"), "a status")
    uids = {kind: cluster.must_get(kind, name)["metadata"]["uid"] for kind, name in CHILDREN}
    for kind, name in CHILDREN:
        cluster.admin.delete(kind, name)

    def are_all_new() -> bool:
        return all(
            (found := cluster.get(kind, name)) and found["metadata"]["uid"] != uids[kind] for kind, name in CHILDREN
        )

    cluster.wait(are_all_new, "every child to be made again")
    template = {"containers": [{"name": "engine", "image": "evil:1"}]}
    patch = {"spec": {"template": {"spec": template}}}
    cluster.admin.run("patch", "deployment", "llama", "--type=strategic", "-p", json.dumps(patch))
    cluster.admin.patch(
        "service", "llama", {"metadata": {"annotations": {"team": "blue"}}, "spec": {"selector": {"a": "b"}}}
    )

    def is_reverted() -> bool:
        deployment, service = cluster.must_get("deployment", "llama"), cluster.must_get("service", "llama")
        image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        return bool(image == "engine:1" and service["spec"]["selector"].get("kvpilot.dev/deployment") == "llama")

    cluster.wait(is_reverted, "the edits to be reverted")
    service = cluster.must_get("service", "llama")
    assert service["metadata"]["annotations"]["team"] == "blue"

    # An apply would only add our port beside theirs, and two of one name are refused: the edit once stayed for good.
    cluster.admin.patch("service", "llama", {"spec": {"ports": [{"name": "http", "port": 9, "targetPort": "http"}]}})

    def is_our_port() -> bool:
        return [port["port"] for port in cluster.must_get("service", "llama")["spec"]["ports"]] == [8000]

    cluster.wait(is_our_port, "the port to be restored")


def test_an_orphaned_deployment_is_owned_again(cluster: Cluster) -> None:  # C5
    create(cluster)
    cluster.start_operator()
    cluster.wait(lambda: cluster.condition("Ready"), "a status")
    before = cluster.must_get("deployment", "llama")
    cluster.admin.delete("llmdeployment", "llama", "--cascade=orphan")
    create(cluster)
    uid = cluster.llmd()["metadata"]["uid"]

    def is_owned() -> bool:
        deployment = cluster.must_get("deployment", "llama")
        return [r["uid"] for r in deployment["metadata"].get("ownerReferences", [])] == [uid]

    cluster.wait(is_owned, "the Deployment to be owned by the new object")
    after = cluster.must_get("deployment", "llama")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    cluster.admin.delete("llmdeployment", "llama")
    cluster.wait(lambda: not cluster.get("deployment", "llama"), "the Deployment to go with its owner")


def test_an_overlay_that_is_no_pod_template_is_a_condition_and_mended_by_an_edit(cluster: Cluster) -> None:  # C10
    create(cluster, podTemplate={"spec": {"nodeSelector": "gpu"}})
    operator = cluster.start_operator()
    cluster.wait(lambda: cluster.condition("Ready").get("reason") == "InvalidSpec", "InvalidSpec")
    assert "nodeSelector" in cluster.condition("Ready")["message"]
    assert cluster.condition("Degraded")["status"] == "True"
    cluster.admin.patch("llmdeployment", "llama", {"spec": {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}})
    cluster.wait(lambda: has_all_children(cluster), "the children")
    cluster.wait(lambda: cluster.condition("Degraded").get("status") == "False", "the condition to clear")
    assert not [line for line in operator.lines if "Traceback" in line["message"]]


def test_deleting_an_object_or_its_namespace_never_waits_for_an_operator(cluster: Cluster) -> None:  # C1, C2
    create(cluster)
    create(cluster, "other")
    operator = cluster.start_operator()
    cluster.wait(lambda: cluster.condition("Ready") and cluster.condition("Ready", "other"), "a status")
    operator.kill()
    cluster.admin.run("delete", "llmdeployment", "llama", "--timeout=10s")
    cluster.wait(lambda: not any(cluster.get(kind, name) for kind, name in CHILDREN), "the children to be collected")
    cluster.admin.run("delete", "namespace", cluster.namespace, "--timeout=50s")


def test_a_killed_operator_is_continued_by_the_next(cluster: Cluster) -> None:  # C6
    create(cluster, replicas=2)
    create(cluster, "goes")
    operator = cluster.start_operator()
    cluster.wait(lambda: cluster.get("configmap", "llama-tuning"), "the first child")
    operator.kill()
    cluster.admin.patch("llmdeployment", "llama", {"spec": {"service": {"port": 9000}}})
    cluster.admin.delete("llmdeployment", "goes")
    cluster.start_operator()

    def is_current() -> bool:
        return has_all_children(cluster) and bool(
            cluster.must_get("service", "llama")["spec"]["ports"][0]["port"] == 9000
        )

    cluster.wait(is_current, "the state of the spec")
    cluster.wait(lambda: cluster.llmd()["status"].get("observedGeneration") == 2, "the status")
    deployment = cluster.must_get("deployment", "llama")
    assert deployment["spec"]["replicas"] == 2
    assert len(cluster.admin.list("controllerrevisions", selector="kvpilot.dev/deployment=llama")) == 1
    cluster.wait(lambda: not cluster.get("deployment", "goes"), "nothing to be left of the deleted object")


def test_a_second_operator_does_not_write_until_the_first_is_gone(cluster: Cluster) -> None:  # C7
    first = cluster.start_operator()
    cluster.wait(lambda: read(first.metrics_port, "/readyz")[0] == 200, "the first to be ready")
    second = cluster.start_operator()
    cluster.wait(lambda: "another operator holds the lease" in second.log.read_text(), "the second to wait")
    assert read(second.metrics_port, "/readyz")[0] == 503
    assert read(second.health_port, "/healthz")[0] == 200
    assert "kvpilot_operator_lease_held 0.0" in read(second.metrics_port, "/metrics")[1]
    create(cluster)
    cluster.wait(lambda: cluster.condition("Ready"), "the first to act")
    first.stop()
    cluster.admin.delete("service", "llama")
    cluster.wait(lambda: cluster.get("service", "llama"), "the second to act")
    assert "holding the lease" in second.log.read_text()


def test_an_unchanged_object_costs_no_writes(cluster: Cluster) -> None:
    create(cluster)
    operator = cluster.start_operator()
    cluster.wait(lambda: cluster.condition("Ready"), "a status")
    settled = count_calls(operator, "patch")
    cluster.wait(lambda: count_calls(operator, "list") > 16, "some ticks")
    later = count_calls(operator, "patch")
    cluster.wait(lambda: count_calls(operator, "list") > 24, "more ticks")
    assert count_calls(operator, "patch") == later
    assert later - settled <= 4


def count_calls(operator: OperatorProcess, verb: str) -> int:
    lines = read(operator.metrics_port, "/metrics")[1].splitlines()
    found = [line for line in lines if line.startswith("kvpilot_operator_api_calls_total") and f'verb="{verb}"' in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in found))


def test_an_older_schema_is_said_aloud_until_it_is_upgraded(cluster: Cluster) -> None:  # C25
    current: dict[str, Any] = yaml.safe_load((ROOT / "crds" / "llmdeployments.yaml").read_text())
    older = copy.deepcopy(current)
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["scaling"]["properties"]["scaleDownStabilizationSeconds"]

    def install(crd: dict[str, Any]) -> None:
        cluster.admin.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(crd))

    def shows(code: int, missing: int) -> bool:
        metric = f"kvpilot_operator_crd_missing_fields {missing}.0"
        ports = operator.metrics_port
        return read(ports, "/readyz")[0] == code and metric in read(ports, "/metrics")[1]

    operator = cluster.start_operator(KVPILOT_OPERATOR_RESYNC_SECONDS="1")
    cluster.wait(lambda: shows(200, 0), "the operator to be ready")
    try:
        install(older)
        cluster.wait(lambda: shows(503, 1), "it to be seen")
        problem = json.loads(read(operator.metrics_port, "/readyz")[1])["problem"]
        assert "spec.scaling.scaleDownStabilizationSeconds;" in problem
        assert "crds.install=true" in problem
        assert [line["message"] for line in operator.lines if line["level"] == "ERROR"] == [problem]
        assert read(operator.health_port, "/healthz")[0] == 200
        create(cluster)
        cluster.wait(lambda: cluster.condition("Ready"), "objects to be served all the same")
    finally:
        install(current)
    cluster.wait(lambda: shows(200, 0), "the upgrade to be seen")
    assert "has every field now" in operator.log.read_text()


def test_wrong_settings_end_the_start_with_all_problems(cluster: Cluster) -> None:
    operator = cluster.start_operator(KVPILOT_OPERATOR_WORKERS="0", KVPILOT_OPERATOR_COLOUR="blue")
    assert operator.process.wait(20) == 64
    text = operator.log.read_text()
    assert "KVPILOT_OPERATOR_WORKERS: must be above 0" in text
    assert "KVPILOT_OPERATOR_COLOUR: unknown setting" in text


def test_stopping_is_quick_and_clean(cluster: Cluster) -> None:
    operator = cluster.start_operator()
    cluster.wait(lambda: read(operator.health_port, "/healthz")[0] == 200, "health")
    operator.stop()
    assert operator.process.returncode == 0
    lease = cluster.must_get("lease", "kvpilot-operator")
    assert not lease["spec"].get("holderIdentity")
    assert not [line for line in operator.lines if line["level"] in ("ERROR", "RAW")]


def test_an_autoscaler_on_our_deployment_is_told_of_until_it_is_handed_back(cluster: Cluster) -> None:  # C20
    create(cluster)
    cluster.start_operator()
    cluster.wait(lambda: cluster.condition("Ready"), "a status")
    scale = '{"spec": {"replicas": 3}}'
    arguments = ("patch", "deployment", "llama", "--subresource=scale", "--type=merge", "-p", scale)
    cluster.admin.run(*arguments, "--field-manager=kube-controller-manager")  # as the HPA controller does
    cluster.wait(lambda: cluster.condition("ScalingActive").get("reason") == "ExternalScaler", "it to be told")
    assert cluster.must_get("deployment", "llama")["spec"]["replicas"] == 3
    cluster.admin.run("scale", "deployment", "llama", "--replicas=2")
    cluster.wait(lambda: cluster.condition("ScalingActive").get("reason") != "ExternalScaler", "us to go on")
    cluster.wait(lambda: cluster.must_get("deployment", "llama")["spec"]["replicas"] == 3, "the count to go on from")


def test_the_framework_s_own_command_starts_the_same_operator(cluster: Cluster) -> None:
    create(cluster)
    operator = cluster.start_operator(command=("-m", "kopf", "run", "-m", "kvpilot_operator.main", "--standalone",
                                               "-n", cluster.namespace))  # fmt: skip
    cluster.wait(lambda: cluster.condition("Ready"), "a status")
    assert has_all_children(cluster)
    operator.stop()
    assert operator.process.returncode == 0
