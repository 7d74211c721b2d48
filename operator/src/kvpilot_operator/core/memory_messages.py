"""What the memory loop says: the state of tuning as a reason and a sentence, and the advice that goes with trouble.

Changes nothing and decides nothing; `memory` does.
"""

from __future__ import annotations

from datetime import datetime

from kvpilot_operator.core.api_types import MemoryPolicy, TuningMode
from kvpilot_operator.core.memory_events import MemoryEvent
from kvpilot_operator.core.observation import DeploymentObservation, EngineTuning
from kvpilot_operator.core.policy import PolicyConstants
from kvpilot_operator.core.reasons import Reason
from kvpilot_operator.core.shares import EPSILON, is_same_share
from kvpilot_operator.core.tuning_memory import TuningMemory

HOST_OOM_ADVICE = (
    "the kernel killed the engine at its container's memory limit: raise spec.resources.limits.memory;"
    " the device-memory cap is not the cause and stays"
)


def explain_tuning(
    policy: MemoryPolicy,
    observation: DeploymentObservation,
    memory: TuningMemory,
    applied: int,
    now: datetime,
    constants: PolicyConstants,
) -> tuple[Reason, str]:
    """The state of tuning, the most telling reason first."""
    mode, share = policy.tuning.mode, memory.utilization
    if mode is TuningMode.DISABLED:
        return Reason.TUNING_DISABLED, f"tuning is off: {share:g} as the spec says"
    if memory.blocked_reason:
        return Reason(memory.blocked_reason), memory.blocked_message
    tunings = [(r.name, r.tuning) for r in observation.live if isinstance(r.tuning, EngineTuning)]
    for name, tuning in tunings:
        if tuning.revision == memory.revision and tuning.state == "rejected":
            return Reason.RESIZE_REJECTED, f"{name} rejected {share:g}: {tuning.reason}"
    ready = observation.num_ready
    if applied < ready:
        why = next((f": {t.reason}" for _, t in tunings if t.state == "deferred" and t.reason), "")
        return (
            Reason.APPLYING,
            f"{applied} of {ready} ready replicas run at {share:g} (revision {memory.revision}){why}",
        )
    if mode is TuningMode.ADVISE and not is_same_share(memory.recommended, share):
        return Reason.ADVISING, f"{memory.recommended:g} is recommended; {share:g} stays in force in mode Advise"
    failed = memory.lowest_failed(now, constants.failed_expiry_s)
    if failed is not None and memory.recommended > failed - constants.failed_margin + EPSILON:
        floor = memory.recommended
        return Reason.AT_MEMORY_FLOOR, f"{failed:g} ran out of memory, and the cap can't go below {floor:g}"
    return Reason.TUNED, f"{share:g} in force (revision {memory.revision})"


def tell_misfit(event: MemoryEvent, policy: MemoryPolicy, wanted: float | None, limit: float) -> str:
    """Exit 72 in numbers: what it needs, what it may have, and what would do instead."""
    parts = [event.message or "the model does not fit into its share of the device"]
    if wanted is not None and wanted > 1.0:
        parts.append("the whole device would not hold it")
    elif wanted is not None and wanted > limit + EPSILON:
        why = "memory.tuning.max is" if is_same_share(limit, policy.tuning.max) else "what failed before allows"
        parts.append(f"it needs {wanted:g} of the device, {why} {limit:g}")
    if event.suggested_max_model_len:
        parts.append(f"engine.maxModelLen {event.suggested_max_model_len} would fit")
    return "; ".join(part.rstrip(". ") for part in parts)


def tell_floor(event: MemoryEvent, share: float, floor: float) -> str:
    return (
        f"{event.pod} ran out at {share:g}, and the cap can't go below {floor:g} (weights, one request of full length,"
        f" memory.tuning.min): lower engine.maxModelLen or engine.maxNumBatchedTokens. {event.message}"
    )
