"""The outputs of one API call: one or more requests merged into one async iterator.

Whatever way the consumer leaves, each request that has not ended is aborted exactly once, and one that has ended never.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.scheduler_output import FinishReason, SequenceOutput
from kvpilot_engine.errors import EngineError, InvalidRequestError, ModelExecutionError, RequestAbortedError


class GenerationStream:
    """Use it as an async context manager around `async for`. Single consumer, on the event loop."""

    def __init__(self, request_ids: Iterable[RequestId], *, abort: Callable[[RequestId, FinishReason], None]) -> None:
        self._open = set(request_ids)
        self._abort = abort
        self._items: deque[SequenceOutput | EngineError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SequenceOutput:
        """The next news of any of the requests; raises when the engine ended one of them by a fault or an abort."""
        while True:
            if not self._open and not self._items:
                raise StopAsyncIteration
            await self._wait()
            output = self._accept(self._items.popleft())
            if output is not None:
                return output

    async def next_batch(self) -> list[SequenceOutput]:
        """All news that is there, waiting for the first; empty when all requests have ended. Raises as `__anext__`."""
        batch: list[SequenceOutput] = []
        while not batch and (self._open or self._items):
            await self._wait()
            while self._items:
                if batch and _is_failure(self._items[0]):
                    return batch  # what came before it is told first
                output = self._accept(self._items.popleft())
                if output is not None:
                    batch.append(output)
        return batch

    async def _wait(self) -> None:
        """Returns when there is an item."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _accept(self, item: SequenceOutput | EngineError) -> SequenceOutput | None:
        if isinstance(item, EngineError):
            raise item
        if item.request_id not in self._open:
            return None  # computed before the engine saw our finish()
        if item.finish_reason is not None:
            self._open.discard(item.request_id)
        if item.finish_reason is FinishReason.ERROR:
            if item.is_refusal:
                raise InvalidRequestError(item.message)
            raise ModelExecutionError(item.message or "the engine could not go on with this request")
        if item.finish_reason is FinishReason.ABORT:
            raise RequestAbortedError("the engine ended this request before its last token")
        return item

    def finish(self, request_id: RequestId) -> None:
        """End one request early and normally: a stop string was found."""
        self._end(request_id, FinishReason.STOP)

    def close(self) -> None:
        """Abort what is still open. Safe to call twice."""
        for request_id in tuple(self._open):
            self._end(request_id, FinishReason.ABORT)

    def _end(self, request_id: RequestId, reason: FinishReason) -> None:
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort(request_id, reason)

    def put(self, item: SequenceOutput | EngineError) -> None:
        """For AsyncEngine: deliver news. A request that ended in the engine is never aborted any more."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_failure(item: SequenceOutput | EngineError) -> bool:
    return isinstance(item, EngineError) or item.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
