"""What the operator saw: frozen facts about one LLMDeployment, its children and its pods. Unknown is never zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that could not be observed, and why. Never comparable with a number."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of one engine as it reported it. Ratios 0..1, finite: the adapter turns anything else into Unknown."""

    kv_usage_ratio: float
    running: int
    waiting: int
    waiting_capacity: int
    preemptions_total: int
    blocks_total: int
    age_s: float
    """Age of the engine's own snapshot when it was read, plus the time since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of one engine as it reported it; bytes."""

    device: str
    device_total_bytes: int
    device_free_bytes: int
    utilization: float
    limit_bytes: int
    weights_bytes: int
    activations_peak_bytes: int
    kv_reserved_bytes: int
    kv_tokens: int
    max_model_len: int
    min_utilization: float
    max_concurrency_at_max_len: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTuning:
    """The tuning revision that one engine acknowledges."""

    revision: int
    state: str
    utilization: float
    reason: str


class OOMPhase(StrEnum):
    LOAD = "load"
    WARMUP = "warmup"
    PREFILL = "prefill"
    DECODE = "decode"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOOM:
    """One out-of-memory event that a living engine reports (it survived it, or is about to end)."""

    seq: int
    phase: str
    cause: str
    utilization: float
    survived: bool
    message: str
    requested_bytes: int | None = None
    limit_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    reason: str
    exit_code: int
    utilization: float
    revision: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """One `GET /engine/state`, parsed and checked."""

    state: str
    state_reason: str
    load: EngineLoad | Unknown
    memory: EngineMemory | Unknown
    tuning: EngineTuning | Unknown
    oom_seq: int = 0
    oom_events: tuple[EngineOOM, ...] = ()
    start_failures: tuple[StartFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """How one container run ended (state.terminated or lastState.terminated)."""

    exit_code: int
    reason: str
    """Kubernetes' word: OOMKilled, Error, Completed, ContainerCannotRun."""
    message: str
    """The termination message: our JSON line, or anything."""
    finished_at: datetime | None
    run: int | None = None
    """Which run of the container ended: its restart count then. `state.terminated` and a waiting one's `lastState`
    belong to the present restart count, a running container's `lastState` to the one before. None: can't be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaObservation:
    """One engine pod."""

    name: str
    uid: str
    ready: bool
    terminating: bool
    phase: str
    """Pending, Running, Succeeded, Failed, Unknown."""
    scheduled: bool
    unschedulable_message: str = ""
    waiting_reason: str = ""
    """Of the engine container: ImagePullBackOff, CrashLoopBackOff, CreateContainerConfigError, ContainerCreating…"""
    waiting_message: str = ""
    template_hash: str = ""
    node: str = ""
    pod_ip: str = ""
    created_at: datetime | None = None
    started_at: datetime | None = None
    restart_count: int = 0
    last_termination: Termination | None = None
    pod_reason: str = ""
    """Evicted, NodeLost…"""
    annotations: dict[str, str] = field(default_factory=dict)
    engine: EngineState | Unknown = Unknown("NotScraped")

    @property
    def load(self) -> EngineLoad | Unknown:
        return self.engine if isinstance(self.engine, Unknown) else self.engine.load

    @property
    def memory(self) -> EngineMemory | Unknown:
        return self.engine if isinstance(self.engine, Unknown) else self.engine.memory

    @property
    def tuning(self) -> EngineTuning | Unknown:
        return self.engine if isinstance(self.engine, Unknown) else self.engine.tuning

    @property
    def is_live(self) -> bool:
        """Counts toward capacity: not terminating and not finished."""
        return not self.terminating and self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildObservation:
    """One child as the API server holds it; `controlled` is False for an object of that name that is not ours."""

    kind: str
    name: str
    controlled: bool
    manifest: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentObservation:
    """Everything that was seen of one LLMDeployment in one pass."""

    generation: int
    replicas_wanted: int | None
    """spec.replicas of the Deployment; None when it does not exist."""
    replicas: tuple[ReplicaObservation, ...]
    children: tuple[ChildObservation, ...] = ()
    deployment_conditions: tuple[dict[str, str], ...] = ()
    deployment_observed_generation_is_current: bool = True
    foreign_scaler: str = ""
    """Name of an HPA that targets our Deployment; empty when none."""

    @property
    def live(self) -> tuple[ReplicaObservation, ...]:
        return tuple(r for r in self.replicas if r.is_live)

    @property
    def num_ready(self) -> int:
        return sum(1 for r in self.live if r.ready)

    @property
    def num_unknown(self) -> int:
        """Live, ready pods whose load could not be read."""
        return sum(1 for r in self.live if r.ready and isinstance(r.load, Unknown))

    @property
    def coverage(self) -> float:
        """Share of live pods whose load is known, 0..1; 0 when there are none."""
        live = self.live
        if not live:
            return 0.0
        return sum(1 for r in live if not isinstance(r.load, Unknown)) / len(live)
