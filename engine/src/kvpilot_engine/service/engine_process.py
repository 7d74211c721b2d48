"""The engine child: owns EngineCore on one thread. Commands in, outputs and snapshots out, over one pipe.

No JSON, no text and no HTTP here. The child never outlives its parent: the kernel kills it when the parent's main
thread ends, and the pipe's end stops the loop besides. Every way out but the parent's death sends one `Failed` first.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from kvpilot_engine.core.capacity import ResizeState
from kvpilot_engine.core.engine_core import EngineCore
from kvpilot_engine.core.memory_report import MemoryReport, round_share_up
from kvpilot_engine.core.ports import Clock
from kvpilot_engine.core.scheduler_output import SequenceOutput
from kvpilot_engine.errors import (
    DeviceOutOfMemoryError,
    DoesNotFitError,
    InvalidRequestError,
    NeverFitsError,
    OverloadedError,
)
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
    TuningStatus,
)
from kvpilot_engine.service.observed_runner import ObservedRunner
from kvpilot_engine.service.ports import ModelLoader, ServingModel
from kvpilot_engine.service.settings import ServiceSettings
from kvpilot_engine.service.termination import describe_failure
from kvpilot_engine.service.tuning_watch import TuningFile, TuningRequest

_LOG = logging.getLogger(__name__)
HEARTBEAT_S = 0.5
"""Most seconds between two snapshots of an idle child."""
SNAPSHOT_S = 0.05
"""Most seconds between two snapshots of a busy one; what begins or ends a request is told at once."""
TUNING_POLL_S = 0.25
MEMORY_REPORT_S = 0.5
"""Least seconds between two looks at what the system counts; a step must not pay for it each time."""
KEPT_OOM_EVENTS = 64
_PR_SET_PDEATHSIG = 1


class MonotonicClock:
    def monotonic(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStart:
    """Everything the child gets at birth; picklable."""

    loader: ModelLoader
    settings: ServiceSettings
    utilization: float
    """The share to load with: decided by the parent from flag, tuning file and start ledger."""
    revision: int = 0
    """The tuning file's revision that `utilization` was decided from."""
    override_reason: str = ""
    """Why `utilization` is not the share that this revision asks for; empty when it is."""
    parent_pid: int
    configure_logging: Callable[[], None] | None = None


def run_engine_process(connection: Connection, start: ChildStart) -> None:
    """Entry point of the child process."""
    die_with_parent(start.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to the group: the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if start.configure_logging is not None:
        start.configure_logging()
    clock = MonotonicClock()
    try:
        model = start.loader.load(start.utilization)
        loop = EngineLoop(connection, model, start, clock)
    except Exception as error:  # noqa: BLE001  whatever stops a start must be told to the parent
        _leave(connection, error, utilization=start.utilization)
    else:
        _serve(connection, loop)


def _serve(connection: Connection, loop: EngineLoop) -> None:
    try:
        loop.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _LOG.warning("the parent is gone")
    except Exception as error:  # noqa: BLE001  an invariant that broke in the engine thread ends the engine
        _leave(connection, error, utilization=loop.tuning.utilization, oom_seq=loop.oom_seq)


def _leave(connection: Connection, error: Exception, *, utilization: float, oom_seq: int | None = None) -> None:
    code, termination = describe_failure(error, utilization=utilization, oom_seq=oom_seq)
    _LOG.error("engine stops with exit code %d: %s", code, error, exc_info=error if code == 70 else None)
    try:
        connection.send(Failed(exit_code=int(code), termination=termination))
    except OSError:
        _LOG.warning("the parent is gone")
    sys.exit(int(code))


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent's main thread ends (Linux; elsewhere the pipe's end does)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        _LOG.warning("PR_SET_PDEATHSIG was refused: errno %d", ctypes.get_errno())
    if os.getppid() != parent_pid:  # it died before the call
        sys.exit(1)


