"""How much of the device each engine may use: facts and memory in, one decision with its reason out.

Writes nothing. Only an engine's own device OOM lowers the cap, by one bounded step, once for each share that failed; a
kill by the kernel or by a neighbour's memory changes nothing. Invariants: the cap stays between `tuning.min` and
`tuning.max`, is never lowered below what the engine says it needs, and never returns to a share that failed here before
that memory expires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from kvpilot_operator.core.api_types import Device, LLMDeploymentSpec, MemoryPolicy, TuningMode
from kvpilot_operator.core.classifier import REASON_OF_ENDING, Ending
from kvpilot_operator.core.decisions import Action, Decision, Input, Loop
from kvpilot_operator.core.memory_events import MemoryEvent, collect_events
from kvpilot_operator.core.memory_messages import HOST_OOM_ADVICE, explain_tuning, tell_floor, tell_misfit
from kvpilot_operator.core.naming import content_hash
from kvpilot_operator.core.observation import (
    DeploymentObservation,
    EngineMemory,
    EngineState,
    EngineTuning,
    ReplicaObservation,
    Unknown,
)
from kvpilot_operator.core.policy import POLICY, PolicyConstants
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.shares import EPSILON, grid_down, grid_up, is_same_share
from kvpilot_operator.core.timestamps import seconds_since
from kvpilot_operator.core.tuning_memory import MAX_LEARNED, LearnedLimit, TuningMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDecision:
    """`memory` holds the new cap (`utilization`, `pods`, `revision`); write it and `handled` in one ConfigMap write."""

    memory: TuningMemory
    reason: Reason
    message: str
    applied: int
    """Ready replicas that run at this revision."""
    records: tuple[Decision, ...]

    @property
    def utilization(self) -> float:
        return self.memory.utilization


def engine_shape(spec: LLMDeploymentSpec) -> str:
    """Hash of everything in the spec that decides how much memory an engine uses at a given share."""
    engine = spec.engine
    parts: list[object] = [
        spec.model.source,
        *(engine.device, engine.dtype, engine.quantization, engine.kv_cache_dtype, engine.block_size),
        *(engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens, engine.tensor_parallel_size),
        list(engine.extra_args),
    ]
    if engine.device is Device.CPU:  # there the device is the container's memory limit
        parts.append(str(spec.resources.limits.get("memory", "")))
    return content_hash(parts)


def decide_memory(
    policy: MemoryPolicy,
    observation: DeploymentObservation,
    memory: TuningMemory | None,
    now: datetime,
    *,
    shape: str,
    constants: PolicyConstants = POLICY,
) -> MemoryDecision:
    """`memory` None: nothing is known of this object yet, tuning starts from the spec."""
    before = memory or _fresh(policy, shape)
    tuner = _Tuner(policy, observation, before, now, constants, records=[])
    events, marks = collect_events(observation, before.handled)
    if policy.tuning.mode is TuningMode.DISABLED:
        # Events count as handled all the same: switching tuning on must not act on what is long past.
        tuner.memory = replace(_fresh(policy, shape), learned=before.learned, handled=marks)
    else:
        tuner.take_over_spec(shape)
        tuner.note_success()
        tuner.memory = replace(tuner.memory, handled=marks)
        tuner.handle(events)
        tuner.note_held_engines()
    result = tuner.memory
    in_force = result.recommended if policy.tuning.mode is TuningMode.AUTO else policy.utilization
    is_changed = tuner.is_restarted or (in_force, dict(result.pods)) != (before.utilization, dict(before.pods))
    result = replace(result, utilization=in_force, revision=before.revision + 1 if is_changed else before.revision)
    applied = sum(1 for r in observation.live if r.ready and _runs_at(r, result.revision))
    reason, message = explain_tuning(policy, observation, result, applied, now, constants)
    return MemoryDecision(memory=result, reason=reason, message=message, applied=applied, records=tuple(tuner.records))


def _fresh(policy: MemoryPolicy, shape: str) -> TuningMemory:
    share = policy.utilization
    return TuningMemory(utilization=share, recommended=share, revision=1, spec_utilization=share, shape=shape)


@dataclass(slots=True)
class _Tuner:
    """One pass: `memory` is moved forward step by step, `records` grows."""

    policy: MemoryPolicy
    observation: DeploymentObservation
    memory: TuningMemory
    now: datetime
    constants: PolicyConstants
    records: list[Decision]
    is_restarted: bool = False
    """The spec was taken over anew: engines that gave up get another try, whatever the share."""

    def take_over_spec(self, shape: str) -> None:
        """An edited share or another engine shape starts tuning anew; changed bounds hold at once."""
        before, tuning = self.memory.recommended, self.policy.tuning
        is_edited = not is_same_share(self.memory.spec_utilization, self.policy.utilization)
        if is_edited or self.memory.shape != shape:
            self.is_restarted = True
            anew = replace(
                _without_failures(self.memory), shape=shape, spec_utilization=self.policy.utilization, pods={}
            )
            start = max(tuning.min, min(self.policy.utilization, anew.highest_allowed(self.now, self.constants)))
            self.memory = replace(anew, recommended=start)
            message = f"memory.utilization is now {self.policy.utilization:g}" if is_edited else "the engine changed"
            if start < self.policy.utilization - EPSILON:
                failed = anew.lowest_failed(self.now, self.constants.failed_expiry_s)
                message += f", but {failed:g} ran out of memory here before"
            self._record(Action.RESET, Reason.SPEC_CHANGED, before, f"{message}: tuning starts at {start:g}")
        elif not tuning.min <= before <= tuning.max:
            self.memory = replace(self.memory, recommended=max(tuning.min, min(before, tuning.max)))
            message = f"memory.tuning allows {tuning.min:g} to {tuning.max:g}"
            self._record(Action.RESET, Reason.SPEC_CHANGED, before, message)

    def note_success(self) -> None:
        """What runs is safe; a start that succeeded after the last failure ends a series of failures."""
        for replica in self.observation.live:
            tuning = replica.tuning
            if not replica.ready or isinstance(tuning, Unknown) or tuning.state != "applied" or tuning.utilization <= 0:
                continue
            self._learn(_device_of(replica), safe=tuning.utilization)
            failure, started = self.memory.last_failed_start, replica.started_at or replica.created_at
            is_later = failure is None or (started is not None and started > failure)
            if is_later and tuning.revision == self.memory.revision:
                self.memory = _without_failures(self.memory)

    def handle(self, events: Sequence[MemoryEvent]) -> None:
        own = [e for e in events if e.ending.is_own_device_oom]
        if own:
            self._handle_own(own)
        for event in events:
            if event.ending is Ending.DOES_NOT_FIT:
                self._handle_misfit(event)
            elif event.ending is Ending.HOST_OOM:
                self._hold(Reason.HOST_OOM_KILLED, f"{event.pod}: {HOST_OOM_ADVICE}", event)
            elif event.ending is Ending.CONTENDED:
                message = (
                    f"{event.pod}: other processes hold device memory; nothing is learned from it. {event.message}"
                )
                self._hold(Reason.DEVICE_MEMORY_CONTENDED, message, event)

    def note_held_engines(self) -> None:
        """The engine's own ledger gave up at the revision in force, and this pass has nothing better to offer."""
        if self.memory.blocked_reason or self.records:
            return
        for replica in self.observation.live:
            state = replica.engine
            if not isinstance(state, EngineState) or state.state != "held" or not state.start_failures:
                continue
            last = state.start_failures[-1]
            if last.revision == self.memory.revision:
                fits = last.reason != Reason.MODEL_DOES_NOT_FIT
                reason = Reason.OOM_UNRESOLVED if fits else Reason.MODEL_DOES_NOT_FIT
                count = len(state.start_failures)
                self._block(reason, f"{replica.name} gave up after {count} failed starts: {last.message}", None)
                return

    def _handle_own(self, events: Sequence[MemoryEvent]) -> None:
        before = self.memory.recommended
        failing = [(e, e.utilization if e.utilization is not None else before) for e in events]
        for event, share in failing:
            self._learn(event.device or self._only_device(), failed=share)
        # A share above the present one was judged when it first failed: other pods that tell of it bring nothing new.
        fresh = [(e, share) for e, share in failing if share <= before + EPSILON]
        if any(e.ending is Ending.DEVICE_OOM_AT_LOAD for e, _ in fresh):
            count = self.memory.failed_starts + 1
            self.memory = replace(self.memory, failed_starts=count, last_failed_start=self.now)
            if count >= self.constants.max_failed_starts:
                self._give_up(fresh[-1][0])
                return
        event, share = min(fresh or failing, key=lambda pair: self._target(*pair))
        target = self._target(event, share) if fresh else before
        floor = self._floor()
        target = min(before, max(floor, min(target, self.memory.highest_allowed(self.now, self.constants))))
        if target < before - EPSILON:
            self.memory = replace(self.memory, recommended=target)
            reason = REASON_OF_ENDING[event.ending]
            self._record(Action.LOWER, reason, before, f"{event.pod} ran out at {share:g}. {event.message}", event)
        elif fresh:
            self._record(Action.HOLD, Reason.AT_MEMORY_FLOOR, before, tell_floor(event, share, floor), event)

    def _target(self, event: MemoryEvent, share: float) -> float:
        """The share that the evidence asks for, a hundredth being the grid."""
        step = self.constants.memory_step
        if event.bytes_short and event.device_total_bytes:
            step = max(step, event.bytes_short / event.device_total_bytes)
        if event.suggested_utilization is not None:
            step = max(step, share - event.suggested_utilization)
        return grid_down(share - min(step, self.constants.max_memory_step))

    def _floor(self) -> float:
        memories = (replica.memory for replica in self.observation.live)
        needed = [grid_up(m.min_utilization) for m in memories if isinstance(m, EngineMemory)]
        return max([self.policy.tuning.min, *needed])

    def _give_up(self, event: MemoryEvent) -> None:
        """Stop trying: back to the last share that worked, if there is one that has not failed since."""
        before, safe, tuning = self.memory.recommended, self.memory.highest_safe, self.policy.tuning
        limit = min(tuning.max, self.memory.highest_allowed(self.now, self.constants))
        if safe is not None and tuning.min <= safe <= limit:
            self.memory = replace(self.memory, recommended=safe)
        count, kept = self.memory.failed_starts, self.memory.recommended
        message = (
            f"{count} starts in a row ran out of device memory; tuning stops and keeps {kept:g} until"
            f" spec.memory or spec.engine is changed or a start succeeds. {event.message}"
        )
        self._block(Reason.OOM_UNRESOLVED, message, event, before=before)

    def _handle_misfit(self, event: MemoryEvent) -> None:
        """The share is too small for the model: more if it may be more, else say by how much."""
        before, needed = self.memory.recommended, event.suggested_utilization
        if event.utilization is not None and event.utilization < before - EPSILON:
            return  # started at a smaller share than the present one, which is still to be tried
        limit = min(self.policy.tuning.max, self.memory.highest_allowed(self.now, self.constants))
        wanted = None if needed is None else grid_up(needed)
        if wanted is not None and before + EPSILON < wanted <= limit + EPSILON:
            self.memory = replace(self.memory, recommended=wanted, blocked_reason="", blocked_message="")
            message = f"{event.pod} does not fit into {before:g}. {event.message}"
            self._record(Action.RAISE, Reason.MODEL_DOES_NOT_FIT, before, message, event)
            return
        self._block(Reason.MODEL_DOES_NOT_FIT, tell_misfit(event, self.policy, wanted, limit), event)

    def _only_device(self) -> str:
        """A process that ended while loading told no device; where all have the same one it was that."""
        seen = {_device_of(replica) for replica in self.observation.live}
        seen |= {entry.device for entry in self.memory.learned if entry.shape == self.memory.shape}
        return next(iter(seen - {""})) if len(seen - {""}) == 1 else ""

    def _learn(self, device: str, *, safe: float | None = None, failed: float | None = None) -> None:
        known = self.memory.limit_of(device)
        entry = known or LearnedLimit(device=device, shape=self.memory.shape, safe=None, failed=None, at=self.now)
        if entry.failed is not None and seconds_since(entry.at, self.now) >= self.constants.failed_expiry_s:
            entry = replace(entry, failed=None)
        if failed is not None:
            lowest = failed if entry.failed is None else min(failed, entry.failed)
            entry = replace(entry, failed=lowest, at=self.now)
        highest = max((s for s in (safe, entry.safe) if s is not None), default=None)
        if highest is not None and (entry.failed is None or highest < entry.failed - EPSILON):
            entry = replace(entry, safe=highest)
        elif entry.safe is not None and entry.failed is not None and entry.safe >= entry.failed - EPSILON:
            entry = replace(entry, safe=None)
        if entry == known or (entry.safe is None and entry.failed is None):
            return
        others = tuple(e for e in self.memory.learned if (e.device, e.shape) != (device, self.memory.shape))
        self.memory = replace(self.memory, learned=(*others, entry)[-MAX_LEARNED:])

    def _hold(self, reason: Reason, message: str, event: MemoryEvent) -> None:
        self._record(Action.HOLD, reason, self.memory.recommended, message, event)

    def _block(self, reason: Reason, message: str, event: MemoryEvent | None, *, before: float | None = None) -> None:
        self.memory = replace(self.memory, blocked_reason=str(reason), blocked_message=message)
        start = self.memory.recommended if before is None else before
        is_kept = is_same_share(start, self.memory.recommended)
        action = Action.HOLD if is_kept else Action.RAISE if self.memory.recommended > start else Action.LOWER
        self._record(action, reason, start, message, event)

    def _record(
        self, action: Action, reason: Reason, before: float, message: str, event: MemoryEvent | None = None
    ) -> None:
        self.records.append(
            Decision(
                time=self.now,
                loop=Loop.MEMORY,
                action=action,
                reason=reason,
                before=before,
                after=self.memory.recommended,
                message=message,
                inputs=_inputs(event) | {"mode": str(self.policy.tuning.mode)},
            )
        )


def _inputs(event: MemoryEvent | None) -> dict[str, Input]:
    if event is None:
        return {}
    numbers: dict[str, Input | None] = {
        "pod": event.pod,
        "device": event.device or None,
        "utilization": event.utilization,
        "deviceTotalBytes": event.device_total_bytes,
        "requestedBytes": event.requested_bytes,
        "freeBytes": event.free_bytes,
        "suggestedUtilization": event.suggested_utilization,
        "suggestedMaxModelLen": event.suggested_max_model_len,
    }
    return {key: value for key, value in numbers.items() if value is not None}


def _without_failures(memory: TuningMemory) -> TuningMemory:
    return replace(memory, failed_starts=0, last_failed_start=None, blocked_reason="", blocked_message="")


def _device_of(replica: ReplicaObservation) -> str:
    memory = replica.memory
    return "" if isinstance(memory, Unknown) else memory.device


def _runs_at(replica: ReplicaObservation, revision: int) -> bool:
    tuning = replica.tuning
    return isinstance(tuning, EngineTuning) and tuning.revision == revision and tuning.state == "applied"
