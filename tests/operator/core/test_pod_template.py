"""The engine pod: command line, probes, security, volumes."""

from __future__ import annotations

from typing import Any

import pytest

from kvpilot_operator.core import naming
from kvpilot_operator.core.api_types import LLMDeploymentSpec, parse_spec
from kvpilot_operator.core.engine_args import OWNED_FLAGS, build_engine_args
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.pod_template import PRE_STOP_S, build_pod_template

OWNER = naming.Owner(NamespacedName("ns", "llama"), "uid-1")


def parse(**spec: Any) -> LLMDeploymentSpec:
    return parse_spec({"spec": {"model": {"source": "hf://owner/model"}, **spec}})


def pod(**spec: Any) -> dict[str, Any]:
    built: dict[str, Any] = build_pod_template(parse(**spec), OWNER, "example.com/engine:1")["spec"]
    return built


def engine(**spec: Any) -> dict[str, Any]:
    (container,) = pod(**spec)["containers"]
    found: dict[str, Any] = container
    return found


def volume(name: str, **spec: Any) -> dict[str, Any] | None:
    return next((v for v in pod(**spec)["volumes"] if v["name"] == name), None)


def env(**spec: Any) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in engine(**spec)["env"]}


def test_the_engine_chooses_the_folder_of_its_kernels() -> None:
    """One given to numba would be used as it is: stale after an upgrade, and without what came with the image."""
    assert env()["XDG_CACHE_HOME"] == "/var/lib/kvpilot/cache"
    assert "NUMBA_CACHE_DIR" not in env()


def test_command_line_of_the_defaults() -> None:
    assert engine()["command"] == ["python3", "-m", "kvpilot_engine"]
    assert engine()["args"] == [
        *("--model", "hf://owner/model", "--served-model-name", "llama", "--host", "0.0.0.0", "--port", "8000"),
        *("--device", "cuda", "--block-size", "16", "--max-num-seqs", "64", "--enable-prefix-caching"),
        *("--tuning-file", "/etc/kvpilot/tuning.json", "--state-dir", "/var/lib/kvpilot/state"),
        *("--drain-timeout", "120"),
    ]


def test_command_line_of_everything() -> None:
    spec = parse(
        model={"source": "hf://a/b@v1", "servedNames": ["x", "y"]},
        engine={
            "dtype": "bfloat16",
            "quantization": "fp8",
            "kvCacheDtype": "fp8",
            "blockSize": 32,
            "maxModelLen": 4096,
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 512,
            "tensorParallelSize": 2,
            "prefixCaching": False,
            "extraArgs": ["--seed", "7"],
        },
        drain={"timeoutSeconds": 5},
    )
    assert build_engine_args(spec, "llama") == [
        *("--model", "hf://a/b@v1", "--served-model-name", "x", "y", "--host", "0.0.0.0", "--port", "8000"),
        *("--device", "cuda", "--dtype", "bfloat16", "--quantization", "fp8", "--kv-cache-dtype", "fp8"),
        *("--block-size", "32", "--max-model-len", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
        *("--tensor-parallel-size", "2", "--no-enable-prefix-caching"),
        *("--tuning-file", "/etc/kvpilot/tuning.json", "--state-dir", "/var/lib/kvpilot/state"),
        *("--drain-timeout", "5", "--seed", "7"),
    ]
    assert {arg for arg in build_engine_args(spec, "llama") if arg.startswith("--")} - {"--seed"} <= set(OWNED_FLAGS)


def test_a_changed_memory_share_changes_no_pod() -> None:
    """It travels in the tuning file, live."""
    assert pod(memory={"utilization": 0.6}) == pod()


def test_pod_is_locked_down() -> None:
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert engine()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_service_links_are_off() -> None:
    """A Service named kvpilot would put KVPILOT_PORT=tcp://... among the engine's settings: it would not start."""
    assert pod()["enableServiceLinks"] is False


@pytest.mark.parametrize("seconds", [10, 61, 1800])
def test_startup_probe_has_the_whole_budget_and_liveness_waits_for_it(seconds: int) -> None:
    """# C16"""
    container = engine(startup={"timeoutSeconds": seconds})
    startup = container["startupProbe"]
    assert startup["httpGet"]["path"] == "/readyz"
    assert seconds <= startup["periodSeconds"] * startup["failureThreshold"] < seconds + startup["periodSeconds"]
    assert "initialDelaySeconds" not in container["livenessProbe"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("seconds", [0, 120, 3600])
def test_grace_is_longer_than_pre_stop_and_drain(seconds: int) -> None:
    """# C18"""
    built = pod(drain={"timeoutSeconds": seconds})
    assert built["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": PRE_STOP_S}}}
    assert built["terminationGracePeriodSeconds"] > PRE_STOP_S + seconds


