"""The operator installed by Helm on the local cluster, once a run; each test gets a namespace of its own."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpilot_tools import images
from kvpilot_tools.kubectl import Kubectl, wait_for
from kvpilot_tools.manifests import condition, is_ready
from kvpilot_tools.release import Release
from kvpilot_tools.traffic import wait_routed

READY_LIMIT_S = 180.0


@pytest.fixture(scope="session")
def release(local_cluster: Path) -> Iterator[Release]:
    """Our chart, installed with the image built from this checkout."""
    subprocess.run([sys.executable, "-m", "kvpilot_tools.cluster", "base-image", "--load"], check=True)
    installed = Release(kubeconfig=local_cluster)
    installed.install(images.build(images.OPERATOR, load=True), "operator.tickSeconds=3")
    yield installed
    log = operator_log(Kubectl.for_kubeconfig(local_cluster, installed.namespace))
    installed.uninstall()
    # The chart's Role is enough, and whatever happened, no request of ours was refused for lack of rights. C14
    denied = [line for line in log.splitlines() if "is forbidden: User" in line]  # the API server's words for it
    assert not denied, denied


def operator_log(client: Kubectl) -> str:
    return client.run("logs", "deployment/kvpilot", "--tail=-1")


@pytest.fixture(scope="session")
def namespaces(release: Release) -> Iterator[list[str]]:
    """Namespaces of finished tests: each must go away by itself, whatever was left in it. C1"""
    deleted: list[str] = []
    yield deleted
    client = Kubectl.for_kubeconfig(release.kubeconfig)
    for namespace in deleted:
        wait_for(lambda n=namespace: client.get("namespace", n) is None, f"{namespace} to be gone", limit_s=120)  # type: ignore[misc]


@pytest.fixture
def cluster(release: Release, namespaces: list[str]) -> Iterator[Kubectl]:
    """kubectl in a fresh namespace, which is deleted afterwards; nobody waits for its pods to drain."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    client = Kubectl.for_kubeconfig(release.kubeconfig, namespace)
    client.run("create", "namespace", namespace)
    yield client
    client.run("delete", "namespace", namespace, "--wait=false")
    namespaces.append(namespace)


@pytest.fixture
def operator(release: Release) -> Kubectl:
    """kubectl in the operator's namespace."""
    return Kubectl.for_kubeconfig(release.kubeconfig, release.namespace)


def explain(client: Kubectl, name: str) -> str:
    """What a person would look at when it does not become what was waited for."""
    return "\n".join(
        client.run(*command)
        for command in (
            ("get", "llmdeployment", name, "-o", "jsonpath={.status}"),
            ("get", "pods", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        )
    )


Applied = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def apply_ready(cluster: Kubectl) -> Applied:
    """Apply an object and wait until it is Ready; returns it."""

    def apply(manifest: dict[str, Any]) -> dict[str, Any]:
        name = manifest["metadata"]["name"]
        cluster.apply(manifest)

        def look() -> dict[str, Any] | None:
            item = cluster.get("llmdeployment", name)
            return item if is_ready(item) else None

        return wait_for(look, f"{name} to be Ready", limit_s=READY_LIMIT_S, report=lambda: explain(cluster, name))

    return apply


Awaited = Callable[..., dict[str, Any]]


@pytest.fixture
def wait_condition(cluster: Kubectl) -> Awaited:
    """Wait until a condition of an object has a reason; returns that condition."""

    def wait(name: str, kind: str, reason: str, *, limit_s: float = 120.0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            item = cluster.get("llmdeployment", name)
            found = condition(item or {}, kind)
            return found if found["reason"] == reason else None

        return wait_for(look, f"{kind} with reason {reason}", limit_s=limit_s, report=lambda: explain(cluster, name))

    return wait


@pytest.fixture
def service_url(cluster: Kubectl) -> Callable[[str], str]:
    """The address of an object's Service as this machine reaches it."""

    def url(name: str) -> str:
        service = cluster.get("service", name)
        assert service is not None
        address = f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
        wait_routed(address)
        return address

    return url
