"""The engine pod, before the user's overlay. A pure builder: spec and image in, a pod template out.

Security is not optional here (no root, read-only root file system, no capabilities, no service-account token); an
overlay may loosen it visibly. Not here: replicas, roll-out and anything that changes without a new pod.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from kvpilot_operator.core import naming
from kvpilot_operator.core.api_types import Device, LLMDeploymentSpec, Quantity, SecretKeyRef
from kvpilot_operator.core.engine_args import ENGINE_COMMAND, build_engine_args
from kvpilot_operator.core.model_source import parse_model_source
from kvpilot_operator.core.quantity import parse_quantity

PRE_STOP_S = 5
"""The pod keeps serving for this long after it left the endpoints: proxies elsewhere take that long to notice (C18)."""
EXIT_MARGIN_S = 15
"""Between the end of the drain and the kill: the engine's own shutdown."""

STARTUP_PERIOD_S = 2
USER_ID = 65532

DEFAULT_SHARED_MEMORY = "16Gi"


def build_pod_template(spec: LLMDeploymentSpec, owner: naming.Owner, image: str) -> dict[str, Any]:
    """Metadata and spec of an engine pod; InvalidSpecError for a source that can't be understood."""
    return {
        "metadata": {"labels": naming.child_labels(owner)},
        "spec": {
            "automountServiceAccountToken": False,
            # A Service named `kvpilot` would otherwise put KVPILOT_PORT=tcp://... among the engine's settings.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": PRE_STOP_S + spec.drain.timeout_seconds + EXIT_MARGIN_S,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                # A big claim would otherwise be walked file by file at every start.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_build_engine_container(spec, owner, image)],
            "volumes": _build_volumes(spec, owner),
        },
    }


def shared_memory(spec: LLMDeploymentSpec) -> Quantity | None:
    """Size of /dev/shm; None leaves the container runtime's own. Never above the memory limit by default (C27)."""
    resources = spec.resources
    if resources.shared_memory is not None or spec.engine.device is Device.CPU:
        return resources.shared_memory
    limit, default = parse_quantity(resources.limits.get("memory")), parse_quantity(DEFAULT_SHARED_MEMORY)
    if limit is not None and default is not None and limit / 2 < default:
        return int(limit / 2)
    return DEFAULT_SHARED_MEMORY


def _build_engine_container(spec: LLMDeploymentSpec, owner: naming.Owner, image: str) -> dict[str, Any]:
    return {
        "name": naming.CONTAINER_ENGINE,
        "image": image,
        "command": list(ENGINE_COMMAND),
        "args": build_engine_args(spec, owner.name),
        "ports": [{"name": naming.PORT_NAME, "containerPort": naming.PORT, "protocol": "TCP"}],
        "env": _build_env(spec),
        "resources": _build_resources(spec),
        # A load may take the whole budget; until then neither of the other two probes runs (C16).
        "startupProbe": _build_probe(
            "/readyz",
            period_s=STARTUP_PERIOD_S,
            failures=ceil(spec.startup.timeout_seconds / STARTUP_PERIOD_S),
        ),
        "livenessProbe": _build_probe("/livez", period_s=10, failures=6),
        "readinessProbe": _build_probe("/readyz", period_s=5, failures=2),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _build_mounts(spec),
    }


def _build_probe(path: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": naming.PORT_NAME, "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
        "successThreshold": 1,
    }


def _build_env(spec: LLMDeploymentSpec) -> list[dict[str, Any]]:
    env = [
        _from_field("KVPILOT_POD_UID", "metadata.uid"),
        _from_field("KVPILOT_POD_NAME", "metadata.name"),
        _from_field("KVPILOT_POD_NAMESPACE", "metadata.namespace"),
        # The root file system is read-only and the user has no entry in passwd: libraries need to be told both. Not
        # numba: the engine chooses a folder for each version of its kernels, and takes what came with the image.
        {"name": "HOME", "value": naming.CACHE_DIR},
        {"name": "USER", "value": "kvpilot"},
        {"name": "XDG_CACHE_HOME", "value": naming.CACHE_DIR},
        {"name": "HF_HOME", "value": f"{naming.CACHE_DIR}/huggingface"},
        {"name": "TRITON_CACHE_DIR", "value": f"{naming.CACHE_DIR}/triton"},
    ]
    if spec.model.access_token_secret is not None:
        env.append(_from_secret("HF_TOKEN", spec.model.access_token_secret))
    if spec.engine.api_key_secret is not None:
        env.append(_from_secret("KVPILOT_API_KEY", spec.engine.api_key_secret))
    return env


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _from_secret(name: str, reference: SecretKeyRef) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": reference.name, "key": reference.key}}}


def _build_resources(spec: LLMDeploymentSpec) -> dict[str, Any]:
    requests, limits = dict(spec.resources.requests), dict(spec.resources.limits)
    if spec.engine.device is Device.CUDA:
        # Extended resources need no request beside their limit, but one that differs is refused.
        requests[spec.resources.gpu_resource] = str(spec.engine.tensor_parallel_size)
        limits[spec.resources.gpu_resource] = str(spec.engine.tensor_parallel_size)
    return {kind: values for kind, values in (("requests", requests), ("limits", limits)) if values}


def _build_mounts(spec: LLMDeploymentSpec) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        # No subPath: such a mount would never be updated.
        {"name": "tuning", "mountPath": naming.TUNING_DIR, "readOnly": True},
        {"name": "state", "mountPath": naming.STATE_DIR},
        {"name": "cache", "mountPath": naming.CACHE_DIR},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - in the pod
    ]
    if parse_model_source(spec.model.source).claim is not None:
        mounts.append({"name": "model", "mountPath": naming.MODEL_DIR, "readOnly": True})
    if shared_memory(spec) is not None:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - in the pod
    return mounts


def _build_volumes(spec: LLMDeploymentSpec, owner: naming.Owner) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {
            "name": "tuning",
            "configMap": {
                "name": naming.tuning_config_map_name(owner),
                # What else is in the ConfigMap is the operator's own.
                "items": [{"key": naming.TUNING_KEY, "path": naming.TUNING_KEY}],
            },
        },
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    claim = spec.model.cache.persistent_volume_claim
    cache = {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
    volumes.append({"name": "cache", **cache})
    model_claim = parse_model_source(spec.model.source).claim
    if model_claim is not None:
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": model_claim, "readOnly": True}})
    size = shared_memory(spec)
    if size is not None:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}})
    return volumes
