"""The status of an LLMDeployment as a frozen type, to and from the JSON of the object.

Computes nothing (`status` does). Invariant: what `to_dict` writes, `parse_status` reads back equal; whatever else is in
a status (an older version's, a hand's) is left out part by part and never raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kvpilot_operator.core.conditions import Condition, parse_condition
from kvpilot_operator.core.decisions import Decision, parse_decision
from kvpilot_operator.core.reasons import Phase
from kvpilot_operator.core.scaling_memory import ScalingMemory, parse_scaling_memory
from kvpilot_operator.core.timestamps import format_time, parse_time
from kvpilot_operator.core.tuning_memory import TuningMemory, parse_tuning_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStatus:
    """Load of all known replicas, rounded. None: no replica is known."""

    kv_usage: float | None
    kv_usage_max: float | None
    running: int
    waiting: int
    preemptions_per_minute: float
    unknown_replicas: int
    at: datetime

    def to_dict(self) -> dict[str, object]:
        raw: dict[str, object] = {
            "running": self.running,
            "waiting": self.waiting,
            "preemptionsPerMinute": self.preemptions_per_minute,
            "unknownReplicas": self.unknown_replicas,
            "at": format_time(self.at),
        }
        if self.kv_usage is not None:
            raw["kvUsage"] = self.kv_usage
        if self.kv_usage_max is not None:
            raw["kvUsageMax"] = self.kv_usage_max
        return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the bytes of one replica's share go."""

    weights_bytes: int
    activations_bytes: int
    kv_bytes: int
    kv_tokens: int
    max_concurrency_at_max_len: float

    def to_dict(self) -> dict[str, object]:
        return {
            "weightsBytes": self.weights_bytes,
            "activationsBytes": self.activations_bytes,
            "kvBytes": self.kv_bytes,
            "kvTokens": self.kv_tokens,
            "maxConcurrencyAtMaxLen": self.max_concurrency_at_max_len,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMDeploymentStatus:
    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    desired_replicas: int | None = None
    selector: str = ""
    phase: Phase | None = None
    image: str = ""
    template: str = ""
    conditions: tuple[Condition, ...] = ()
    load: LoadStatus | None = None
    tuning: TuningMemory | None = None
    applied_replicas: int = 0
    plan: MemoryPlan | None = None
    scaling: ScalingMemory = field(default_factory=ScalingMemory)
    decisions: tuple[Decision, ...] = ()

    def to_dict(self) -> dict[str, object]:
        raw: dict[str, object] = {
            "observedGeneration": self.observed_generation,
            "replicas": self.replicas,
            "readyReplicas": self.ready_replicas,
            "conditions": [c.to_dict() for c in self.conditions],
            "decisions": [d.to_dict() for d in self.decisions],
        }
        if self.desired_replicas is not None:
            raw["desiredReplicas"] = self.desired_replicas
        if self.phase is not None:
            raw["phase"] = str(self.phase)
        raw |= {k: v for k, v in (("selector", self.selector), ("image", self.image), ("template", self.template)) if v}
        if self.load is not None:
            raw["load"] = self.load.to_dict()
        if self.tuning is not None:
            plan = {} if self.plan is None else {"plan": self.plan.to_dict()}
            raw["memory"] = self.tuning.to_dict() | {"appliedReplicas": self.applied_replicas} | plan
        if scaling := self.scaling.to_dict():
            raw["scaling"] = scaling
        return raw


def parse_status(raw: object) -> LLMDeploymentStatus:
    """The status of an object as the API server holds it; an absent one is the empty status."""
    status = _mapping(raw)
    memory = _mapping(status.get("memory"))
    phase = status.get("phase")
    desired = status.get("desiredReplicas")
    return LLMDeploymentStatus(
        observed_generation=_count(status, "observedGeneration"),
        replicas=_count(status, "replicas"),
        ready_replicas=_count(status, "readyReplicas"),
        desired_replicas=desired if isinstance(desired, int) else None,
        selector=_text(status, "selector"),
        phase=next((p for p in Phase if p == phase), None),
        image=_text(status, "image"),
        template=_text(status, "template"),
        conditions=tuple(c for item in _objects(status, "conditions") if (c := parse_condition(item)) is not None),
        load=_parse_load(_mapping(status.get("load"))),
        tuning=parse_tuning_memory(memory),
        applied_replicas=_count(memory, "appliedReplicas"),
        plan=_parse_plan(_mapping(memory.get("plan"))),
        scaling=parse_scaling_memory(_mapping(status.get("scaling"))),
        decisions=tuple(d for item in _objects(status, "decisions") if (d := parse_decision(item)) is not None),
    )


def _parse_load(raw: Mapping[str, object]) -> LoadStatus | None:
    at = parse_time(raw.get("at"))
    if at is None:
        return None
    return LoadStatus(
        kv_usage=_number(raw, "kvUsage"),
        kv_usage_max=_number(raw, "kvUsageMax"),
        running=_count(raw, "running"),
        waiting=_count(raw, "waiting"),
        preemptions_per_minute=_number(raw, "preemptionsPerMinute") or 0.0,
        unknown_replicas=_count(raw, "unknownReplicas"),
        at=at,
    )


def _parse_plan(raw: Mapping[str, object]) -> MemoryPlan | None:
    if not raw:
        return None
    return MemoryPlan(
        weights_bytes=_count(raw, "weightsBytes"),
        activations_bytes=_count(raw, "activationsBytes"),
        kv_bytes=_count(raw, "kvBytes"),
        kv_tokens=_count(raw, "kvTokens"),
        max_concurrency_at_max_len=_number(raw, "maxConcurrencyAtMaxLen") or 0.0,
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _objects(raw: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    items = raw.get(key)
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _text(raw: Mapping[str, object], key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def _count(raw: Mapping[str, object], key: str) -> int:
    value = raw.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(raw: Mapping[str, object], key: str) -> float | None:
    value = raw.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
