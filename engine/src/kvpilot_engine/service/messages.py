"""The messages between the HTTP parent and the engine child: frozen dataclasses, pickled over one pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.memory_report import MemoryReport
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.scheduler_output import FinishReason, SequenceOutput
from kvpilot_engine.core.stats import EngineStats
from kvpilot_engine.errors import OOMCause, OOMPhase

# Parent → child


@dataclass(frozen=True, slots=True)
class AddRequest:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a sequence now and free its blocks. STOP when the parent found a stop string, ABORT when the client left."""

    request_id: RequestId
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the process; what still runs ends as ABORT."""


# Child → parent


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one step (or one command) yielded. A step that ran also says of which kind it was and how long it took."""

    outputs: tuple[SequenceOutput, ...]
    step_kind: str = ""
    """prefill | decode | mixed; empty when no step ran."""
    step_s: float = 0.0
    queue_times_s: tuple[float, ...] = ()
    """For each request that was scheduled for the first time: seconds from its arrival in the child."""
    snapshot: EngineSnapshot | None = None
    """How the engine stands after it, now and then: one message costs a wake-up less than two."""


class RefusalKind(StrEnum):
    """Why the child did not take a request."""

    NEVER_FITS = "never_fits"
    INVALID = "invalid"
    OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused:
    """The only answer to an AddRequest that the child did not admit."""

    request_id: RequestId
    kind: RefusalKind
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStatus:
    """What became of the newest revision of the tuning file."""

    revision: int = 0
    """0: no file was seen."""
    state: str = "none"
    """none | applied | deferred | rejected"""
    utilization: float = 0.0
    """The share in force."""
    requested_utilization: float = 0.0
    bytes_to_go: int = 0
    """For deferred: bytes in blocks that are still in use."""
    reason: str = ""
    """For rejected: why, with the floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OOMEvent:
    """One out-of-memory event of this process; seq counts from 1."""

    seq: int
    phase: OOMPhase
    cause: OOMCause
    utilization: float
    message: str
    survived: bool
    requested_bytes: int | None = None
    limit_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """All that the parent may tell about the child: after commands and ends, now and then while busy, and when idle."""

    sent_at: float
    """time.monotonic() of the machine; the parent derives the age from it."""
    stats: EngineStats
    memory: MemoryReport
    tuning: TuningStatus
    oom_events: tuple[OOMEvent, ...] = ()
    """The newest, at most 64."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """Duration of the newest step by kind (prefill, decode, mixed); empty when idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The model is loaded and warm: the first message of a child that can serve."""

    snapshot: EngineSnapshot
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The child's last message before it exits with exit_code; `termination` is the JSON of the termination log."""

    exit_code: int
    termination: dict[str, object]
