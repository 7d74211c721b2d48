"""The engine as the HTTP parent sees it: starts and watches the child, hands requests over, fans outputs back in.

Invariant: every request that `generate` took ends in exactly one of: a finish reason, one abort command, or an error
delivered to its stream (refused by the child, fault, child gone). Lives on the event loop; never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.scheduler_output import FinishReason
from kvpilot_engine.errors import (
    DeadlineExceededError,
    EngineError,
    ExitCode,
    InvalidRequestError,
    NeverFitsError,
    OOMCause,
    OOMPhase,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)
from kvpilot_engine.service.child_link import ChildLink
from kvpilot_engine.service.engine_process import KEPT_OOM_EVENTS, ChildStart
from kvpilot_engine.service.generation_stream import GenerationStream
from kvpilot_engine.service.kernel_oom import count_kernel_oom_kills
from kvpilot_engine.service.messages import (
    AbortRequest,
    AddRequest,
    EngineSnapshot,
    Failed,
    OOMEvent,
    Ready,
    RefusalKind,
    RequestRefused,
    Shutdown,
    StepOutputs,
)
from kvpilot_engine.service.ports import ModelLoader
from kvpilot_engine.service.settings import ServiceSettings
from kvpilot_engine.service.start_ledger import HoldStart, StartFailure, StartLedger, decide_start
from kvpilot_engine.service.termination import build_termination, write_termination
from kvpilot_engine.service.tuning_watch import TuningFile

_LOG = logging.getLogger(__name__)
HOLD_POLL_S = 0.5
SHUTDOWN_GRACE_S = 5.0
RETRY_AFTER_S = 2


class EngineState(StrEnum):
    """`state` of /engine/state."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    HELD = "held"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The end of a child that should have lived: what the process exits with."""

    exit_code: int
    termination: dict[str, object]


