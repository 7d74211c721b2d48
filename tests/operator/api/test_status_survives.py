"""Every status field that is written comes back: nothing is pruned, nothing refused. # C11"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_tools.kubectl import Kubectl

pytestmark = pytest.mark.apiserver

MOMENT = "2026-01-02T03:04:05Z"


def sample(schema: dict[str, Any]) -> Any:
    """A value that fills every property of a schema."""
    if "properties" in schema:
        return {name: sample(inner) for name, inner in schema["properties"].items()}
    if "additionalProperties" in schema:
        return {"key": sample(schema["additionalProperties"])}
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "array":
            return [sample(schema["items"])]
        case "integer":
            return 7
        case "number":
            return 0.25
        case "string":
            return MOMENT if schema.get("format") == "date-time" else "Word"
        case _:
            return "anything"


def test_every_status_field_of_the_schema_is_kept(kubectl: Kubectl, crd_file: Path) -> None:
    schema = yaml.safe_load(crd_file.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    status = sample(schema["properties"]["status"])
    name = "status-kept"
    item = {
        "apiVersion": "kvpilot.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"source": "hf://owner/model"}},
    }
    kubectl.run("create", "-f", "-", stdin=json.dumps(item))
    kubectl.patch("llmdeployment", name, {"status": status}, "--subresource=status")
    kept = kubectl.get("llmdeployment", name)
    assert kept is not None
    assert kept["status"] == status


def test_table_shows_what_the_printer_columns_promise(kubectl: Kubectl) -> None:
    name = "printed"
    item = {
        "apiVersion": "kvpilot.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"source": "hf://owner/model"}},
    }
    kubectl.run("create", "-f", "-", stdin=json.dumps(item))
    ready = {
        "type": "Ready",
        "status": "False",
        "reason": "ModelDoesNotFit",
        "message": "",
        "lastTransitionTime": MOMENT,
    }
    status = {"replicas": 2, "load": {"kvUsage": 0.71}, "memory": {"utilization": 0.88}, "conditions": [ready]}
    kubectl.patch("llmdeployment", name, {"status": status}, "--subresource=status")
    header, row = kubectl.run("get", "llmd", name).splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "REPLICAS", "KV", "CAP", "REASON", "AGE"]
    assert row.split()[:7] == [name, "hf://owner/model", "False", "2", "0.71", "0.88", "ModelDoesNotFit"]
