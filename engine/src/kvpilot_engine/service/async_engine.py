"""The engine as the HTTP parent sees it: starts the child, watches it, and knows how it is and how it ended.

What becomes of single requests is OpenRequests' part. Lives on the event loop; never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.errors import (
    DeadlineExceededError,
    ExitCode,
    OOMCause,
    OOMPhase,
    RequestAbortedError,
    UnavailableError,
)
from kvpilot_engine.service.child_link import ChildLink
from kvpilot_engine.service.engine_process import ChildStart
from kvpilot_engine.service.generation_stream import GenerationStream
from kvpilot_engine.service.kernel_oom import count_kernel_oom_kills
from kvpilot_engine.service.messages import (
    EngineSnapshot,
    Failed,
    OOMEvent,
    Ready,
    RequestRefused,
    Shutdown,
    StepOutputs,
)
from kvpilot_engine.service.oom_log import OOMLog
from kvpilot_engine.service.open_requests import OpenRequests
from kvpilot_engine.service.ports import ModelLoader
from kvpilot_engine.service.settings import ServiceSettings
from kvpilot_engine.service.start_ledger import HoldStart, StartFailure, StartLedger, decide_start
from kvpilot_engine.service.termination import build_termination, write_termination
from kvpilot_engine.service.tuning_watch import TuningFile

_LOG = logging.getLogger(__name__)
HOLD_POLL_S = 0.5
SHUTDOWN_GRACE_S = 5.0


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
        self._requests = OpenRequests(
            max_queue_len=settings.max_queue_len, max_num_seqs=settings.max_num_seqs, send=self._send
        )
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
        self._ooms = OOMLog()

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
        return self._ooms.events

    @property
    def oom_seq(self) -> int:
        return self._ooms.seq

    @property
    def oom_counts(self) -> Mapping[tuple[OOMPhase, OOMCause], int]:
        return self._ooms.counts

    @property
    def max_model_len(self) -> int:
        """0 while loading."""
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def num_open_requests(self) -> int:
        return len(self._requests)

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
        self._requests.abort_all(RequestAbortedError("the server is shutting down"))

    async def stop(self) -> None:
        """End the child; open streams end as aborted."""
        self._is_stopping = True
        for task in (self._hold_task, self._watch_task):
            if task is not None:
                task.cancel()
        self._requests.fail_all(RequestAbortedError("the server is shutting down"))
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
            if not self.is_alive and self._requests:
                _LOG.error("the engine has been silent for %.0f s; open requests end", self.snapshot_age_s or 0.0)
                self._requests.fail_all(DeadlineExceededError("the engine has stopped answering"))

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
        return self._requests.open(requests)

    def _send(self, command: object) -> None:
        if self._link is not None:
            self._link.send(command)

    # News from the child

    def _on_message(self, message: object) -> None:
        if isinstance(message, StepOutputs):
            for observe in self._on_step:
                observe(message)
            self._requests.deliver(message.outputs)
            if message.snapshot is not None:
                self._note_snapshot(message.snapshot)
        elif isinstance(message, EngineSnapshot):
            self._note_snapshot(message)
        elif isinstance(message, RequestRefused):
            self._requests.deliver_refusal(message)
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Failed):
            self._fail(message.exit_code, message.termination)

    def _note_snapshot(self, snapshot: EngineSnapshot) -> None:
        self._snapshot = snapshot
        self._ooms.note(snapshot.oom_events)

    def _on_ready(self, message: Ready) -> None:
        self._snapshot = message.snapshot
        self._max_model_len = message.max_model_len
        self._vocab_size = message.vocab_size
        self._ledger.clear()
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY
        _LOG.info("ready after %.1f s: %d blocks", self.uptime_s, message.snapshot.stats.num_blocks_total)

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
            "HostOOMKilled", message, phase=phase.value, cause=OOMCause.HOST.value, utilization=utilization
        )
        self._fail(int(code), self._ooms.note_end(termination))

    def _fail(self, exit_code: int, termination: dict[str, object]) -> None:
        if self._is_stopping or self._state is EngineState.FAILED:
            return
        self._state, self._state_reason = EngineState.FAILED, str(termination.get("reason", ""))
        if exit_code == ExitCode.DEVICE_OOM_AT_LOAD and termination.get("oom_seq") is None:
            termination = self._ooms.note_end(termination)
        self._ledger.record(exit_code, termination, revision=self._revision)
        write_termination(self._settings.termination_log, termination)
        self._requests.fail_all(RequestAbortedError(f"the engine failed: {self._state_reason}"))
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(EngineFailure(exit_code, termination))
