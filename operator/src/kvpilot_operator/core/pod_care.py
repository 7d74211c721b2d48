"""What is done to single pods: touched until they know their cap, marked before one goes, restarted out of a back-off.

Pure: facts and decisions in, wishes for the plan out. A wish that is fulfilled is not expressed again, so that the same
facts lead to no write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from kvpilot_operator.core.classifier import Ending, classify, parse_termination_message
from kvpilot_operator.core.naming import ANNOTATION_POD_DELETION_COST, ANNOTATION_TUNING_TOUCH
from kvpilot_operator.core.observation import (
    DeploymentObservation,
    EngineLoad,
    EngineState,
    EngineTuning,
    ReplicaObservation,
)
from kvpilot_operator.core.tuning_memory import TuningMemory

RETOUCH_S = 15
"""A touch makes the kubelet sync the file within a second; one that was lost is repeated after this."""

_EPSILON = 1e-6
_MAX_COST = 2**31 - 1


def plan_pod_annotations(
    observation: DeploymentObservation, memory: TuningMemory, wanted_replicas: int | None, now: datetime
) -> dict[str, dict[str, str | None]]:
    """Annotations to have, by pod UID."""
    wishes: dict[str, dict[str, str | None]] = {}
    for replica in observation.live:
        touch = _touch(replica, memory.revision, now)
        if touch is not None:
            wishes.setdefault(replica.uid, {})[ANNOTATION_TUNING_TOUCH] = touch
    current = observation.replicas_wanted
    if wanted_replicas is not None and current is not None and wanted_replicas < current:
        for uid, cost in rank_by_load(observation.live).items():
            wishes.setdefault(uid, {})[ANNOTATION_POD_DELETION_COST] = str(cost)
    return wishes


def rank_by_load(replicas: Iterable[ReplicaObservation]) -> dict[str, int]:
    """Deletion cost by pod UID: what a pod has in hand. Unknown is never cheap; not ready costs nothing."""
    costs: dict[str, int] = {}
    for replica in replicas:
        if not replica.ready:
            costs[replica.uid] = -1
        elif isinstance(replica.load, EngineLoad):
            costs[replica.uid] = replica.load.running + replica.load.waiting
        else:
            costs[replica.uid] = _MAX_COST
    return costs


def plan_pod_deletions(observation: DeploymentObservation, memory: TuningMemory) -> dict[str, str]:
    """Pods that wait in back-off although their cap has changed for the better: reason by UID.

    The kubelet's pause grows to five minutes; a new pod starts at once, with the new cap.
    """
    wishes: dict[str, str] = {}
    for replica in observation.live:
        share = memory.pods.get(replica.uid, memory.utilization)
        ended = replica.last_termination
        if replica.waiting_reason != "CrashLoopBackOff" or ended is None:
            continue
        tried = parse_termination_message(ended.message).utilization
        if tried is None:
            continue
        ending = classify(ended, pod_reason=replica.pod_reason)
        # By its own ledger the engine may have tried less than it was told: that is no reason to try more again.
        is_lower = ending.is_own_device_oom and share < tried - _EPSILON
        is_higher = ending is Ending.DOES_NOT_FIT and share > tried + _EPSILON
        if is_lower or is_higher:
            wishes[replica.uid] = f"its cap changed from {tried:g} to {share:g} while it waits in back-off"
    return wishes


def _touch(replica: ReplicaObservation, revision: int, now: datetime) -> str | None:
    """A changed value for a pod whose engine says that it knows another revision; None when there is nothing to do."""
    known = _known_revision(replica)
    if known is None or known == revision:
        return None
    present = parse_touch(replica.annotations)
    bucket = int(now.timestamp()) // RETOUCH_S
    if present is not None and present[0] == revision and present[1] >= bucket:
        return None
    return f"{revision}.{bucket}"


def parse_touch(annotations: Mapping[str, str]) -> tuple[int, int] | None:
    """Revision and number of the last touch."""
    revision, _, number = annotations.get(ANNOTATION_TUNING_TOUCH, "").partition(".")
    return (int(revision), int(number)) if revision.isdigit() and number.isdigit() else None


def _known_revision(replica: ReplicaObservation) -> int | None:
    if isinstance(replica.engine, EngineState) and isinstance(replica.engine.tuning, EngineTuning):
        return replica.engine.tuning.revision
    return None
