"""One server's life: listen, load, serve, drain on a signal, answer with the exit code.

The port is open from the first moment: probes, metrics and the operator get answers while the model loads. SIGTERM
turns readiness off, goes on serving (endpoints take a moment to leave the Service), then refuses what is new and lets
what runs finish, up to the deadline. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from kvpilot_engine.errors import ExitCode, SettingsError, StartupError
from kvpilot_engine.server.app_context import CONTEXT, AppContext
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.service.termination import describe_failure, write_termination
from kvpilot_engine.text.model_text import ModelText

_LOG = logging.getLogger(__name__)
FLUSH_S = 3.0
"""Seconds for handlers to write their last bytes once what they waited for has ended."""
POLL_S = 0.05


async def serve(
    engine: AsyncEngine,
    app: web.Application,
    *,
    load_text: Callable[[], ModelText],
    termination_log: Path | None,
) -> int:
    """Serve until a signal or a failure; returns the process's exit code."""
    context = app[CONTEXT]
    signals = _Signals()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=FLUSH_S)
    await runner.setup()
    try:
        await _listen(runner, context.settings.host, context.settings.port)
        _LOG.info("listening on %s", ", ".join(f"{host}:{port}" for host, port, *_ in runner.addresses))
        await engine.start()
        return await _run(engine, context, signals, load_text, termination_log)
    finally:
        engine.abort_all()
        await runner.cleanup()
        await engine.stop()
        signals.close()


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise SettingsError([f"--host {host} --port {port}: can't listen there: {error.strerror or error}"]) from error


async def _run(
    engine: AsyncEngine,
    context: AppContext,
    signals: _Signals,
    load_text: Callable[[], ModelText],
    termination_log: Path | None,
) -> int:
    loading = asyncio.create_task(_load_text(context, load_text))
    failing = asyncio.create_task(engine.wait_failed())
    stopping = asyncio.create_task(signals.wait())
    try:
        waiting = {loading, failing, stopping}
        while True:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                return failing.result().exit_code
            if loading.done() and (error := loading.exception()) is not None:
                code, termination = describe_failure(error, utilization=0.0)
                _LOG.error("the model's text could not be loaded: %s", error, exc_info=_trace_of(error))
                write_termination(termination_log, termination)
                return int(code)
            if stopping.done():
                return await _drain(engine, context, signals, failing)
            waiting.discard(loading)
    finally:
        for task in (loading, failing, stopping):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _load_text(context: AppContext, load_text: Callable[[], ModelText]) -> None:
    context.text = await asyncio.to_thread(load_text)


def _trace_of(error: BaseException) -> BaseException | None:
    return None if isinstance(error, StartupError) else error


async def _drain(engine: AsyncEngine, context: AppContext, signals: _Signals, failing: asyncio.Task[object]) -> int:
    loop = asyncio.get_running_loop()
    settings = context.settings
    started = loop.time()
    deadline = started + settings.drain_timeout_s
    # Without a loaded model, or at a terminal, nobody's late request is to be waited for.
    grace_s = settings.drain_grace_s if engine.is_ready and signals.first == signal.SIGTERM else 0.0
    refuse_at = min(started + grace_s, deadline)
    _LOG.info("draining: %d requests run", engine.num_open_requests)
    engine.begin_drain()
    is_refusing = False
    while not signals.is_impatient and not failing.done():
        now = loop.time()
        if now >= refuse_at and not is_refusing:
            is_refusing = True
            context.refuse_requests()
        if is_refusing and (context.num_calls == 0 or now >= deadline):
            break
        await asyncio.sleep(POLL_S)
    if engine.num_open_requests:
        _LOG.warning("%d requests are cut off", engine.num_open_requests)
    _LOG.info("drained in %.1f s", loop.time() - started)
    return int(ExitCode.DRAINED)


class _Signals:
    """SIGTERM and SIGINT as things to wait for."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._first_came = asyncio.Event()
        self.is_impatient = False
        """A second signal came."""
        self.first: signal.Signals | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Returns at the first signal."""
        await self._first_came.wait()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self._first_came.set()
        else:
            self.is_impatient = True
