"""From what replicas report to one picture of the load, in units of "one replica at its targets".

Decides nothing. Invariants: a replica that could not be read is unknown and never idle; usage ratios are averaged,
weighted by the size of the cache, never added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kvpilot_operator.core.api_types import ScalingTargets
from kvpilot_operator.core.observation import DeploymentObservation, EngineLoad, ReplicaObservation, Unknown
from kvpilot_operator.core.policy import PolicyConstants
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.scaling_memory import PreemptionSample
from kvpilot_operator.core.timestamps import seconds_since


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """One readable, ready replica. 1.0 is a replica exactly at its target."""

    name: str
    kv_usage_ratio: float
    running: int
    waiting: int
    kv: float
    queue: float
    preemption: float

    @property
    def highest(self) -> float:
        return max(self.kv, self.queue, self.preemption)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPicture:
    known: tuple[ReplicaLoad, ...]
    unknown: tuple[tuple[str, str], ...]
    """Ready replicas that can't be counted: name and why."""
    kv_usage_mean: float | None
    kv_usage_max: float | None
    preemptions_per_minute: float

    @property
    def running(self) -> int:
        return sum(r.running for r in self.known)

    @property
    def waiting(self) -> int:
        return sum(r.waiting for r in self.known)

    @property
    def demand(self) -> float:
        """Replicas' worth of load; the unknown ones count as at target, which damps a decision and never turns it."""
        return sum(r.highest for r in self.known) + len(self.unknown)

    @property
    def hot(self) -> tuple[ReplicaLoad, ...]:
        return tuple(r for r in self.known if r.highest > 1.0)

    @property
    def dominant(self) -> Reason:
        """The signal that asks for most."""
        sums = {
            Reason.KV_PRESSURE: sum(r.kv for r in self.known),
            Reason.QUEUE_PRESSURE: sum(r.queue for r in self.known),
            Reason.PREEMPTION_PRESSURE: sum(r.preemption for r in self.known),
        }
        return max(sums, key=lambda reason: sums[reason])


def measure_load(
    observation: DeploymentObservation,
    targets: ScalingTargets,
    samples: Sequence[PreemptionSample],
    policy: PolicyConstants,
) -> LoadPicture:
    """Ready, living replicas only; `samples` are those of this pass (see `sample_preemptions`)."""
    fresh: list[tuple[ReplicaObservation, EngineLoad]] = []
    unknown: list[tuple[str, str]] = []
    for replica in observation.live:
        if not replica.ready:
            continue
        load = fresh_load(replica, policy)
        if isinstance(load, Unknown):
            unknown.append((replica.name, load.reason))
        else:
            fresh.append((replica, load))
    rates = {s.pod_uid: s.per_minute for s in samples}
    blocks = sum(load.blocks_total for _, load in fresh)
    weighted = [load.blocks_total * len(fresh) / blocks if blocks else 1.0 for _, load in fresh]
    usages = [load.kv_usage_ratio for _, load in fresh]
    return LoadPicture(
        known=tuple(
            ReplicaLoad(
                name=replica.name,
                kv_usage_ratio=load.kv_usage_ratio,
                running=load.running,
                waiting=load.waiting,
                kv=load.kv_usage_ratio * weight / targets.kv_usage,
                queue=load.waiting / targets.waiting_per_replica,
                preemption=min(
                    policy.max_preemption_load,
                    (rates.get(replica.uid) or 0.0) / policy.preemptions_per_minute_at_target,
                ),
            )
            for (replica, load), weight in zip(fresh, weighted, strict=True)
        ),
        unknown=tuple(unknown),
        kv_usage_mean=sum(u * w for u, w in zip(usages, weighted, strict=True)) / len(usages) if usages else None,
        kv_usage_max=max(usages) if usages else None,
        preemptions_per_minute=sum(rates.get(replica.uid) or 0.0 for replica, _ in fresh),
    )


def fresh_load(replica: ReplicaObservation, policy: PolicyConstants) -> EngineLoad | Unknown:
    """The load, unless it is too old to act on."""
    load = replica.load
    if isinstance(load, EngineLoad) and load.age_s > policy.stale_after_s:
        return Unknown(Reason.METRICS_STALE)
    return load


def sample_preemptions(
    observation: DeploymentObservation, previous: Sequence[PreemptionSample], now: datetime, policy: PolicyConstants
) -> tuple[PreemptionSample, ...]:
    """Counters turned into rates over at least `preemption_sample_s`; a pod that can't be read keeps its sample."""
    before = {s.pod_uid: s for s in previous}
    samples: list[PreemptionSample] = []
    for replica in observation.live:
        last = before.get(replica.uid)
        load = fresh_load(replica, policy)
        if isinstance(load, Unknown):
            if last is not None:
                samples.append(last)
            continue
        samples.append(_next_sample(replica.uid, load.preemptions_total, last, now, policy))
    return tuple(samples)


def _next_sample(
    uid: str, total: int, last: PreemptionSample | None, now: datetime, policy: PolicyConstants
) -> PreemptionSample:
    if last is None or total < last.total:  # first sight, or the engine began to count anew
        return PreemptionSample(pod_uid=uid, total=total, at=now)
    if total == last.total and not last.per_minute:
        return last  # nothing happens: the sample stays as it is, and status need not be written
    elapsed = seconds_since(last.at, now)
    if elapsed < policy.preemption_sample_s:
        return last
    # After a quiet time the sample is old, yet the counter stood still until the last pass: the change is a recent one.
    elapsed = min(elapsed, 2 * policy.preemption_sample_s)
    return PreemptionSample(
        pod_uid=uid, total=total, at=now, per_minute=round((total - last.total) * 60.0 / elapsed, 1)
    )
