"""The object as frozen types: `parse_spec` turns what the API server holds into an `LLMDeploymentSpec`.

Fields, defaults, enums and bounds are those of `crds/llmdeployments.yaml` (a contract test compares them both ways), in
Python's spelling: `minReplicas` is `min_replicas`. Descriptions are in the schema. The server has checked the object
already; the parser checks again, because an object may be older than a rule of the schema. Status is not read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from kvpilot_operator.core.spec_parsing import Bounds, OneOf, parse_dataclass
from kvpilot_operator.errors import InvalidSpecError


class Device(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


class DType(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantization(StrEnum):
    AUTO = "auto"
    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"
    GPTQ = "gptq"
    AWQ = "awq"


class KVCacheDType(StrEnum):
    AUTO = "auto"
    FP8 = "fp8"


class TuningMode(StrEnum):
    AUTO = "Auto"
    ADVISE = "Advise"
    DISABLED = "Disabled"


class ScalingMode(StrEnum):
    AUTO = "Auto"
    EXTERNAL = "External"


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


Quantity = int | str
"""A Kubernetes quantity or number-or-percentage, as it stands in the object."""

Share = Annotated[float, Bounds(0.05, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKeyRef:
    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCacheSpec:
    persistent_volume_claim: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    source: str
    served_names: tuple[str, ...] = ()
    """Empty: the object's name."""
    access_token_secret: SecretKeyRef | None = None
    cache: ModelCacheSpec = field(default_factory=ModelCacheSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    image: str | None = None
    device: Device = Device.CUDA
    dtype: DType = DType.AUTO
    quantization: Quantization = Quantization.AUTO
    kv_cache_dtype: KVCacheDType = KVCacheDType.AUTO
    block_size: Annotated[int, OneOf((8, 16, 32, 64, 128))] = 16
    max_model_len: Annotated[int, Bounds(16, 16_777_216)] | None = None
    max_num_seqs: Annotated[int, Bounds(1, 4096)] = 64
    max_num_batched_tokens: Annotated[int, Bounds(16, 1_048_576)] | None = None
    tensor_parallel_size: Annotated[int, Bounds(1, 64)] = 1
    prefix_caching: bool = True
    api_key_secret: SecretKeyRef | None = None
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTuningSpec:
    mode: TuningMode = TuningMode.AUTO
    min: Share = 0.5
    max: Share = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    utilization: Share = 0.9
    tuning: MemoryTuningSpec = field(default_factory=MemoryTuningSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    kv_usage: Share = 0.8
    waiting_per_replica: Annotated[int, Bounds(1, 10_000)] = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    mode: ScalingMode = ScalingMode.AUTO
    min_replicas: Annotated[int, Bounds(1, 1000)] = 1
    max_replicas: Annotated[int, Bounds(1, 1000)] = 4
    targets: ScalingTargets = field(default_factory=ScalingTargets)
    scale_down_stabilization_seconds: Annotated[int, Bounds(0, 86_400)] = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    gpu_resource: str = "nvidia.com/gpu"
    requests: Mapping[str, Quantity] = field(default_factory=dict)
    limits: Mapping[str, Quantity] = field(default_factory=dict)
    shared_memory: Quantity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    type: ServiceType = ServiceType.CLUSTER_IP
    port: Annotated[int, Bounds(1, 65_535)] = 8000
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupSpec:
    timeout_seconds: Annotated[int, Bounds(10, 86_400)] = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSpec:
    timeout_seconds: Annotated[int, Bounds(0, 86_400)] = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    max_surge: Quantity = 0
    max_unavailable: Quantity = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMDeploymentSpec:
    model: ModelSpec
    replicas: Annotated[int, Bounds(0, 1000)] = 1
    engine: EngineSpec = field(default_factory=EngineSpec)
    memory: MemoryPolicy = field(default_factory=MemoryPolicy)
    scaling: ScalingPolicy = field(default_factory=ScalingPolicy)
    resources: ResourcesSpec = field(default_factory=ResourcesSpec)
    service: ServiceSpec = field(default_factory=ServiceSpec)
    startup: StartupSpec = field(default_factory=StartupSpec)
    drain: DrainSpec = field(default_factory=DrainSpec)
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    """The overlay as it stands in the object; `core.overlay` merges it."""


def parse_spec(manifest: Mapping[str, Any]) -> LLMDeploymentSpec:
    """The spec of an LLMDeployment manifest; InvalidSpecError that lists every problem by field."""
    problems: list[str] = []
    spec = parse_dataclass(LLMDeploymentSpec, manifest.get("spec"), "spec", problems)
    if spec is not None and not problems:
        problems.extend(find_contradictions(spec))
    if spec is None or problems:
        raise InvalidSpecError("; ".join(problems))
    return spec


def find_contradictions(spec: LLMDeploymentSpec) -> list[str]:
    """What fields say against each other. Only the rules that a wrong decision would follow from are repeated here."""
    problems = []
    scaling, memory = spec.scaling, spec.memory
    if scaling.min_replicas > scaling.max_replicas:
        problems.append(
            f"spec.scaling.minReplicas ({scaling.min_replicas}) is above"
            f" spec.scaling.maxReplicas ({scaling.max_replicas})"
        )
    if memory.tuning.min > memory.tuning.max:
        problems.append(
            f"spec.memory.tuning.min ({memory.tuning.min}) is above spec.memory.tuning.max ({memory.tuning.max})"
        )
    elif memory.tuning.mode is not TuningMode.DISABLED and not (
        memory.tuning.min <= memory.utilization <= memory.tuning.max
    ):
        problems.append(
            f"spec.memory.utilization ({memory.utilization}) is outside spec.memory.tuning.min..max"
            f" ({memory.tuning.min}..{memory.tuning.max})"
        )
    if _is_zero(spec.rollout.max_surge) and _is_zero(spec.rollout.max_unavailable):
        problems.append("spec.rollout.maxSurge and spec.rollout.maxUnavailable are both zero")
    return problems


def _is_zero(value: Quantity) -> bool:
    return not str(value).rstrip("%").strip("0")
