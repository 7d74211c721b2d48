"""Whether the installed schema knows every field that this operator reads and writes. # C25

Helm never updates CRDs by itself, and the API server drops unknown fields without a word: a limit that a user set would
just not be there. The installed schema is read from the API server's published OpenAPI document, for which every
service account has the right; this module only compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from kvpilot_operator.core.api_types import LLMDeploymentSpec
from kvpilot_operator.core.resources import LLM_DEPLOYMENTS
from kvpilot_operator.core.spec_parsing import json_name

OPENAPI_PATH = f"/openapi/v3/apis/{LLM_DEPLOYMENTS.api_version}"
"""Where the API server publishes what it has installed."""

_STATUS: Mapping[str, tuple[str, ...]] = {
    "status": (
        *("observedGeneration", "replicas", "readyReplicas", "desiredReplicas", "selector", "phase", "image"),
        *("template", "conditions", "load", "scaling", "memory", "decisions"),
    ),
    "status.conditions": ("type", "status", "observedGeneration", "lastTransitionTime", "reason", "message"),
    "status.load": ("kvUsage", "kvUsageMax", "running", "waiting", "preemptionsPerMinute", "unknownReplicas", "at"),
    "status.scaling": (
        *("mode", "desired", "lastScaleUp", "lastScaleDown", "growingFrom", "aboveSince", "belowSince"),
        "preemptionSamples",
    ),
    "status.scaling.preemptionSamples": ("pod", "total", "at", "perMinute"),
    "status.memory": (
        *("utilization", "recommendedUtilization", "revision", "appliedReplicas", "specUtilization", "shape", "pods"),
        *("failedStarts", "lastFailedStart", "blockedReason", "blockedMessage", "handled", "learned", "plan"),
    ),
    "status.memory.handled": ("pod", "run", "seq", "endedRun"),
    "status.memory.learned": ("device", "shape", "safe", "failed", "at"),
    "status.memory.plan": ("weightsBytes", "activationsBytes", "kvBytes", "kvTokens", "maxConcurrencyAtMaxLen"),
    "status.decisions": ("time", "loop", "action", "from", "to", "reason", "inputs", "message"),
}

STATUS_FIELDS = frozenset(f"{parent}.{name}" for parent, names in _STATUS.items() for name in names)
"""Every status field that this operator writes, elements of lists without an index."""


def needed_fields() -> frozenset[str]:
    """Paths of all fields of spec and status, such as `spec.scaling.targets.kvUsage`."""
    return frozenset(_fields_of(LLMDeploymentSpec, "spec")) | STATUS_FIELDS


def find_missing_fields(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Needed fields that the object's installed schema lacks, in order; empty when it is new enough."""
    return tuple(sorted(needed_fields() - schema_fields(schema)))


def schema_fields(schema: Mapping[str, Any]) -> frozenset[str]:
    """Paths of all properties below spec and status; what a schema leaves open is not descended into."""
    properties = schema.get("properties", {})
    return frozenset(path for part in ("spec", "status") for path in _properties_of(properties.get(part, {}), part))


def object_schema(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The LLMDeployment's schema in the OpenAPI document of its group; None when it is not installed."""
    for schema in document.get("components", {}).get("schemas", {}).values():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            if kind.get("kind") == LLM_DEPLOYMENTS.kind:
                found: Mapping[str, Any] = schema
                return found
    return None


def _properties_of(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        yield where
        yield from _properties_of(inner.get("items", inner), where)


def _fields_of(cls: type[Any], path: str) -> Iterator[str]:
    hints = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        where = f"{path}.{json_name(item.name)}"
        yield where
        for kind in (hints[item.name], *get_args(hints[item.name])):
            if get_origin(kind) is not Annotated and isinstance(kind, type) and is_dataclass(kind):
                yield from _fields_of(kind, where)
