"""What the API server refuses, and with which words: every rule of the schema, on a real server. # D11"""

from __future__ import annotations

import copy
import json
import uuid
from typing import Any

import pytest

from kvpilot_tools.kubectl import Kubectl, KubectlError
from kvpilot_tools.manifests import Object, merge

pytestmark = pytest.mark.apiserver

LONG_NAME = "a" * 53

Case = tuple[str, dict[str, Any], str, str]
"""What it is about, the change of the spec, the field that the answer must name, and words that it must hold."""

BAD_SPECS: list[Case] = [
    ("no source", {"model": {"source": None}}, "spec.model.source", "Required value"),
    ("empty source", {"model": {"source": ""}}, "spec.model.source", "at least 1 chars"),
    (
        "unknown scheme",
        {"model": {"source": "s3://bucket/model"}},
        "spec.model.source",
        "hf://OWNER/NAME[:VARIANT][@REVISION]",
    ),
    ("plain repo", {"model": {"source": "meta-llama/Llama"}}, "spec.model.source", "pvc://CLAIM/PATH"),
    ("repo without owner", {"model": {"source": "hf://gpt2"}}, "spec.model.source", "hf://OWNER/NAME"),
    ("relative file", {"model": {"source": "file://model"}}, "spec.model.source", "file:///PATH"),
    ("claim without path", {"model": {"source": "pvc://claim"}}, "spec.model.source", "pvc://CLAIM/PATH"),
    ("climbing path", {"model": {"source": "pvc://claim/a/../../b"}}, "spec.model.source", "'..'"),
    ("empty served names", {"model": {"servedNames": []}}, "spec.model.servedNames", "at least 1 items"),
    ("same name twice", {"model": {"servedNames": ["a", "a"]}}, "spec.model.servedNames[1]", "Duplicate value"),
    ("name like a flag", {"model": {"servedNames": ["--port"]}}, "spec.model.servedNames[0]", "should match"),
    ("secret without key", {"model": {"accessTokenSecret": {"name": "a"}}}, "accessTokenSecret.key", "Required"),
    ("unknown device", {"engine": {"device": "tpu"}}, "spec.engine.device", '"cuda", "cpu"'),
    ("block size", {"engine": {"blockSize": 12}}, "spec.engine.blockSize", '"16"'),
    ("unknown dtype", {"engine": {"dtype": "int3"}}, "spec.engine.dtype", "Unsupported value"),
    ("unknown quantization", {"engine": {"quantization": "int3"}}, "spec.engine.quantization", "Unsupported value"),
    ("unknown KV dtype", {"engine": {"kvCacheDtype": "int3"}}, "spec.engine.kvCacheDtype", "Unsupported value"),
    ("length below a block", {"engine": {"maxModelLen": 4}}, "spec.engine.maxModelLen", "greater than or equal to 16"),
    ("no sequence", {"engine": {"maxNumSeqs": 0}}, "spec.engine.maxNumSeqs", "greater than or equal to 1"),
    ("length as text", {"engine": {"maxModelLen": "8k"}}, "spec.engine.maxModelLen", "must be of type integer"),
    ("GPUs on cpu", {"engine": {"tensorParallelSize": 2}}, "spec.engine.tensorParallelSize", "must be 1"),
    ("owned flag", {"engine": {"extraArgs": ["--seed=1", "--port=9"]}}, "spec.engine.extraArgs[1]", "operator sets"),
    (
        "owned flag apart",
        {"engine": {"extraArgs": ["--tuning-file", "/x"]}},
        "spec.engine.extraArgs[0]",
        "operator sets",
    ),
    ("underscores", {"engine": {"extraArgs": ["--max_model_len=9"]}}, "spec.engine.extraArgs[0]", "operator sets"),
    ("a key in the open", {"engine": {"extraArgs": ["--api-key=s"]}}, "spec.engine.extraArgs[0]", "operator sets"),
    ("short form", {"engine": {"extraArgs": ["-tp", "2"]}}, "spec.engine.extraArgs[0]", "operator sets"),
    ("too many arguments", {"engine": {"extraArgs": ["x"] * 65}}, "spec.engine.extraArgs", "at most 64 items"),
    ("share as percent", {"memory": {"utilization": 90}}, "spec.memory.utilization", "less than or equal to 1"),
    ("little share", {"memory": {"utilization": 0.01}}, "spec.memory.utilization", "greater than or equal to 0.05"),
    # The server compares an integer with the bound rounded down, so that 0 would pass `minimum: 0.05`.
    (
        "share of nothing",
        {"memory": {"utilization": 0, "tuning": {"mode": "Disabled"}}},
        "spec.memory.utilization",
        "must be at least 0.05",
    ),
    ("lowest 0", {"memory": {"tuning": {"min": 0}}}, "spec.memory.tuning.min", "must be at least 0.05"),
    ("highest 0", {"memory": {"tuning": {"max": 0}}}, "spec.memory.tuning.max", "must be at least 0.05"),
    ("share above max", {"memory": {"utilization": 0.97}}, "spec.memory.utilization", "must lie between"),
    ("share below min", {"memory": {"utilization": 0.4}}, "spec.memory.utilization", "must lie between"),
    ("min above max", {"memory": {"tuning": {"min": 0.96}}}, "spec.memory.tuning.min", "must not be above"),
    ("mode Off", {"memory": {"tuning": {"mode": "Off"}}}, "spec.memory.tuning.mode", '"Auto", "Advise", "Disabled"'),
    ("unknown scaling", {"scaling": {"mode": "Manual"}}, "spec.scaling.mode", '"Auto", "External"'),
    # No component outside the pods could see demand for a model that has no pod. D10
    ("scale to zero", {"scaling": {"minReplicas": 0}}, "spec.scaling.minReplicas", "greater than or equal to 1"),
    ("start at zero", {"replicas": 0}, "spec.replicas", "at least 1 while spec.scaling.mode is Auto"),
    ("negative replicas", {"replicas": -1}, "spec.replicas", "greater than or equal to 0"),
    ("min replicas", {"scaling": {"minReplicas": 5}}, "spec.scaling.minReplicas", "must not be above"),
    ("target 0", {"scaling": {"targets": {"kvUsage": 0}}}, "spec.scaling.targets.kvUsage", "must be at least 0.05"),
    (
        "target 1.5",
        {"scaling": {"targets": {"kvUsage": 1.5}}},
        "spec.scaling.targets.kvUsage",
        "less than or equal to 1",
    ),
    ("no waiting", {"scaling": {"targets": {"waitingPerReplica": 0}}}, "targets.waitingPerReplica", "equal to 1"),
    ("negative window", {"scaling": {"scaleDownStabilizationSeconds": -1}}, "scaleDownStabilizationSeconds", "to 0"),
    (
        "GPU limit on cpu",
        {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        "spec.resources.limits",
        "must not name a GPU",
    ),
    ("GPU request on cpu", {"resources": {"requests": {"amd.com/gpu": 1}}}, "spec.resources.requests", "a GPU"),
    (
        "own GPU name on cpu",
        {"resources": {"gpuResource": "example.com/npu", "limits": {"example.com/npu": 1}}},
        "spec.resources.limits",
        "must not name a GPU",
    ),
    ("bad quantity", {"resources": {"limits": {"memory": "2 GB"}}}, "spec.resources.limits.memory", "should match"),
    ("negative quantity", {"resources": {"limits": {"cpu": -1}}}, "spec.resources.limits.cpu", "equal to 0"),
    (
        "request above limit",
        {"resources": {"requests": {"memory": "3Gi"}, "limits": {"memory": "2Gi"}}},
        "spec.resources.requests",
        "must not be above spec.resources.limits",
    ),
    # What is written to /dev/shm counts against the limit and would end the pod. C27
    (
        "shared memory at the limit",
        {"resources": {"limits": {"memory": "2Gi"}, "sharedMemory": "2048Mi"}},
        "spec.resources.sharedMemory",
        "must be below spec.resources.limits.memory",
    ),
    ("bad GPU name", {"resources": {"gpuResource": "gpu"}}, "spec.resources.gpuResource", "should match"),
    ("no roll-out", {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "spec.rollout", "must not both be zero"),
    ("no roll-out in %", {"rollout": {"maxSurge": "0%", "maxUnavailable": "0%"}}, "spec.rollout", "both be zero"),
    ("more than all", {"rollout": {"maxUnavailable": "101%"}}, "spec.rollout.maxUnavailable", "should match"),
    ("service type", {"service": {"type": "ExternalName"}}, "spec.service.type", "Unsupported value"),
    ("service port", {"service": {"port": 70000}}, "spec.service.port", "less than or equal to 65535"),
    (
        "our annotation",
        {"service": {"annotations": {"kvpilot.dev/render-hash": "x"}}},
        "service.annotations",
        "kvpilot.dev",
    ),
    ("no time to start", {"startup": {"timeoutSeconds": 0}}, "spec.startup.timeoutSeconds", "equal to 10"),
    ("negative drain", {"drain": {"timeoutSeconds": -1}}, "spec.drain.timeoutSeconds", "equal to 0"),
    ("container without name", {"podTemplate": {"spec": {"containers": [{}]}}}, "spec.containers[0].name", "Required"),
    (
        "the selector's label",
        {"podTemplate": {"metadata": {"labels": {"kvpilot.dev/deployment": "x"}}}},
        "spec.podTemplate.metadata.labels",
        "kvpilot.dev",
    ),
    (
        "our pod annotation",
        {"podTemplate": {"metadata": {"annotations": {"kvpilot.dev/tuning-touch": "x"}}}},
        "spec.podTemplate.metadata.annotations",
        "kvpilot.dev",
    ),
    (
        "the engine's arguments",
        {"podTemplate": {"spec": {"containers": [{"name": "engine", "args": ["x"]}]}}},
        "spec.podTemplate.spec.containers[0].args",
        "spec.engine.extraArgs",
    ),
    (
        "the engine's image",
        {"podTemplate": {"spec": {"containers": [{"name": "engine", "image": "x"}]}}},
        "spec.podTemplate.spec.containers[0].image",
        "spec.engine.image",
    ),
    (
        "a pod that ends",
        {"podTemplate": {"spec": {"restartPolicy": "Never"}}},
        "spec.podTemplate.spec.restartPolicy",
        "Unsupported value",
    ),
]

GOOD_SPECS: list[tuple[str, dict[str, Any]]] = [
    ("only a model", {}),
    ("hub revision", {"model": {"source": "hf://meta-llama/Llama-3.1-8B@refs/pr/1"}}),
    ("hub variant", {"model": {"source": "hf://owner/model-GGUF:Q4_K_M@v1"}}),
    ("claim", {"model": {"source": "pvc://models/llama/8b.gguf"}}),
    ("tuning off above max", {"memory": {"utilization": 0.99, "tuning": {"mode": "Disabled"}}}),
    ("share at both bounds", {"memory": {"utilization": 0.9, "tuning": {"min": 0.9, "max": 0.9}}}),
    ("target 1", {"scaling": {"targets": {"kvUsage": 1}}}),
    ("window 0", {"scaling": {"scaleDownStabilizationSeconds": 0}}),
    ("none when external", {"replicas": 0, "scaling": {"mode": "External"}}),
    ("shared memory below the limit", {"resources": {"limits": {"memory": "2Gi"}, "sharedMemory": "2047Mi"}}),
    ("shared memory in bytes", {"resources": {"limits": {"memory": 2147483648}, "sharedMemory": 1073741824}}),
    ("surge only", {"rollout": {"maxSurge": "25%", "maxUnavailable": 0}}),
    ("foreign flags", {"engine": {"extraArgs": ["--port-range", "--max-logprobs", "5", "--chat-template=/x"]}}),
    ("GPU on cuda", {"engine": {"device": "cuda"}, "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}}}),
    ("more GPUs", {"engine": {"device": "cuda", "tensorParallelSize": 8}}),
]


def manifest(name: str | None = None, **spec: Any) -> Object:
    """A valid object on cpu, changed."""
    item: Object = {
        "apiVersion": "kvpilot.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name or f"m-{uuid.uuid4().hex[:8]}"},
        "spec": {"model": {"source": "hf://owner/model"}, "engine": {"device": "cpu"}},
    }
    merge(item["spec"], copy.deepcopy(spec))
    return item


def refusal(kubectl: Kubectl, item: Object) -> str:
    """What the server answers to a bad object."""
    with pytest.raises(KubectlError) as refused:
        kubectl.apply(item)
    return str(refused.value)


@pytest.mark.parametrize(("spec", "field", "words"), [case[1:] for case in BAD_SPECS], ids=[c[0] for c in BAD_SPECS])
def test_bad_object_is_refused_with_the_field_and_a_reason(
    kubectl: Kubectl, spec: dict[str, Any], field: str, words: str
) -> None:
    answer = refusal(kubectl, manifest(**spec))
    assert field in answer
    assert words in answer


@pytest.mark.parametrize("spec", [case[1] for case in GOOD_SPECS], ids=[case[0] for case in GOOD_SPECS])
def test_good_object_is_accepted(kubectl: Kubectl, spec: dict[str, Any]) -> None:
    kubectl.run("create", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest(**spec)))


@pytest.mark.parametrize("name", [LONG_NAME, "1model", "a.b"])
def test_name_that_no_service_could_have_is_refused(kubectl: Kubectl, name: str) -> None:
    assert "metadata.name must have at most 52 characters" in refusal(kubectl, manifest(name))


def test_longest_name_is_accepted(kubectl: Kubectl) -> None:
    kubectl.run("create", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest("a" * 52)))


@pytest.mark.parametrize("kind", ["limits", "requests"])
def test_gpu_count_beside_the_parallel_size_is_refused(kubectl: Kubectl, kind: str) -> None:
    item = manifest(engine={"device": "cuda", "tensorParallelSize": 2}, resources={kind: {"nvidia.com/gpu": 1}})
    answer = refusal(kubectl, item)
    assert f"spec.resources.{kind}" in answer
    assert "spec.engine.tensorParallelSize" in answer


def test_unknown_field_is_refused_by_kubectl(kubectl: Kubectl) -> None:
    assert 'unknown field "spec.scaling.maxReplica"' in refusal(kubectl, manifest(scaling={"maxReplica": 3}))


def test_overlay_directives_reach_the_operator_where_nulls_do_not(kubectl: Kubectl) -> None:
    """`kubectl apply` drops nulls without a word, so that there must be another way to take something away."""
    overlay = {
        "spec": {
            "securityContext": {"$patch": "replace", "runAsNonRoot": True},
            "volumes": [{"name": "cache", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/cache"}}],
            "hostname": None,
        }
    }
    item = manifest(podTemplate=overlay)
    item["spec"]["podTemplate"] = overlay
    for step in (1, 2):  # made and changed
        kubectl.apply(merged(item, engine={"maxNumSeqs": step}))
        found = kubectl.get("llmdeployment", item["metadata"]["name"])
        assert found is not None
        kept = {key: value for key, value in overlay["spec"].items() if value is not None}
        assert found["spec"]["podTemplate"]["spec"] == kept


def test_object_without_a_spec_is_refused(kubectl: Kubectl) -> None:
    item = manifest()
    del item["spec"]
    assert "spec: Required value" in refusal(kubectl, item)


def test_replicas_are_refused_in_auto_and_taken_when_the_mode_changes_too(kubectl: Kubectl) -> None:
    item = manifest(replicas=2)
    kubectl.apply(item)
    answer = refusal(kubectl, merged(item, replicas=3))
    assert "spec.replicas" in answer
    assert "set scaling.mode to External" in answer
    # Whoever applies the same count again and again (GitOps) is not in the way. C20
    kubectl.apply(merged(item, scaling={"maxReplicas": 6}))
    kubectl.apply(merged(item, replicas=3, scaling={"mode": "External"}))
    kubectl.apply(merged(item, replicas=5, scaling={"mode": "External"}))
    kubectl.apply(merged(item, replicas=4, scaling={"mode": "Auto"}))
    assert "spec.replicas" in refusal(kubectl, merged(item, replicas=5))


def merged(item: Object, **spec: Any) -> Object:
    changed = copy.deepcopy(item)
    merge(changed["spec"], spec)
    return changed
