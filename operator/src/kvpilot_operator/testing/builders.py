"""Values for tests: one ordinary object, pod, engine or observation each, changed by keyword.

Builds only what a real API server or engine could send; decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvpilot_operator.core.observation import (
    DeploymentObservation,
    EngineLoad,
    EngineMemory,
    EngineState,
    EngineTuning,
    ReplicaObservation,
    Termination,
    Unknown,
)
from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.resources import LLM_DEPLOYMENTS
from kvpilot_operator.testing.manual_clock import START


def make_object(name: str = "llama", namespace: str = "team-a", **spec: Any) -> Manifest:
    """An LLMDeployment manifest for the CPU; keyword arguments go into (and over) its spec."""
    defaults: dict[str, Any] = {
        "model": {"source": "file:///models/tiny.gguf"},
        "engine": {"image": "engine:1", "device": "cpu"},
        "replicas": 1,
    }
    return {
        "apiVersion": LLM_DEPLOYMENTS.api_version,
        "kind": LLM_DEPLOYMENTS.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**defaults, **spec},
    }


def make_pod(
    name: str,
    *,
    deployment: str = "llama",
    namespace: str = "team-a",
    uid: str | None = None,
    ready: bool = True,
    labels: Mapping[str, str] | None = None,
    status: Mapping[str, Any] | None = None,
    created_at: str = "2026-01-01T00:00:00Z",
) -> Manifest:
    """An engine pod as the kubelet would report it: scheduled and running, ready if said so."""
    running = {"name": "engine", "restartCount": 0, "ready": ready, "state": {"running": {"startedAt": created_at}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"pod-{name}",
            "creationTimestamp": created_at,
            "labels": {"kvpilot.dev/deployment": deployment, **(labels or {})},
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": deployment, "uid": "rs", "controller": True}
            ],
        },
        "spec": {"nodeName": "node1", "containers": [{"name": "engine"}]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [running],
            **(status or {}),
        },
    }


def make_load(**changes: Any) -> EngineLoad:
    """An idle engine, changed by keyword."""
    values: dict[str, Any] = {
        "kv_usage_ratio": 0.0,
        "running": 0,
        "waiting": 0,
        "waiting_capacity": 0,
        "preemptions_total": 0,
        "blocks_total": 100,
        "age_s": 0.0,
    }
    return EngineLoad(**{**values, **changes})


def make_engine_memory(**changes: Any) -> EngineMemory:
    """An engine at 0.9 of a 10 GiB device, changed by keyword."""
    gib = 1024**3
    values: dict[str, Any] = {
        "device": "cpu",
        "device_total_bytes": 10 * gib,
        "device_free_bytes": gib,
        "utilization": 0.9,
        "limit_bytes": 9 * gib,
        "weights_bytes": 2 * gib,
        "activations_peak_bytes": gib,
        "kv_reserved_bytes": 5 * gib,
        "kv_tokens": 100_000,
        "max_model_len": 8192,
        "min_utilization": 0.4,
        "max_concurrency_at_max_len": 12.0,
    }
    return EngineMemory(**{**values, **changes})


def make_engine_state(**changes: Any) -> EngineState:
    """A ready, idle engine that has applied tuning revision 1, changed by keyword."""
    values: dict[str, Any] = {
        "state": "ready",
        "state_reason": "",
        "load": make_load(),
        "memory": make_engine_memory(),
        "tuning": EngineTuning(revision=1, state="applied", utilization=0.9, reason=""),
    }
    return EngineState(**{**values, **changes})


def make_replica(
    name: str = "pod-0", *, load: EngineLoad | Unknown | None = None, **changes: Any
) -> ReplicaObservation:
    """A ready, idle replica seen at START, changed by keyword; `load` replaces that of its engine."""
    values: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "ready": True,
        "terminating": False,
        "phase": "Running",
        "scheduled": True,
        "template_hash": "t1",
        "created_at": START,
        "started_at": START,
        "engine": make_engine_state() if load is None else make_engine_state(load=load),
    }
    return ReplicaObservation(**{**values, **changes})


def make_observation(*replicas: ReplicaObservation, **changes: Any) -> DeploymentObservation:
    """A settled Deployment that wants exactly these replicas, changed by keyword."""
    values: dict[str, Any] = {"generation": 1, "replicas_wanted": len(replicas), "replicas": replicas}
    return DeploymentObservation(**{**values, **changes})


def make_termination(
    exit_code: int, *, reason: str = "Error", report: Mapping[str, Any] | None = None, **changes: Any
) -> Termination:
    """The end of a container's first run, at START; `report` is the engine's JSON line."""
    message = "" if report is None else json.dumps(report)
    values: dict[str, Any] = {
        "exit_code": exit_code,
        "reason": reason,
        "message": message,
        "finished_at": START,
        "run": 0,
    }
    return Termination(**{**values, **changes})