class EngineLoop:
    """drain commands → follow the tuning file → step → send. Built and used by one thread."""

    def __init__(self, connection: Connection, model: ServingModel, start: ChildStart, clock: Clock) -> None:
        self._connection = connection
        # `Connection.poll` builds a selector at each call, and that is asked before every step
        self._commands = select.poll()
        self._commands.register(connection.fileno(), select.POLLIN)
        self._model = model
        self._clock = clock
        self._runner = ObservedRunner(model.runner, clock)
        # The door (AsyncEngine) bounds the queue, counting free places of the batch too; between two steps all of
        # what it let in waits here at once.
        scheduler = replace(model.scheduler, max_queue_len=model.scheduler.max_queue_len + model.scheduler.max_num_seqs)
        self._core = EngineCore(
            self._runner,
            num_blocks=model.num_blocks,
            cache=model.cache,
            scheduler=scheduler,
            model=model.cache_key,
            constraints=model.constraints,
        )
        self._stopping = False
        self._oom_events: deque[OOMEvent] = deque(maxlen=KEPT_OOM_EVENTS)
        self.oom_seq = 0
        self._snapshot_at = float("-inf")
        self._memory_at = float("-inf")
        self._memory: MemoryReport | None = None
        self._tuning_file = TuningFile(
            start.settings.tuning_file, pod_uid=start.settings.pod_uid, device=start.loader.device_name
        )
        self._tuning_at = self._clock.monotonic()
        self.tuning = TuningStatus(utilization=start.utilization, requested_utilization=start.utilization)
        self._put_in_force(start.utilization)
        self._note_start(start)

    def _put_in_force(self, utilization: float) -> None:
        """Serve with the share's blocks only, or not at all: a share that is not in force is no cap."""
        num_blocks = self._model.usable_blocks_at(utilization)
        result = self._core.resize(num_blocks)
        if result.state is not ResizeState.REJECTED:
            return
        memory = self._report_memory()
        suggested: dict[str, float | int] = {}
        if memory.min_utilization <= 1.0:
            suggested["utilization"] = round_share_up(memory.min_utilization)
        if num_blocks:
            suggested["max_model_len"] = num_blocks * self._model.cache.block_size
        raise DoesNotFitError(
            f"a share of {utilization:g} gives too little for the KV cache: {result.reason}",
            required_bytes=round(memory.min_utilization * memory.device_total_bytes),
            available_bytes=memory.limit_bytes,
            suggested=suggested,
        )

    def _note_start(self, start: ChildStart) -> None:
        """The parent has followed the file already; here its revision is only acknowledged (or seen to have moved)."""
        request = self._tuning_file.poll()
        if request is None:
            return
        if start.override_reason and request.revision == start.revision and not request.problem:
            self.tuning = TuningStatus(
                revision=request.revision,
                state="rejected",
                utilization=start.utilization,
                requested_utilization=request.utilization or start.utilization,
                reason=start.override_reason,
            )
        else:
            self._apply(request)

    def run(self) -> None:
        snapshot = self._take_snapshot()
        self._connection.send(
            Ready(
                snapshot=snapshot,
                max_model_len=self._model.scheduler.max_model_len,
                vocab_size=self._model.vocab_size,
            )
        )
        while not self._stopping:
            refused = self._drain_commands()
            changed = self._follow_tuning()
            outputs = self._step()
            self._send(outputs, refused, is_news=changed)

    # Commands

    def _drain_commands(self) -> list[RequestRefused] | None:
        """Take everything that is there, waiting a moment only when idle. None: nothing came."""
        timeout_s = 0.0 if self._core.has_work else min(TUNING_POLL_S, HEARTBEAT_S)
        refused: list[RequestRefused] | None = None
        while self._commands.poll(1000 * timeout_s):
            timeout_s = 0.0
            refused = refused or []
            command = self._connection.recv()
            if isinstance(command, AddRequest):
                refusal = self._add(command)
                if refusal is not None:
                    refused.append(refusal)
            elif isinstance(command, AbortRequest):
                self._runner.forget(command.request_id)
                self._core.abort(command.request_id, command.reason)
            elif isinstance(command, Shutdown):
                self._stopping = True
                break
        return refused

    def _add(self, command: AddRequest) -> RequestRefused | None:
        request_id = command.request.request_id
        try:
            self._core.add_request(command.request)
        except NeverFitsError as error:
            return RequestRefused(
                request_id=request_id, kind=RefusalKind.NEVER_FITS, message=str(error), param=error.param
            )
        except InvalidRequestError as error:
            return RequestRefused(
                request_id=request_id, kind=RefusalKind.INVALID, message=str(error), param=error.param
            )
        except OverloadedError as error:
            return RequestRefused(request_id=request_id, kind=RefusalKind.OVERLOADED, message=str(error))
        self._runner.note_arrival(request_id)
        return None

    # Step

    def _step(self) -> tuple[SequenceOutput, ...]:
        self._runner.reset()
        if not self._core.has_work:
            return ()
        try:
            outputs = tuple(self._core.step())
            self._log_preemptions()
            return outputs
        except DeviceOutOfMemoryError as error:
            self.oom_seq += 1
            self._oom_events.append(
                OOMEvent(
                    seq=self.oom_seq,
                    phase=error.phase,
                    cause=error.cause,
                    utilization=self.tuning.utilization,
                    message=str(error),
                    survived=False,
                    requested_bytes=error.requested_bytes,
                    limit_bytes=error.limit_bytes,
                    free_bytes=error.free_bytes,
                )
            )
            self._log_preemptions()
            self._connection.send(self._take_snapshot())
            raise

    def _log_preemptions(self) -> None:
        for preemption in self._core.preempted:
            _LOG.info(
                "request %s preempted for want of KV blocks: %d computed tokens lost, preemption %d of this request",
                preemption.request_id,
                preemption.num_lost_tokens,
                preemption.num_preemptions,
            )

    # Tuning

    def _follow_tuning(self) -> bool:
        """Poll the file now and then; finish a deferred change as soon as its blocks are free. True: news."""
        now = self._clock.monotonic()
        before = self.tuning
        if now - self._tuning_at >= TUNING_POLL_S:
            self._tuning_at = now
            request = self._tuning_file.poll()
            if request is not None:
                self._apply(request)
        if self.tuning.state == "deferred":
            self._note_progress(self.tuning.revision, self.tuning.requested_utilization)
        return self.tuning != before

    def _apply(self, request: TuningRequest) -> None:
        if request.problem:
            self._reject(request, self.tuning.utilization, request.problem)
            return
        wanted = request.utilization if request.utilization is not None else self.tuning.utilization
        floor = self._report_memory().min_utilization
        if wanted < floor:
            self._reject(
                request, wanted, f"{wanted:g} is below {floor:g}, the least that holds one request of full length"
            )
            return
        result = self._core.resize(self._model.usable_blocks_at(wanted))
        if result.state is ResizeState.REJECTED:
            self._reject(request, wanted, result.reason)
            return
        self._note_progress(request.revision, wanted)
        _LOG.info("tuning revision %d: utilization %g %s", request.revision, wanted, self.tuning.state)

    def _note_progress(self, revision: int, wanted: float) -> None:
        num_to_go = self._core.num_blocks_to_go
        self.tuning = TuningStatus(
            revision=revision,
            state="deferred" if num_to_go else "applied",
            utilization=wanted,
            requested_utilization=wanted,
            bytes_to_go=num_to_go * self._report_memory().kv_bytes_per_block,
        )
        self._memory_at = float("-inf")

    def _reject(self, request: TuningRequest, wanted: float, reason: str) -> None:
        _LOG.warning("tuning revision %d rejected: %s", request.revision, reason)
        self.tuning = TuningStatus(
            revision=request.revision,
            state="rejected",
            utilization=self.tuning.utilization,
            requested_utilization=wanted,
            reason=reason,
        )

    # Telling

    def _send(
        self, outputs: tuple[SequenceOutput, ...], refused: list[RequestRefused] | None, *, is_news: bool
    ) -> None:
        has_ended = False
        for output in outputs:
            if output.finish_reason is not None:
                has_ended = True
                self._runner.forget(output.request_id)
        for refusal in refused or ():
            self._connection.send(refusal)
        stepped = bool(outputs) or bool(self._runner.step_kind)
        silent_s = self._clock.monotonic() - self._snapshot_at
        is_due = silent_s >= (SNAPSHOT_S if stepped else HEARTBEAT_S)
        snapshot = self._take_snapshot() if has_ended or is_news or refused is not None or is_due else None
        if stepped:
            self._connection.send(
                StepOutputs(
                    outputs, self._runner.step_kind, self._runner.step_s, tuple(self._runner.queue_times_s), snapshot
                )
            )
        elif snapshot is not None:
            self._connection.send(snapshot)

    def _take_snapshot(self) -> EngineSnapshot:
        now = self._clock.monotonic()
        self._snapshot_at = now
        return EngineSnapshot(
            sent_at=now,
            stats=self._core.stats(),
            memory=self._report_memory(),
            tuning=self.tuning,
            oom_events=tuple(self._oom_events),
            step_seconds={self._runner.step_kind: self._runner.step_s} if self._runner.step_kind else {},
        )

    def _report_memory(self) -> MemoryReport:
        now = self._clock.monotonic()
        stats = self._core.stats()
        if self._memory is None or now - self._memory_at >= MEMORY_REPORT_S:
            self._memory = self._model.memory_report(
                utilization=self.tuning.utilization,
                num_usable_blocks=stats.num_blocks_total,
                num_used_blocks=stats.num_blocks_used,
            )
            self._memory_at = now
        return replace(self._memory, kv_used_bytes=stats.num_blocks_used * self._memory.kv_bytes_per_block)
