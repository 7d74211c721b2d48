"""The schema and the operator's types say the same: fields, required ones, defaults, enums, bounds. # C11, C25"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from kvpilot_operator.core.api_types import LLMDeploymentSpec
from kvpilot_operator.core.conditions import ConditionStatus
from kvpilot_operator.core.naming import ANNOTATION_SCHEMA_VERSION, SCHEMA_VERSION, selector_string
from kvpilot_operator.core.resources import LLM_DEPLOYMENTS
from kvpilot_operator.core.schema_check import find_missing_fields, needed_fields, schema_fields
from kvpilot_operator.core.spec_parsing import Bounds, OneOf, json_name
from kvpilot_tools.repository import ROOT

CRD: dict[str, Any] = yaml.safe_load((ROOT / "crds" / "llmdeployments.yaml").read_text())
VERSION: dict[str, Any] = CRD["spec"]["versions"][0]
SCHEMA: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]

OPAQUE = "spec.podTemplate"
"""Merged as it is, never parsed: the schema declares inside it only what its rules need."""

Field = tuple[str, Any, Any, Any]
"""Path, the dataclass's field, its type without None, and the annotation on it."""


def typed_fields(cls: type[Any] = LLMDeploymentSpec, path: str = "spec") -> Iterator[Field]:
    hints = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        kind, limit = without_none(hints[item.name]), None
        if get_origin(kind) is Annotated:
            kind, limit = get_args(kind)[:2]
        where = f"{path}.{json_name(item.name)}"
        yield where, item, kind, limit
        if isinstance(kind, type) and is_dataclass(kind):
            yield from typed_fields(kind, where)


def without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    members = [member for member in get_args(kind) if member is not type(None)]
    return members[0] if len(members) == 1 else tuple(members)


def property_at(path: str) -> dict[str, Any]:
    schema = SCHEMA
    for step in path.split("."):
        schema = schema["properties"][step]
    return schema


def json_default(value: Any) -> Any:
    if is_dataclass(value):
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, StrEnum) else value


FIELDS = list(typed_fields())
IDS = [path for path, *_ in FIELDS]


def test_every_field_of_the_types_is_in_the_schema_and_the_other_way_round() -> None:
    declared = {path for path in schema_fields(SCHEMA) if not path.startswith(f"{OPAQUE}.")}
    assert declared == needed_fields()


@pytest.mark.parametrize(("path", "item", "kind", "limit"), FIELDS, ids=IDS)
def test_field_has_the_same_default_and_is_required_alike(path: str, item: Any, kind: Any, limit: Any) -> None:
    parent = property_at(path.rpartition(".")[0])
    name = path.rpartition(".")[2]
    is_required = item.default is MISSING and item.default_factory is MISSING
    assert (name in parent.get("required", [])) is is_required
    if is_required:
        assert "default" not in property_at(path)
        return
    default = item.default_factory() if item.default_factory is not MISSING else item.default
    if default is None:
        assert "default" not in property_at(path)
    elif path == "spec.model.servedNames":
        assert default == ()  # absent in the schema: there, an empty list is refused
        assert property_at(path)["minItems"] == 1
    else:
        assert property_at(path)["default"] == json_default(default)


@pytest.mark.parametrize(("path", "item", "kind", "limit"), FIELDS, ids=IDS)
def test_field_has_the_same_type_enum_and_bounds(path: str, item: Any, kind: Any, limit: Any) -> None:
    schema = property_at(path)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        assert schema["type"] == "string"
        assert schema["enum"] == [str(value) for value in kind]
    elif kind == (int, str):
        assert schema["x-kubernetes-int-or-string"] is True
    elif get_origin(kind) is tuple:
        assert schema["type"] == "array"
        assert schema["items"]["type"] == "string"
    elif get_origin(kind) is Mapping or is_dataclass(kind):
        assert schema["type"] == "object"
    else:
        assert schema["type"] == {int: "integer", float: "number", str: "string", bool: "boolean"}[kind]
    if kind in (int, float):
        assert limit is not None, "a number without bounds"
    if isinstance(limit, Bounds):
        assert (schema["minimum"], schema["maximum"]) == (limit.minimum, limit.maximum)
    if isinstance(limit, OneOf):
        assert tuple(schema["enum"]) == limit.values


def test_every_field_is_described() -> None:
    def undescribed(schema: dict[str, Any], path: str) -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            if not inner.get("description", "").strip():
                yield f"{path}.{name}"
            yield from undescribed(inner.get("items", inner), f"{path}.{name}")

    assert list(undescribed(SCHEMA["properties"]["spec"], "spec")) == []
    assert list(undescribed(SCHEMA["properties"]["status"], "status")) == []


def test_every_rule_has_a_message_that_names_its_field() -> None:
    def rules(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(schema, dict):
            for rule in schema.get("x-kubernetes-validations", []):
                yield path + rule.get("fieldPath", ""), rule
            for name, inner in schema.get("properties", {}).items():
                yield from rules(inner, f"{path}.{name}".lstrip("."))
            for part in ("items", "additionalProperties"):
                yield from rules(schema.get(part), path)

    found = list(rules(SCHEMA, ""))
    assert len(found) > 20
    for path, rule in found:
        field = path.replace("containers.", "containers[engine].") or "metadata.name"
        assert field in rule["message"], rule


def test_condition_statuses_are_kubernetes_own() -> None:
    conditions = property_at("status.conditions")["items"]["properties"]
    assert conditions["status"]["enum"] == [str(status) for status in ConditionStatus]


def test_group_version_kind_and_subresources_are_those_the_operator_uses() -> None:
    assert CRD["spec"]["group"] == LLM_DEPLOYMENTS.group
    assert VERSION["name"] == LLM_DEPLOYMENTS.version
    assert CRD["spec"]["names"]["plural"] == LLM_DEPLOYMENTS.plural
    assert CRD["spec"]["names"]["kind"] == LLM_DEPLOYMENTS.kind
    assert CRD["spec"]["names"]["shortNames"] == ["llmd"]
    assert VERSION["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }
    assert selector_string("llama") == "kvpilot.dev/deployment=llama"


def test_uninstalling_keeps_the_schema_and_its_version_is_the_operators() -> None:
    annotations = CRD["metadata"]["annotations"]
    assert annotations["helm.sh/resource-policy"] == "keep"
    assert annotations[ANNOTATION_SCHEMA_VERSION] == str(SCHEMA_VERSION)


def test_an_older_schema_is_told_by_the_fields_that_it_lacks() -> None:
    older = yaml.safe_load(yaml.safe_dump(SCHEMA))
    del older["properties"]["spec"]["properties"]["memory"]["properties"]["tuning"]["properties"]["max"]
    del older["properties"]["status"]["properties"]["decisions"]
    assert find_missing_fields(SCHEMA) == ()
    missing = find_missing_fields(older)
    assert missing[0] == "spec.memory.tuning.max"
    assert "status.decisions" in missing
