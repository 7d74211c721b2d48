"""The whole operator as a process against a real API server, with exactly the rights of `core.rights` and no more."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_operator.core.rights import RIGHTS
from kvpilot_operator.core.schema_check import OPENAPI_PATH
from kvpilot_tools.cluster.api_server import ApiServer
from kvpilot_tools.kubectl import Kubectl, wait_for
from kvpilot_tools.repository import ROOT

_numbers = itertools.count(1)


@dataclass
class OperatorProcess:
    """One started operator."""

    process: subprocess.Popen[bytes]
    log: Path
    health_port: int
    metrics_port: int
    stopped: bool = field(default=False)

    def kill(self) -> None:
        """No clean-up at all: the node is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.stopped = True

    def stop(self) -> None:
        """As the kubelet does it."""
        if not self.stopped:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(5)
            self.stopped = True

    @property
    def lines(self) -> list[dict[str, Any]]:
        lines = []
        for text in self.log.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                lines.append({"message": text, "level": "RAW"})
        return lines


@dataclass
class Cluster:
    """The API server as one test sees it: a namespace of its own, an administrator, and operators to start."""

    server: ApiServer
    admin: Kubectl
    namespace: str
    folder: Path
    operators: list[OperatorProcess] = field(default_factory=list)

    def start_operator(
        self,
        *,
        clusterwide: bool = False,
        command: tuple[str, ...] = ("-m", "kvpilot_operator"),
        **environment: str,
    ) -> OperatorProcess:
        """An operator under a service account that has the shipped rights, in this namespace or in all."""
        kubeconfig = self.make_account(clusterwide=clusterwide)
        number = next(_numbers)
        ports = _free_port(), _free_port()
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("KVPILOT_", "KUBE"))},
            "KUBECONFIG": str(kubeconfig),
            "KVPILOT_OPERATOR_NAMESPACES": "" if clusterwide else self.namespace,
            "KVPILOT_OPERATOR_LEASE_NAMESPACE": self.namespace,
            "KVPILOT_OPERATOR_LEASE_SECONDS": "3",
            "KVPILOT_OPERATOR_IDENTITY": f"operator-{number}",
            "KVPILOT_OPERATOR_DEFAULT_ENGINE_IMAGE": "engine:test",
            "KVPILOT_OPERATOR_TICK_SECONDS": "1",
            "KVPILOT_OPERATOR_SCRAPE_DEADLINE_SECONDS": "0.5",
            "KVPILOT_OPERATOR_HEALTH_BIND_PORT": str(ports[0]),
            "KVPILOT_OPERATOR_METRICS_BIND_PORT": str(ports[1]),
            **environment,
        }
        log = self.folder / f"operator-{number}.log"
        with log.open("wb") as file:
            process = subprocess.Popen([sys.executable, *command], env=env, stdout=file, stderr=subprocess.STDOUT)
        operator = OperatorProcess(process, log, *ports)
        self.operators.append(operator)
        return operator

    def apply(self, manifest: dict[str, Any]) -> None:
        self.admin.apply(manifest)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.admin.get(kind, name)
        return found

    def must_get(self, kind: str, name: str) -> dict[str, Any]:
        found = self.get(kind, name)
        assert found is not None, f"{kind} {name} is missing"
        return found

    def llmd(self, name: str = "llama") -> dict[str, Any]:
        return self.get("llmdeployment", name) or {}

    def condition(self, type_: str, name: str = "llama") -> dict[str, Any]:
        conditions = self.llmd(name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == type_), {})

    def wait(self, condition: Callable[[], object], what: str, limit_s: float = 30) -> None:
        wait_for(lambda: bool(condition()), what, limit_s=limit_s)

    def make_account(self, *, clusterwide: bool) -> Path:
        """Service account, (Cluster)Role from RIGHTS, binding, and a kubeconfig with its token."""
        rules = [{"apiGroups": [r.group], "resources": [r.resource], "verbs": list(r.verbs)} for r in RIGHTS]
        role, binding = ("ClusterRole", "ClusterRoleBinding") if clusterwide else ("Role", "RoleBinding")
        metadata: dict[str, Any] = {"name": f"kvpilot-{self.namespace}"}
        if not clusterwide:
            metadata["namespace"] = self.namespace
        rbac = "rbac.authorization.k8s.io"
        account = {"kind": "ServiceAccount", "name": "kvpilot", "namespace": self.namespace}
        self.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "kvpilot"}})
        self.apply({"apiVersion": f"{rbac}/v1", "kind": role, "metadata": metadata, "rules": rules})
        self.apply(
            {
                "apiVersion": f"{rbac}/v1",
                "kind": binding,
                "metadata": metadata,
                "roleRef": {"apiGroup": rbac, "kind": role, "name": metadata["name"]},
                "subjects": [account],
            }
        )
        token = self.admin.run("create", "token", "kvpilot").strip()
        config = yaml.safe_load(self.server.kubeconfig.read_text())
        cluster = next(c["cluster"] for c in config["clusters"])
        ca_file = self.folder / "ca.crt"
        if "certificate-authority-data" in cluster:
            ca_file.write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
        else:
            ca_file.write_bytes(Path(cluster["certificate-authority"]).read_bytes())
        kubeconfig = self.folder / f"kubeconfig-{role}"
        kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {"name": "c", "cluster": {"server": cluster["server"], "certificate-authority": str(ca_file)}}
                    ],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "c",
                }
            )
        )
        return kubeconfig


@contextmanager
def _stopping(cluster: Cluster) -> Iterator[Cluster]:
    try:
        yield cluster
    finally:
        for operator in cluster.operators:
            operator.stop()


@pytest.fixture(scope="session")
def schema(api_server: ApiServer) -> ApiServer:
    """The API server with our schema, served and published."""
    kubectl = Kubectl(binary=api_server.kubectl, kubeconfig=api_server.kubeconfig, namespace="default")
    kubectl.run("apply", "--server-side", "-f", str(ROOT / "crds" / "llmdeployments.yaml"))

    def is_served() -> bool:
        published = kubectl.run("get", "--raw", "/openapi/v3").find(OPENAPI_PATH.removeprefix("/openapi/v3/")) >= 0
        return published and "llmdeployments" in kubectl.run("api-resources", "-o", "name")

    wait_for(is_served, "the schema to be served", limit_s=30)
    return api_server


@pytest.fixture
def cluster(schema: ApiServer, tmp_path: Path) -> Iterator[Cluster]:
    """A fresh namespace; operators that the test started are stopped after it."""
    namespace = f"operator-{os.getpid()}-{next(_numbers)}"
    kubectl = Kubectl(binary=schema.kubectl, kubeconfig=schema.kubeconfig, namespace=namespace)
    kubectl.run("create", "namespace", namespace)
    with _stopping(Cluster(schema, kubectl, namespace, tmp_path)) as cluster:
        yield cluster


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
