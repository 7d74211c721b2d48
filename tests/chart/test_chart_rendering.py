"""The chart as helm renders it, per scenario; structure that needs no helm is in tests/contract."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_operator.core.api_types import parse_spec
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.naming import Owner
from kvpilot_operator.core.pod_template import build_pod_template
from kvpilot_operator.core.rights import RIGHTS
from kvpilot_operator.settings import OperatorSettings
from kvpilot_tools.chart import helm_binary, render
from kvpilot_tools.manifests import example
from kvpilot_tools.repository import CHART

SCENARIOS = sorted((CHART / "ci").glob("*-values.yaml"))
Object = dict[str, Any]


@pytest.fixture(scope="session")
def helm() -> Path:
    binary = helm_binary()
    if binary is None:
        pytest.skip("no helm binary: `make setup-all` builds one")
    return binary


def rendered(helm: Path, values: Path, *extra: str) -> list[Object]:
    return [o for o in yaml.safe_load_all(render(helm, values, *extra)) if o]


def only(objects: list[Object], kind: str) -> Object:
    found = [o for o in objects if o["kind"] == kind]
    assert len(found) == 1, f"{len(found)} objects of kind {kind}"
    return found[0]


@pytest.mark.parametrize("values", SCENARIOS, ids=lambda p: p.name)
def test_every_scenario_passes_lint(helm: Path, values: Path) -> None:
    command = [str(helm), "lint", "--strict", "--kube-version", "1.34.4", str(CHART), "-f", str(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", SCENARIOS, ids=lambda p: p.name)
def test_the_operator_pod_is_restricted(helm: Path, values: Path) -> None:
    deployment = only(rendered(helm, values), "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert not container["image"].endswith(":latest")


@pytest.mark.parametrize("values", SCENARIOS, ids=lambda p: p.name)
def test_no_rule_has_a_wildcard(helm: Path, values: Path) -> None:
    for role in rendered(helm, values):
        for rule in role.get("rules", []):
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], role["metadata"]["name"]


def test_namespaced_mode_makes_no_cluster_role(helm: Path) -> None:  # C14
    objects = rendered(helm, CHART / "ci" / "namespaced-values.yaml")
    assert not [o for o in objects if o["kind"].startswith("Cluster")]
    roles = {(o["metadata"]["namespace"], o["metadata"]["name"]) for o in objects if o["kind"] == "Role"}
    assert roles == {("kvpilot-system", "k-kvpilot-lease"), ("team-a", "k-kvpilot"), ("team-b", "k-kvpilot")}
    env = {
        e["name"]: e.get("value")
        for e in only(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert env["KVPILOT_OPERATOR_NAMESPACES"] == "team-a,team-b"


def test_both_modes_grant_the_same_rules(helm: Path) -> None:
    cluster = only(rendered(helm, CHART / "ci" / "default-values.yaml"), "ClusterRole")["rules"]
    roles = [o for o in rendered(helm, CHART / "ci" / "namespaced-values.yaml") if o["kind"] == "Role"]
    assert all(r["rules"] == cluster for r in roles if not r["metadata"]["name"].endswith("-lease"))


def test_the_crd_is_installed_unless_told_otherwise(helm: Path) -> None:
    kinds = [o["kind"] for o in rendered(helm, CHART / "ci" / "default-values.yaml")]
    assert kinds.count("CustomResourceDefinition") == 1
    kinds = [o["kind"] for o in rendered(helm, CHART / "ci" / "namespaced-values.yaml")]
    assert "CustomResourceDefinition" not in kinds


@pytest.mark.parametrize(
    ("setting", "names"),
    [("image.tag=latest", "tag"), ("operator.tickSeconds=0", "tickSeconds"), ("rbac.wide=true", "wide")],
)
def test_a_bad_value_is_refused_by_name(helm: Path, setting: str, names: str) -> None:
    command = [str(helm), "template", "k", str(CHART), "--kube-version", "1.34.4", "--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert names in done.stderr


def rules_of(rules: list[Object]) -> set[tuple[str, str, str]]:
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def test_the_chart_grants_exactly_what_the_operator_uses(helm: Path) -> None:
    objects = rendered(helm, CHART / "ci" / "default-values.yaml")
    granted = rules_of(only(objects, "ClusterRole")["rules"]) | rules_of(only(objects, "Role")["rules"])
    used = {(right.group, right.resource, verb) for right in RIGHTS for verb in right.verbs}
    assert granted == used


def test_the_operator_understands_every_setting_of_the_chart(helm: Path) -> None:
    for values in SCENARIOS:
        (container,) = only(rendered(helm, values), "Deployment")["spec"]["template"]["spec"]["containers"]
        settings = OperatorSettings.load({e["name"]: e.get("value", "name") for e in container["env"]})
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        assert ports == {"health": settings.health_bind_port, "metrics": settings.metrics_bind_port}
        assert settings.default_engine_image
        assert settings.lease_namespace == "kvpilot-system"


MONITORED = ("--set", "podMonitor.enabled=true", "--api-versions", "monitoring.coreos.com/v1/PodMonitor")


def test_the_podmonitor_selects_what_the_operator_builds(helm: Path) -> None:
    monitor = only(rendered(helm, CHART / "ci" / "default-values.yaml", *MONITORED), "PodMonitor")["spec"]
    manifest = parse_spec({**example(), "metadata": {"name": "m", "namespace": "n", "uid": "u"}})
    owner = Owner(NamespacedName("n", "m"), "u")
    pod = build_pod_template(manifest, owner, image="engine:1")
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert set(monitor["podTargetLabels"]) <= set(pod["metadata"]["labels"])
    ports = {port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", [])}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
    assert {endpoint["path"] for endpoint in monitor["podMetricsEndpoints"]} == {"/metrics"}


def test_a_podmonitor_without_its_crd_is_refused_with_a_reason(helm: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        rendered(helm, CHART / "ci" / "default-values.yaml", "--set", "podMonitor.enabled=true")
    assert "Prometheus operator" in failed.value.stderr


def test_the_podmonitor_stays_in_the_served_namespaces(helm: Path) -> None:
    monitor = only(rendered(helm, CHART / "ci" / "namespaced-values.yaml", *MONITORED), "PodMonitor")["spec"]
    assert monitor["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}