class AsyncEngine:
    """One child at a time. `start` must be called on the main thread's event loop."""

    def __init__(
        self,
        loader: ModelLoader,
        settings: ServiceSettings,
        *,
        configure_child_logging: Callable[[], None] | None = None,
    ) -> None:
        self._loader = loader
        self._settings = settings
        self._configure_child_logging = configure_child_logging
        self._on_step: list[Callable[[StepOutputs], None]] = []
        self._ledger = StartLedger(settings.state_dir)
        self._link: ChildLink | None = None
        self._streams: dict[RequestId, GenerationStream] = {}
        self._unstarted: set[RequestId] = set()
        self._state = EngineState.LOADING
        self._state_reason = ""
        self._snapshot: EngineSnapshot | None = None
        self._max_model_len = 0
        self._vocab_size = 0
        self._started_at = time.monotonic()
        self._revision = 0
        self._kernel_kills: int | None = None
        self._start_utilization = settings.gpu_memory_utilization
        self._failure: asyncio.Future[EngineFailure] | None = None
        self._hold_task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._watch_task: asyncio.Task[None] | None = None
        self._oom_events: deque[OOMEvent] = deque(maxlen=KEPT_OOM_EVENTS)
        self._oom_counts: Counter[tuple[OOMPhase, OOMCause]] = Counter()
        self._oom_seq = 0

    # What it tells

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def state_reason(self) -> str:
        return self._state_reason

    @property
    def snapshot(self) -> EngineSnapshot | None:
        """The newest one; None before the model is loaded."""
        return self._snapshot

    @property
    def snapshot_age_s(self) -> float | None:
        return None if self._snapshot is None else max(0.0, time.monotonic() - self._snapshot.sent_at)

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def start_failures(self) -> tuple[StartFailure, ...]:
        return self._ledger.failures

    @property
    def oom_events(self) -> tuple[OOMEvent, ...]:
        """The newest, oldest first."""
        return tuple(self._oom_events)

    @property
    def oom_seq(self) -> int:
        return self._oom_seq

    @property
    def oom_counts(self) -> Mapping[tuple[OOMPhase, OOMCause], int]:
        return self._oom_counts

    @property
    def max_model_len(self) -> int:
        """0 while loading."""
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    @property
    def child_pid(self) -> int | None:
        return None if self._link is None else self._link.pid

    @property
    def is_alive(self) -> bool:
        """False when the child is dead or has been silent for step_timeout_s; an idle child sends heartbeats."""
        if self._state is EngineState.FAILED:
            return False
        age = self.snapshot_age_s
        return age is None or age <= self._settings.step_timeout_s

    @property
    def is_ready(self) -> bool:
        return self._state is EngineState.READY and self.is_alive

    def subscribe(self, on_step: Callable[[StepOutputs], None]) -> None:
        """Call `on_step` with each step's news, before the streams get theirs."""
        self._on_step.append(on_step)

    # Life

    async def start(self) -> None:
        """Load the model in a child, or hold when too many starts failed. Returns at once."""
        self._failure = asyncio.get_running_loop().create_future()
        self._watch_task = asyncio.create_task(self._watch_heartbeat())
        if not self._try_start():
            self._hold_task = asyncio.create_task(self._wait_for_revision())

    async def wait_failed(self) -> EngineFailure:
        """Returns when the child ended without being told to."""
        if self._failure is None:
            raise RuntimeError("the engine was not started")
        return await asyncio.shield(self._failure)

    def begin_drain(self) -> None:
        """Not ready any more; requests are still taken until refuse_requests()."""
        if self._state in (EngineState.LOADING, EngineState.READY, EngineState.HELD):
            self._state = EngineState.DRAINING

    def abort_all(self) -> None:
        """End every open request as aborted: the drain's deadline is over."""
        for request_id, stream in tuple(self._streams.items()):
            self._abort(request_id, FinishReason.ABORT)
            stream.put(RequestAbortedError("the server is shutting down"))

    async def stop(self) -> None:
        """End the child; open streams end as aborted."""
        self._is_stopping = True
        for task in (self._hold_task, self._watch_task):
            if task is not None:
                task.cancel()
        self._fail_streams(RequestAbortedError("the server is shutting down"))
        if self._link is not None:
            self._link.send(Shutdown())
            await self._link.close(grace_s=SHUTDOWN_GRACE_S if self._max_model_len else 0.0)
            self._link = None

    def _try_start(self) -> bool:
        tuning_file = TuningFile(
            self._settings.tuning_file, pod_uid=self._settings.pod_uid, device=self._loader.device_name
        )
        request = tuning_file.poll()
        wanted = self._settings.gpu_memory_utilization
        if request is not None:
            self._revision = request.revision
            wanted = request.utilization if request.utilization is not None else wanted
        decision = decide_start(self._ledger.failures, wanted, self._revision)
        if isinstance(decision, HoldStart):
            if self._state is not EngineState.HELD:
                _LOG.error("held, not started: %s", decision.reason)
            self._state, self._state_reason = EngineState.HELD, "OOMUnresolved"
            return False
        self._state, self._state_reason = EngineState.LOADING, ""
        self._kernel_kills = count_kernel_oom_kills()
        self._start_utilization = decision.utilization
        start = ChildStart(
            loader=self._loader,
            settings=self._settings,
            utilization=decision.utilization,
            revision=self._revision,
            override_reason=decision.override_reason,
            parent_pid=os.getpid(),
            configure_logging=self._configure_child_logging,
        )
        self._link = ChildLink(start, on_message=self._on_message, on_exit=self._on_exit)
        return True

    async def _wait_for_revision(self) -> None:
        while not self._is_stopping:
            await asyncio.sleep(HOLD_POLL_S)
            if self._state is EngineState.HELD and self._try_start():
                return

    async def _watch_heartbeat(self) -> None:
        """A child that fell silent keeps no client waiting: its streams end with an error, once."""
        while not self._is_stopping:
            await asyncio.sleep(min(1.0, self._settings.step_timeout_s / 4))
            if not self.is_alive and self._streams:
                _LOG.error("the engine has been silent for %.0f s; open requests end", self.snapshot_age_s or 0.0)
                self._fail_streams(DeadlineExceededError("the engine has stopped answering"))

    # Requests

    def require_available(self) -> None:
        """Raise UnavailableError unless requests are taken now."""
        if (
            self._link is None
            or not self._max_model_len
            or self._state not in (EngineState.READY, EngineState.DRAINING)
        ):
            raise UnavailableError(f"the engine is {self._state.value}")

    def generate(self, requests: Collection[GenerationRequest]) -> GenerationStream:
        """Take all of the requests or none. Raises UnavailableError, OverloadedError or InvalidRequestError at once."""
        self.require_available()
        assert self._link is not None
        if len(requests) > self._settings.max_queue_len + self._settings.max_num_seqs:
            raise InvalidRequestError(
                f"{len(requests)} choices in one call; at most "
                f"{self._settings.max_queue_len + self._settings.max_num_seqs} can ever be queued and run",
                param="n",
            )
        num_started = len(self._streams) - len(self._unstarted)
        limit = self._settings.max_queue_len + max(0, self._settings.max_num_seqs - num_started)
        if len(self._unstarted) + len(requests) > limit:
            raise OverloadedError(
                f"{len(self._unstarted)} requests are waiting and {len(requests)} more would pass the limit of "
                f"{self._settings.max_queue_len} in the queue",
                retry_after_s=RETRY_AFTER_S,
            )
        stream = GenerationStream([request.request_id for request in requests], abort=self._abort)
        for request in requests:
            self._streams[request.request_id] = stream
            self._unstarted.add(request.request_id)
            self._link.send(AddRequest(request))
        return stream

    def _abort(self, request_id: RequestId, reason: FinishReason) -> None:
        if self._forget(request_id) is not None and self._link is not None:
            self._link.send(AbortRequest(request_id, reason))

    def _forget(self, request_id: RequestId) -> GenerationStream | None:
        self._unstarted.discard(request_id)
        return self._streams.pop(request_id, None)

    def _fail_streams(self, error: EngineError) -> None:
        for request_id in tuple(self._streams):
            stream = self._forget(request_id)
            if stream is not None:
                stream.put(error)

    # News from the child

    def _on_message(self, message: object) -> None:
        if isinstance(message, StepOutputs):
            self._on_outputs(message)
        elif isinstance(message, EngineSnapshot):
            self._snapshot = message
            for event in message.oom_events:
                self._note_oom(event)
        elif isinstance(message, RequestRefused):
            stream = self._forget(message.request_id)
            if stream is not None:
                stream.put(_refusal_error(message))
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Failed):
            self._fail(message.exit_code, message.termination)

    def _on_outputs(self, message: StepOutputs) -> None:
        for observe in self._on_step:
            observe(message)
        for output in message.outputs:
            self._unstarted.discard(output.request_id)
            ended = output.finish_reason is not None
            stream = self._forget(output.request_id) if ended else self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def _on_ready(self, message: Ready) -> None:
        self._snapshot = message.snapshot
        self._max_model_len = message.max_model_len
        self._vocab_size = message.vocab_size
        self._ledger.clear()
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY
        _LOG.info("ready after %.1f s: %d blocks", self.uptime_s, message.snapshot.stats.num_blocks_total)

    def _note_oom(self, event: OOMEvent) -> None:
        """Count an event once: snapshots repeat the newest ones."""
        if event.seq > self._oom_seq:
            self._oom_seq = event.seq
            self._oom_events.append(event)
            self._oom_counts[event.phase, event.cause] += 1

    def _on_exit(self, code: int) -> None:
        if self._is_stopping or self._state is EngineState.FAILED:
            return
        if code == -signal.SIGKILL and self._was_killed_for_host_memory():
            self._fail_for_host_memory()
            return
        message = f"the engine child ended {f'by signal {-code}' if code < 0 else f'with code {code}'}"
        _LOG.error("%s", message)
        self._fail(
            int(ExitCode.INTERNAL), build_termination("InternalError", message, utilization=self._start_utilization)
        )

    def _was_killed_for_host_memory(self) -> bool:
        before, now = self._kernel_kills, count_kernel_oom_kills()
        return before is not None and now is not None and now > before

    def _fail_for_host_memory(self) -> None:
        """The kernel's OOM killer took the child: more host memory is needed, the share is not to blame."""
        is_loading = not self._max_model_len
        code = ExitCode.DEVICE_OOM_AT_LOAD if is_loading else ExitCode.DEVICE_OOM_SERVING
        snapshot = self._snapshot
        utilization = self._start_utilization if snapshot is None else snapshot.tuning.utilization
        message = "the kernel's OOM killer ended the engine child: the container's memory limit is too small"
        _LOG.error("%s", message)
        phase = OOMPhase.LOAD if is_loading else OOMPhase.DECODE
        termination = build_termination(
            "HostOOMKilled",
            message,
            phase=phase.value,
            cause=OOMCause.HOST.value,
            utilization=utilization,
            oom_seq=self._oom_seq + 1,
        )
        self._note_oom(_oom_event_of(termination, seq=self._oom_seq + 1))
        self._fail(int(code), termination)

    def _fail(self, exit_code: int, termination: dict[str, object]) -> None:
        if self._is_stopping or self._state is EngineState.FAILED:
            return
        self._state, self._state_reason = EngineState.FAILED, str(termination.get("reason", ""))
        if exit_code == ExitCode.DEVICE_OOM_AT_LOAD and termination.get("oom_seq") is None:
            self._note_oom(_oom_event_of(termination, seq=self._oom_seq + 1))
            termination = {**termination, "oom_seq": self._oom_seq}
        self._ledger.record(exit_code, termination, revision=self._revision)
        write_termination(self._settings.termination_log, termination)
        self._fail_streams(RequestAbortedError(f"the engine failed: {self._state_reason}"))
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(EngineFailure(exit_code, termination))


def _oom_event_of(termination: Mapping[str, object], *, seq: int) -> OOMEvent:
    """An OOM while loading is known from the child's last words alone."""

    def size_of(key: str) -> int | None:
        value = termination.get(key)
        return value if isinstance(value, int) else None

    utilization = termination.get("utilization")
    return OOMEvent(
        seq=seq,
        phase=OOMPhase(str(termination["phase"])),
        cause=OOMCause(str(termination["cause"])),
        utilization=utilization if isinstance(utilization, float) else 0.0,
        message=str(termination.get("message", "")),
        survived=False,
        requested_bytes=size_of("requested_bytes"),
        limit_bytes=size_of("limit_bytes"),
        free_bytes=size_of("free_bytes"),
    )


def _refusal_error(refused: RequestRefused) -> EngineError:
    build: dict[RefusalKind, Callable[[str], EngineError]] = {
        RefusalKind.NEVER_FITS: partial(NeverFitsError, param=refused.param),
        RefusalKind.INVALID: partial(InvalidRequestError, param=refused.param),
        RefusalKind.OVERLOADED: partial(OverloadedError, retry_after_s=RETRY_AFTER_S),
    }
    return build[refused.kind](refused.message)
