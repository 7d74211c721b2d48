"""Every reason and phase that appears on the object: the vocabulary of conditions, decisions, problems and events.

Words only: what a reason means for the object is decided in `diagnosis`, `scaling`, `memory` and `status`.
A reason is one CamelCase word and never changes its meaning: people write alerts on it.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """One word for `kubectl get`; conditions carry the truth."""

    PENDING = "Pending"
    STARTING = "Starting"
    READY = "Ready"
    SCALING = "Scaling"
    UPDATING = "Updating"
    DEGRADED = "Degraded"
    FAILED = "Failed"
    PAUSED = "Paused"
    INVALID = "Invalid"


class Reason(StrEnum):
    """Why something is as it is."""

    # The object, or what it asks of the cluster.
    INVALID_SPEC = "InvalidSpec"
    PAUSED = "Paused"
    NAME_CONFLICT = "NameConflict"
    POD_CREATION_REFUSED = "PodCreationRefused"
    WRITE_REFUSED = "WriteRefused"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_ERROR = "ImagePullError"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    VOLUME_UNAVAILABLE = "VolumeUnavailable"

    # How an engine start or run fails.
    INVALID_SETTINGS = "InvalidSettings"
    MODEL_ACCESS_DENIED = "ModelAccessDenied"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    MODEL_LOAD_TIMEOUT = "ModelLoadTimeout"
    MODEL_DOES_NOT_FIT = "ModelDoesNotFit"
    DEVICE_OOM_AT_LOAD = "DeviceOOMAtLoad"
    DEVICE_OOM_WHILE_SERVING = "DeviceOOMWhileServing"
    DEVICE_MEMORY_CONTENDED = "DeviceMemoryContended"
    DEVICE_FAULT = "DeviceFault"
    HOST_OOM_KILLED = "HostOOMKilled"
    OOM_UNRESOLVED = "OOMUnresolved"
    ENGINE_KILLED = "EngineKilled"
    EVICTED = "Evicted"
    CRASH_LOOP = "CrashLoop"

    # Readiness and progress.
    NO_REPLICAS = "NoReplicas"
    ALL_REPLICAS_READY = "AllReplicasReady"
    STARTING = "Starting"
    SCALING_UP = "ScalingUp"
    SCALING_DOWN = "ScalingDown"
    ROLLOUT_IN_PROGRESS = "RolloutInProgress"
    REPLICAS_NOT_READY = "ReplicasNotReady"
    SETTLED = "Settled"
    HEALTHY = "Healthy"
    UP_TO_DATE = "UpToDate"
    TEMPLATE_OUTDATED = "TemplateOutdated"

    # Load and scaling.
    METRICS_FRESH = "MetricsFresh"
    METRICS_MISSING = "MetricsMissing"
    METRICS_STALE = "MetricsStale"
    WITHIN_TARGETS = "WithinTargets"
    KV_PRESSURE = "KVPressure"
    QUEUE_PRESSURE = "QueuePressure"
    PREEMPTION_PRESSURE = "PreemptionPressure"
    LOAD_SKEWED = "LoadSkewed"
    LOW_LOAD = "LowLoad"
    CONFIRMING = "Confirming"
    STABILIZING = "Stabilizing"
    OUTSIDE_BOUNDS = "OutsideBounds"
    AT_MAX_REPLICAS = "AtMaxReplicas"
    HELD_WHILE_PENDING = "HeldWhilePending"
    HELD_WHILE_UNREADY = "HeldWhileUnready"
    HELD_ON_PARTIAL_METRICS = "HeldOnPartialMetrics"
    EXTERNAL_SCALER = "ExternalScaler"

    # The memory cap.
    TUNED = "Tuned"
    APPLYING = "Applying"
    RESIZE_REJECTED = "ResizeRejected"
    SPEC_CHANGED = "SpecChanged"
    TUNING_DISABLED = "TuningDisabled"
    ADVISING = "Advising"
    AT_MEMORY_FLOOR = "AtMemoryFloor"
