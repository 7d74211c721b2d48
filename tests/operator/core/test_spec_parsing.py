"""Objects into `LLMDeploymentSpec` and back."""

from __future__ import annotations

from typing import Any

import pytest

from kvpilot_operator.core.api_types import (
    Device,
    LLMDeploymentSpec,
    ModelSpec,
    ScalingMode,
    SecretKeyRef,
    TuningMode,
    parse_spec,
)
from kvpilot_operator.core.spec_parsing import dump_dataclass, json_name
from kvpilot_operator.errors import InvalidSpecError


def parse(**spec: Any) -> LLMDeploymentSpec:
    return parse_spec({"spec": {"model": {"source": "hf://owner/model"}, **spec}})


def problems(**spec: Any) -> list[str]:
    with pytest.raises(InvalidSpecError) as invalid:
        parse(**spec)
    return str(invalid.value).split("; ")


def test_only_a_model_takes_every_default() -> None:
    assert parse() == LLMDeploymentSpec(model=ModelSpec(source="hf://owner/model"))


def test_values_get_their_types() -> None:
    spec = parse(
        model={"source": "hf://a/b", "servedNames": ["x", "y"], "accessTokenSecret": {"name": "n", "key": "k"}},
        engine={"device": "cpu", "maxModelLen": 2048, "prefixCaching": False},
        memory={"utilization": 1, "tuning": {"mode": "Disabled"}},
        scaling={"mode": "External", "targets": {"kvUsage": 0.5}},
        resources={"limits": {"memory": "2Gi", "cpu": 2}},
        podTemplate={"spec": {"nodeSelector": {"a": "b"}}},
    )
    assert spec.model.served_names == ("x", "y")
    assert spec.model.access_token_secret == SecretKeyRef(name="n", key="k")
    assert spec.engine.device is Device.CPU
    assert spec.engine.max_model_len == 2048
    assert spec.engine.prefix_caching is False
    assert isinstance(spec.memory.utilization, float)
    assert spec.memory.tuning.mode is TuningMode.DISABLED
    assert spec.scaling.mode is ScalingMode.EXTERNAL
    assert spec.scaling.targets.kv_usage == 0.5
    assert spec.scaling.targets.waiting_per_replica == 4
    assert spec.resources.limits == {"memory": "2Gi", "cpu": 2}
    assert spec.pod_template == {"spec": {"nodeSelector": {"a": "b"}}}


def test_null_is_as_absent() -> None:
    assert parse(engine=None, memory={"utilization": None}) == parse()


def test_unknown_fields_are_ignored() -> None:
    """The schema has pruned what it does not know; what is left may be of a newer version."""
    assert parse(engine={"speculation": {"mode": "ngram"}}) == parse()


def test_every_problem_is_listed_with_its_field() -> None:
    assert problems(
        model={},
        engine={"blockSize": 12, "maxModelLen": "8k", "device": "tpu", "prefixCaching": "yes"},
        memory={"utilization": 90},
        scaling={"maxReplicas": 0, "targets": "high"},
        resources={"limits": {"memory": 1.5}},
        model_={},
    ) == [
        "spec.model.source is required",
        "spec.engine.device must be one of cuda, cpu, is 'tpu'",
        "spec.engine.blockSize must be one of 8, 16, 32, 64, 128, is 12",
        "spec.engine.maxModelLen must be an integer, is '8k'",
        "spec.engine.prefixCaching must be true or false, is 'yes'",
        "spec.memory.utilization must be 0.05..1, is 90",
        "spec.scaling.maxReplicas must be 1..1000, is 0",
        "spec.scaling.targets must be an object",
        "spec.resources.limits [memory] must be an integer or a string, is 1.5",
    ]


@pytest.mark.parametrize("value", [True, 1.5, "1", [], {}])
def test_what_is_no_integer_is_refused(value: object) -> None:
    assert problems(replicas=value) == [f"spec.replicas must be an integer, is {value!r}"]


@pytest.mark.parametrize("manifest", [{}, {"spec": None}, {"spec": []}])
def test_object_without_a_spec_is_refused(manifest: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpecError, match="spec must be an object"):
        parse_spec(manifest)


def test_contradictions_that_older_schemas_let_pass_are_refused() -> None:
    assert problems(
        scaling={"minReplicas": 3, "maxReplicas": 2},
        memory={"utilization": 0.4},
        rollout={"maxSurge": "0%", "maxUnavailable": 0},
    ) == [
        "spec.scaling.minReplicas (3) is above spec.scaling.maxReplicas (2)",
        "spec.memory.utilization (0.4) is outside spec.memory.tuning.min..max (0.5..0.95)",
        "spec.rollout.maxSurge and spec.rollout.maxUnavailable are both zero",
    ]
    assert problems(memory={"tuning": {"min": 0.9, "max": 0.8}})[0].startswith("spec.memory.tuning.min (0.9) is above")


def test_dump_holds_what_is_not_default_and_parses_back() -> None:
    raw = {
        "model": {"source": "hf://a/b", "servedNames": ["x"], "cache": {"persistentVolumeClaim": "c"}},
        "engine": {"device": "cpu", "kvCacheDtype": "fp8", "extraArgs": ["--seed=1"]},
        "resources": {"limits": {"memory": "2Gi"}},
        "rollout": {"maxSurge": "25%"},
    }
    spec = parse(**raw)
    assert dump_dataclass(spec) == raw
    assert parse_spec({"spec": dump_dataclass(spec)}) == spec
    assert dump_dataclass(parse(engine={"device": "cuda", "maxNumSeqs": 64})) == {
        "model": {"source": "hf://owner/model"}
    }


def test_json_names() -> None:
    assert [json_name(name) for name in ("replicas", "min_replicas", "kv_cache_dtype")] == [
        "replicas",
        "minReplicas",
        "kvCacheDtype",
    ]
