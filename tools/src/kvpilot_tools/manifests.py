"""LLMDeployments for the demo and the end-to-end tests, all made from the example that the README applies."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from kvpilot_tools.repository import EXAMPLE

Object = dict[str, Any]


def example() -> Object:
    """The LLMDeployment of examples/llmdeployment.yaml."""
    documents = [d for d in yaml.safe_load_all(EXAMPLE.read_text()) if d and d["kind"] == "LLMDeployment"]
    manifest: Object = documents[0]
    return manifest


def variant(name: str, **spec: object) -> Object:
    """The example under another name, with parts of its spec changed; maps are merged, the rest is replaced."""
    manifest = copy.deepcopy(example())
    manifest["metadata"] = {"name": name}
    merge(manifest["spec"], spec)
    return manifest


def merge(into: Object, changes: Object) -> None:
    """Merge maps in place, the way a JSON merge patch does; None removes a key."""
    for key, value in changes.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


def condition(item: Object, kind: str) -> Object:
    """One condition of an object, or an Unknown one when it is not reported."""
    found = [c for c in item.get("status", {}).get("conditions", []) if c["type"] == kind]
    return found[0] if found else {"type": kind, "status": "Unknown", "reason": "NotReported", "message": ""}


def is_ready(item: Object | None) -> bool:
    """Ready, and that for the present generation."""
    if item is None:
        return False
    ready = condition(item, "Ready")
    return bool(ready["status"] == "True" and ready.get("observedGeneration") == item["metadata"]["generation"])
