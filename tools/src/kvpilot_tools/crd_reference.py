"""The reference of the LLMDeployment's fields, generated from the schema: one table, nothing written twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from kvpilot_tools.repository import ROOT

CRD = ROOT / "crds" / "llmdeployments.yaml"
REFERENCE = ROOT / "docs" / "reference" / "llmdeployment.md"

_HEAD = """# LLMDeployment: every field

Generated from `crds/llmdeployments.yaml` by `make generate`. `kubectl explain llmdeployment.spec` says the same.

"""


def crd_markdown() -> str:
    """The whole page."""
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = [_HEAD, "## spec\n\n", "| field | type | default | meaning |\n|---|---|---|---|\n"]
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    parts += [
        f"| `{path}` | {_type_text(inner)} | {_default_text(inner, is_required=is_required)} | {_text(inner)} |\n"
        for path, inner, is_required in _fields(spec, "")
    ]
    parts.append("\n### What the API server refuses\n\n")
    parts += [f"- {message}\n" for message in dict.fromkeys(_messages(schema))]
    parts += ["\n## status\n\n", "| field | type | meaning |\n|---|---|---|\n"]
    parts += [f"| `{path}` | {_type_text(inner)} | {_text(inner)} |\n" for path, inner, _ in _fields(status, "")]
    return "".join(parts)


def _fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    for name, inner in schema.get("properties", {}).items():
        where = f"{path}{name}"
        yield where, inner, name in schema.get("required", [])
        yield from _fields(inner, f"{where}.")
        yield from _fields(inner.get("items", {}), f"{where}[].")


def _messages(schema: Any) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    for rule in schema.get("x-kubernetes-validations", []):
        yield rule["message"]
    for inner in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        yield from _messages(inner)


def _type_text(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    name = "list" if schema.get("type") == "array" else schema.get("type", "any")
    if name == "object" and "additionalProperties" in schema:
        name = "map"
    bounds = [str(schema[bound]) for bound in ("minimum", "maximum") if bound in schema]
    return f"{name} {'..'.join(bounds)}" if len(bounds) == 2 else str(name)


def _default_text(schema: dict[str, Any], *, is_required: bool) -> str:
    if is_required:
        return "required"
    default = schema.get("default")
    return "" if default in (None, {}, []) else f"`{json.dumps(default)}`"


def _text(schema: dict[str, Any]) -> str:
    return " ".join(str(schema.get("description", "")).split()).replace("|", "\\|")
