"""Our schema on a real API server, with its controllers and no node."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpilot_tools.cluster.api_server import ApiServer
from kvpilot_tools.kubectl import Kubectl, wait_for
from kvpilot_tools.manifests import Object
from kvpilot_tools.repository import ROOT

CRD = ROOT / "crds" / "llmdeployments.yaml"


@pytest.fixture(scope="session")
def crd_file() -> Path:
    return CRD


@pytest.fixture(scope="session")
def kubectl(api_server: ApiServer, crd_file: Path) -> Kubectl:
    """kubectl in a namespace of these tests, with the schema installed."""
    client = Kubectl(binary=api_server.kubectl, kubeconfig=api_server.kubeconfig, namespace="crd-tests")
    client.run("apply", "--server-side", "-f", str(crd_file))
    client.run("create", "namespace", client.namespace)

    def is_served() -> bool:
        crd: Object = client.get("customresourcedefinition", "llmdeployments.kvpilot.dev") or {}
        conditions = {c["type"]: c["status"] for c in crd.get("status", {}).get("conditions", [])}
        return conditions.get("Established") == "True" and "llmdeployments" in client.run("api-resources", "-o", "name")

    wait_for(is_served, "the LLMDeployment schema to be served", limit_s=30)
    return client
