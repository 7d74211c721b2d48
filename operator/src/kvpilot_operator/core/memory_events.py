"""Memory trouble of the pods as events, each told once: what engines report and how containers ended.

Judges no cap (`memory` does). An event is known by pod UID, run of the container and the engine's sequence number; per
pod only the highest are kept, so that the list stays short. Invariant: an event at or below its pod's mark is never
told again, also when the same OOM comes twice, first from the living engine and then in its last words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvpilot_operator.core.classifier import Ending, classify, parse_termination_message
from kvpilot_operator.core.observation import (
    DeploymentObservation,
    EngineMemory,
    EngineOOM,
    EngineState,
    OOMPhase,
    ReplicaObservation,
    Termination,
)

MAX_MARKS = 64
_MEMORY_ENDINGS = frozenset(
    {Ending.DEVICE_OOM_AT_LOAD, Ending.DEVICE_OOM_SERVING, Ending.DOES_NOT_FIT, Ending.CONTENDED, Ending.HOST_OOM}
)
_BY_CAUSE: Mapping[str, Ending] = {"neighbour": Ending.CONTENDED, "host": Ending.HOST_OOM}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandledMark:
    """How far the events of one pod were handled. -1: none yet."""

    pod_uid: str
    run: int = 0
    """Run of the container that `seq` belongs to: the engine counts anew in each."""
    seq: int = -1
    ended_run: int = -1
    """The last run whose end was handled."""

    def to_dict(self) -> dict[str, object]:
        return {"pod": self.pod_uid, "run": self.run, "seq": self.seq, "endedRun": self.ended_run}

    def covers(self, run: int, seq: int) -> bool:
        return (run, seq) <= (self.run, self.seq)


def parse_mark(raw: object) -> HandledMark | None:
    """None for what is not a mark."""
    if not isinstance(raw, Mapping) or not raw.get("pod"):
        return None
    run, seq, ended_run = (raw.get(key, -1) for key in ("run", "seq", "endedRun"))
    if not (isinstance(run, int) and isinstance(seq, int) and isinstance(ended_run, int)):
        return None
    return HandledMark(pod_uid=str(raw["pod"]), run=run, seq=seq, ended_run=ended_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """One event. Numbers that nobody told are None."""

    pod: str
    pod_uid: str
    ending: Ending
    message: str
    survived: bool = False
    utilization: float | None = None
    device: str = ""
    device_total_bytes: int | None = None
    requested_bytes: int | None = None
    free_bytes: int | None = None
    suggested_utilization: float | None = None
    suggested_max_model_len: int | None = None

    @property
    def bytes_short(self) -> int | None:
        if self.requested_bytes is None:
            return None
        return max(0, self.requested_bytes - (self.free_bytes or 0))


def collect_events(
    observation: DeploymentObservation, marks: Sequence[HandledMark]
) -> tuple[tuple[MemoryEvent, ...], tuple[HandledMark, ...]]:
    """The events that were not handled yet, and the marks once they are."""
    by_uid = {mark.pod_uid: mark for mark in marks}
    events: list[MemoryEvent] = []
    for replica in observation.replicas:
        before = by_uid.get(replica.uid, HandledMark(pod_uid=replica.uid))
        new, after = _events_of(replica, before)
        events.extend(new)
        if after != before:
            by_uid.pop(replica.uid, None)  # the freshest go last
            by_uid[replica.uid] = after
    return tuple(events), _bounded(tuple(by_uid.values()), observation)


def handled_seq(marks: Sequence[HandledMark], pod_uid: str, run: int) -> int:
    """The engine's last handled sequence number in this run; 0 when it should tell all."""
    return next((max(0, m.seq) for m in marks if m.pod_uid == pod_uid and m.run == run), 0)


def _events_of(replica: ReplicaObservation, mark: HandledMark) -> tuple[list[MemoryEvent], HandledMark]:
    events: list[MemoryEvent] = []
    ended = replica.last_termination
    # The end first: it belongs to an earlier run than what the living engine tells.
    if ended is not None:
        run = replica.restart_count if ended.run is None else ended.run
        if run > mark.ended_run:
            report = parse_termination_message(ended.message)
            told = report.oom_seq is not None and report.oom_seq > 0 and mark.covers(run, report.oom_seq)
            event = None if told else _event_of_end(replica, ended)
            if event is not None:
                events.append(event)
            mark = replace(mark, ended_run=run)
            if report.oom_seq is not None and not mark.covers(run, report.oom_seq):
                mark = replace(mark, run=run, seq=report.oom_seq)
    if isinstance(replica.engine, EngineState):
        for oom in sorted(replica.engine.oom_events, key=lambda e: e.seq):
            if not mark.covers(replica.restart_count, oom.seq):
                events.append(_event_of_engine(replica, oom))
                mark = replace(mark, run=replica.restart_count, seq=oom.seq)
    return events, mark


def _event_of_end(replica: ReplicaObservation, ended: Termination) -> MemoryEvent | None:
    ending = classify(ended, pod_reason=replica.pod_reason)
    if ending not in _MEMORY_ENDINGS:
        return None
    report = parse_termination_message(ended.message)
    device, total = _device(replica)
    if total is None and report.limit_bytes and report.utilization:
        total = round(report.limit_bytes / report.utilization)
    return MemoryEvent(
        pod=replica.name,
        pod_uid=replica.uid,
        ending=ending,
        message=report.message,
        utilization=report.utilization,
        device=device,
        device_total_bytes=total,
        requested_bytes=report.requested_bytes,
        free_bytes=report.free_bytes,
        suggested_utilization=report.suggested_utilization,
        suggested_max_model_len=report.suggested_max_model_len,
    )


def _event_of_engine(replica: ReplicaObservation, oom: EngineOOM) -> MemoryEvent:
    at_load = oom.phase in (OOMPhase.LOAD, OOMPhase.WARMUP)
    own = Ending.DEVICE_OOM_AT_LOAD if at_load else Ending.DEVICE_OOM_SERVING
    device, total = _device(replica)
    if total is None and oom.limit_bytes and oom.utilization:
        total = round(oom.limit_bytes / oom.utilization)
    return MemoryEvent(
        pod=replica.name,
        pod_uid=replica.uid,
        # A cause that we don't know is nobody's fault that we could prove: it must not lower the cap.
        ending=own if oom.cause == "own" else _BY_CAUSE.get(oom.cause, Ending.CONTENDED),
        message=oom.message,
        survived=oom.survived,
        utilization=oom.utilization or None,
        device=device,
        device_total_bytes=total,
        requested_bytes=oom.requested_bytes,
        free_bytes=oom.free_bytes,
    )


def _device(replica: ReplicaObservation) -> tuple[str, int | None]:
    memory = replica.memory
    return (memory.device, memory.device_total_bytes or None) if isinstance(memory, EngineMemory) else ("", None)


def _bounded(marks: tuple[HandledMark, ...], observation: DeploymentObservation) -> tuple[HandledMark, ...]:
    """Marks of pods that are gone make room first: a living pod's must stay, or its last end would be told again."""
    excess = len(marks) - MAX_MARKS
    if excess <= 0:
        return marks
    seen = {replica.uid for replica in observation.replicas}
    gone = [m for m in marks if m.pod_uid not in seen][:excess]
    kept = tuple(m for m in marks if m not in gone)
    return kept[-MAX_MARKS:]
