"""What the operator writes into status is in the schema: an undeclared field would be pruned in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from kvpilot_operator.core.api_status import LLMDeploymentStatus
from kvpilot_operator.core.api_types import MemoryPolicy, ScalingPolicy
from kvpilot_operator.core.conditions import ConditionType
from kvpilot_operator.core.decisions import Action, Loop
from kvpilot_operator.core.memory import decide_memory
from kvpilot_operator.core.scaling import decide_scaling
from kvpilot_operator.core.scaling_memory import PreemptionSample, ScalingMemory
from kvpilot_operator.core.status import Rendering, compute_status
from kvpilot_operator.testing import START, make_load, make_observation, make_replica, make_termination

CRD = Path(__file__).parents[2] / "crds" / "llmdeployments.yaml"


def status_schema() -> dict[str, Any]:
    crd = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    return schema


def full_status() -> LLMDeploymentStatus:
    """A status with every field set."""
    now = START + timedelta(hours=1)
    memory = ScalingMemory(
        mode="Auto",
        last_scale_up=START,
        last_scale_down=START,
        above_since=START,
        samples=(PreemptionSample(pod_uid="uid-a", total=1, at=START, per_minute=1.0),),
    )
    oom = make_termination(71, report={"utilization": 0.95, "message": "short"})
    seen = make_observation(
        make_replica("a", load=make_load(kv_usage_ratio=0.99, preemptions_total=9)),
        make_replica("b", ready=False, last_termination=oom),
    )
    scaling = decide_scaling(ScalingPolicy(), seen, memory, now, spec_replicas=1, startup_timeout_s=1.0)
    tuned = decide_memory(MemoryPolicy(), seen, None, now, shape="s1")
    rendering = Rendering(selector="a=b", image="engine:1", template="t1")
    status = compute_status(seen, scaling, tuned, (), rendering, LLMDeploymentStatus(), now)
    assert status.tuning is not None
    return replace(
        status,
        scaling=replace(status.scaling, growing_from=1, above_since=now, below_since=now),
        tuning=replace(
            status.tuning,
            pods={"uid-a": 0.9},
            failed_starts=1,
            last_failed_start=now,
            blocked_reason="OOMUnresolved",
            blocked_message="m",
        ),
    )


def undeclared(value: object, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        if schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema:
            return
        for key, inner in value.items():
            declared = schema.get("properties", {}).get(key)
            if declared is None:
                yield f"{path}.{key}"
            else:
                yield from undeclared(inner, declared, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from undeclared(item, schema.get("items", {}), f"{path}[]")


def declared_paths(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, inner in schema.get("properties", {}).items():
        yield f"{path}.{key}"
        yield from declared_paths(inner.get("items", inner), f"{path}.{key}")


def written_paths(value: object, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"{path}.{key}"
            yield from written_paths(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from written_paths(item, path)


def test_everything_that_is_written_is_declared() -> None:
    assert list(undeclared(full_status().to_dict(), status_schema(), "status")) == []


def test_everything_that_is_declared_is_written() -> None:
    declared = set(declared_paths(status_schema(), "status"))
    missing = declared - set(written_paths(full_status().to_dict(), "status"))
    assert missing == set()


def test_the_words_of_the_schema_are_those_of_the_code() -> None:
    properties = status_schema()["properties"]
    decision = properties["decisions"]["items"]["properties"]
    assert all(loop.value in decision["loop"]["description"] for loop in Loop)
    assert all(action.value in decision["action"]["description"] for action in Action)
    assert all(type_.value in properties["conditions"]["description"] for type_ in ConditionType)
