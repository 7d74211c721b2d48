"""What is installed can be told from outside: the operator compares it with what it needs. # C25"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_operator.core.schema_check import OPENAPI_PATH, find_missing_fields, object_schema
from kvpilot_tools.kubectl import Kubectl, wait_for
from kvpilot_tools.manifests import Object
from kvpilot_tools.repository import ROOT

pytestmark = pytest.mark.apiserver

PUBLISHED_LIMIT_S = 30.0


def published(kubectl: Kubectl) -> tuple[str, ...] | None:
    """The needed fields that the published schema lacks; None when none is published."""
    schema = object_schema(json.loads(kubectl.run("get", "--raw", OPENAPI_PATH)))
    return None if schema is None else find_missing_fields(schema)


def test_the_published_schema_holds_every_field_that_the_operator_needs(kubectl: Kubectl) -> None:
    wait_for(lambda: published(kubectl) == (), "the schema to be published", limit_s=PUBLISHED_LIMIT_S)


def test_any_service_account_may_read_it(kubectl: Kubectl) -> None:
    """So that neither Role nor ClusterRole needs a right on CustomResourceDefinitions."""
    account = f"system:serviceaccount:{kubectl.namespace}:default"
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{kubectl.namespace}", "system:authenticated")
    impersonated = [argument for group in groups for argument in ("--as-group", group)]
    answer = kubectl.run("get", "--raw", OPENAPI_PATH, "--as", account, *impersonated)
    assert object_schema(json.loads(answer)) is not None


def test_an_older_schema_is_seen_and_an_upgrade_mends_it(kubectl: Kubectl, crd_file: Path) -> None:
    """An upgrade is applying the new file; objects stay, and what the old schema dropped can then be set."""
    current: dict[str, Any] = yaml.safe_load(crd_file.read_text())
    older = copy.deepcopy(current)
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["scaling"]["properties"]["scaleDownStabilizationSeconds"]
    item: Object = {
        "apiVersion": "kvpilot.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "upgraded"},
        "spec": {"model": {"source": "hf://owner/model"}, "scaling": {"scaleDownStabilizationSeconds": 20}},
    }

    def install(crd: dict[str, Any]) -> None:
        kubectl.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(crd))

    def window() -> object:
        kubectl.run("apply", "--validate=false", "-f", "-", stdin=json.dumps(item))
        found = kubectl.get("llmdeployment", "upgraded")
        assert found is not None
        return found["spec"]["scaling"].get("scaleDownStabilizationSeconds")

    try:
        install(older)
        missing = "spec.scaling.scaleDownStabilizationSeconds"
        wait_for(lambda: published(kubectl) == (missing,), "the older schema", limit_s=PUBLISHED_LIMIT_S)
        wait_for(lambda: window() is None, "the field to be dropped", limit_s=PUBLISHED_LIMIT_S)
    finally:
        install(current)
    wait_for(lambda: published(kubectl) == (), "the present schema", limit_s=PUBLISHED_LIMIT_S)
    wait_for(lambda: window() == 20, "the field to be kept", limit_s=PUBLISHED_LIMIT_S)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_example_is_accepted_strictly(kubectl: Kubectl, path: Path) -> None:
    kubectl.run("apply", "--dry-run=server", "--validate=strict", "-f", str(path))
