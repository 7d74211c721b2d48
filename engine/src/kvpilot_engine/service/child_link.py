"""The parent's end of the engine child: starts the process, moves messages on two threads, tells when it is gone.

Pipe reads and writes block, so neither happens on the event loop. What the messages mean is not decided here.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from kvpilot_engine.service.engine_process import ChildStart, run_engine_process


class ChildLink:
    """Built on the event loop in the main thread: the kernel ends the child with the thread that forked it."""

    def __init__(
        self, start: ChildStart, *, on_message: Callable[[object], None], on_exit: Callable[[int], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_exit = on_exit
        self._outbox: queue.SimpleQueue[object | None] = queue.SimpleQueue()
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe(duplex=True)
        self._process: SpawnProcess = context.Process(
            target=run_engine_process, args=(child_end, start), name="kvpilot-engine-child"
        )
        self._process.start()
        child_end.close()
        self._reader = threading.Thread(target=self._read, args=(self._connection,), name="child-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, args=(self._connection,), name="child-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, message: object) -> None:
        """Never blocks; a message to a dead child is dropped."""
        self._outbox.put(message)

    async def close(self, *, grace_s: float) -> None:
        """Wait for the child to go by itself, then kill it; all threads are gone afterwards."""
        await asyncio.to_thread(self._process.join, grace_s)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._outbox.put(None)
        await asyncio.to_thread(self._reader.join)
        await asyncio.to_thread(self._writer.join)
        self._connection.close()
        self._process.close()

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                self._call(self._on_message, connection.recv())
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            self._call(self._on_exit, -1 if code is None else code)

    def _write(self, connection: Connection) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                connection.send(message)
            except OSError:
                return  # the reader tells that the child is gone

    def _call(self, callback: Callable[[Any], None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            return  # the event loop has ended: nobody is left to be told
