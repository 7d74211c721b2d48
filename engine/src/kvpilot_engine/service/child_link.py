"""The parent's end of the engine child: starts the process, moves messages, tells when it is gone.

What the child sends is read on the event loop as far as it is there: with a thread for it each step would wake two.
Writes may block, so they happen on a thread. What the messages mean is not decided here.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from kvpilot_engine.service.engine_process import ChildStart, run_engine_process

READ_BYTES = 1 << 16
_SHORT_HEAD = struct.Struct("!i")
_LONG_HEAD = struct.Struct("!Q")


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
        self._writer = threading.Thread(target=self._write, args=(self._connection,), name="child-writer", daemon=True)
        self._writer.start()
        self._exit_task: asyncio.Task[None] | None = None
        self._inbox = Inbox()
        # its own descriptor: the writer's stays a blocking one
        self._source = socket.socket(fileno=os.dup(self._connection.fileno()))
        self._loop.add_reader(self._source, self._read)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, message: object) -> None:
        """Never blocks; a message to a dead child is dropped."""
        self._outbox.put(message)

    async def close(self, *, grace_s: float) -> None:
        """Wait for the child to go by itself, then kill it; all threads are gone afterwards."""
        if self._exit_task is not None:
            await self._exit_task
        await asyncio.to_thread(self._process.join, grace_s)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._outbox.put(None)
        await asyncio.to_thread(self._writer.join)
        self._loop.remove_reader(self._source)
        if self._exit_task is not None:  # it may have begun while the child ended
            await self._exit_task
        self._source.close()
        self._connection.close()
        self._process.close()

    def _read(self) -> None:
        """Take what is there; called by the event loop as long as something is."""
        try:
            data = self._source.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for message in self._inbox.take(data):
            self._on_message(message)
        if not data:
            self._loop.remove_reader(self._source)
            self._exit_task = self._loop.create_task(self._tell_exit())

    async def _tell_exit(self) -> None:
        await asyncio.to_thread(self._process.join)
        code = self._process.exitcode
        self._on_exit(-1 if code is None else code)

    def _write(self, connection: Connection) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                connection.send(message)
            except OSError:
                return  # the reader tells that the child is gone


class Inbox:
    """Whole messages out of a stream that is read in pieces.

    The other end is a `Connection`, which writes the length of each pickle before it: four bytes, or -1 and eight.
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, data: bytes) -> Iterator[object]:
        """The messages that `data` completes."""
        self._data += data
        while (span := self._first_span()) is not None:
            start, end = span
            message = pickle.loads(self._data[start:end])  # noqa: S301  our own child wrote it
            del self._data[:end]
            yield message

    def _first_span(self) -> tuple[int, int] | None:
        """Where the first message begins and ends; None while a part of it is missing."""
        start = _SHORT_HEAD.size
        if len(self._data) < start:
            return None
        (length,) = _SHORT_HEAD.unpack_from(self._data)
        if length == -1:
            if len(self._data) < start + _LONG_HEAD.size:
                return None
            (length,) = _LONG_HEAD.unpack_from(self._data, start)
            start += _LONG_HEAD.size
        return (start, start + length) if len(self._data) >= start + length else None