def test_gpus_are_added_on_cuda_only() -> None:
    on_cuda = engine(engine={"tensorParallelSize": 2}, resources={"limits": {"memory": "64Gi"}})["resources"]
    assert on_cuda == {"limits": {"memory": "64Gi", "nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "2"}}
    on_cpu = engine(engine={"device": "cpu"}, resources={"limits": {"memory": "2Gi"}})["resources"]
    assert on_cpu == {"limits": {"memory": "2Gi"}}


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ({}, "16Gi"),
        ({"resources": {"limits": {"memory": "64Gi"}}}, "16Gi"),
        ({"resources": {"limits": {"memory": "8Gi"}}}, str(4 * 1024**3)),
        ({"resources": {"sharedMemory": "1Gi"}}, "1Gi"),
        ({"engine": {"device": "cpu"}, "resources": {"sharedMemory": "64Mi"}}, "64Mi"),
    ],
)
def test_shared_memory_has_a_size_below_the_memory_limit(spec: dict[str, Any], size: str) -> None:
    """# C27"""
    assert volume("shm", **spec) == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    assert {"name": "shm", "mountPath": "/dev/shm"} in engine(**spec)["volumeMounts"]


def test_cpu_has_no_shared_memory_of_its_own() -> None:
    assert volume("shm", engine={"device": "cpu"}) is None


def test_tuning_file_is_mounted_without_sub_path() -> None:
    """A subPath mount is never updated."""
    (mount,) = [m for m in engine()["volumeMounts"] if m["name"] == "tuning"]
    assert mount == {"name": "tuning", "mountPath": "/etc/kvpilot", "readOnly": True}
    config_map = (volume("tuning") or {})["configMap"]
    assert config_map == {"name": "llama-tuning", "items": [{"key": "tuning.json", "path": "tuning.json"}]}


def test_claims_are_mounted() -> None:
    model = {"source": "pvc://models/m.gguf", "cache": {"persistentVolumeClaim": "cache"}}
    assert volume("cache", model=model) == {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}
    assert volume("model", model=model) == {
        "name": "model",
        "persistentVolumeClaim": {"claimName": "models", "readOnly": True},
    }
    assert {"name": "model", "mountPath": naming.MODEL_DIR, "readOnly": True} in engine(model=model)["volumeMounts"]
    assert volume("cache") == {"name": "cache", "emptyDir": {}}
    assert volume("model") is None


def test_secrets_reach_the_container_that_uses_them_and_never_as_text() -> None:
    """# C24"""
    found = env(
        model={"source": "hf://a/b", "accessTokenSecret": {"name": "hf", "key": "token"}},
        engine={"apiKeySecret": {"name": "api", "key": "key"}},
    )
    assert found["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert found["KVPILOT_API_KEY"] == {"secretKeyRef": {"name": "api", "key": "key"}}
    assert not {"HF_TOKEN", "KVPILOT_API_KEY"} & set(env())


def test_pod_knows_who_it_is() -> None:
    assert env()["KVPILOT_POD_UID"] == {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}}
    assert {"KVPILOT_POD_NAME", "KVPILOT_POD_NAMESPACE"} <= set(env())


def test_all_that_is_mounted_is_a_volume_and_the_other_way_round() -> None:
    for spec in ({}, {"engine": {"device": "cpu"}}, {"model": {"source": "pvc://a/b"}}):
        built = pod(**spec)
        mounted = [mount["name"] for mount in built["containers"][0]["volumeMounts"]]
        assert sorted(mounted) == sorted(v["name"] for v in built["volumes"])
