"""The requests that the parent has given to the child: admission at the door, one stream for each call, the fan-in.

Invariant: every request that `open` took ends in exactly one of: a finish reason, one abort command, or an error
delivered to its stream (refused by the child, fault, child gone). Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

from kvpilot_engine.core.ids import RequestId
from kvpilot_engine.core.request import GenerationRequest
from kvpilot_engine.core.scheduler_output import FinishReason, SequenceOutput
from kvpilot_engine.errors import EngineError, InvalidRequestError, NeverFitsError, OverloadedError
from kvpilot_engine.service.generation_stream import GenerationStream
from kvpilot_engine.service.messages import AbortRequest, AddRequest, RefusalKind, RequestRefused

RETRY_AFTER_S = 2


class OpenRequests:
    """`send` passes commands on to the child and never blocks; one to a child that is gone is dropped."""

    def __init__(self, *, max_queue_len: int, max_num_seqs: int, send: Callable[[object], None]) -> None:
        self._max_queue_len = max_queue_len
        self._max_num_seqs = max_num_seqs
        self._send = send
        self._streams: dict[RequestId, GenerationStream] = {}
        self._unstarted: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, requests: Collection[GenerationRequest]) -> GenerationStream:
        """Take all of the requests or none. Raises OverloadedError or InvalidRequestError."""
        if len(requests) > self._max_queue_len + self._max_num_seqs:
            raise InvalidRequestError(
                f"{len(requests)} choices in one call; at most "
                f"{self._max_queue_len + self._max_num_seqs} can ever be queued and run",
                param="n",
            )
        num_started = len(self._streams) - len(self._unstarted)
        limit = self._max_queue_len + max(0, self._max_num_seqs - num_started)
        if len(self._unstarted) + len(requests) > limit:
            raise OverloadedError(
                f"{len(self._unstarted)} requests are waiting and {len(requests)} more would pass the limit of "
                f"{self._max_queue_len} in the queue",
                retry_after_s=RETRY_AFTER_S,
            )
        stream = GenerationStream([request.request_id for request in requests], abort=self._abort)
        for request in requests:
            self._streams[request.request_id] = stream
            self._unstarted.add(request.request_id)
            self._send(AddRequest(request))
        return stream

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """News of a step, each to its stream."""
        for output in outputs:
            self._unstarted.discard(output.request_id)
            ended = output.finish_reason is not None
            stream = self._forget(output.request_id) if ended else self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def deliver_refusal(self, refused: RequestRefused) -> None:
        stream = self._forget(refused.request_id)
        if stream is not None:
            stream.put(_refusal_error(refused))

    def abort_all(self, error: EngineError) -> None:
        """End everything: the child is told, and each stream gets the error."""
        for request_id, stream in tuple(self._streams.items()):
            self._abort(request_id, FinishReason.ABORT)
            stream.put(error)

    def fail_all(self, error: EngineError) -> None:
        """The child can't be told any more: each stream gets the error."""
        for request_id in tuple(self._streams):
            stream = self._forget(request_id)
            if stream is not None:
                stream.put(error)

    def _abort(self, request_id: RequestId, reason: FinishReason) -> None:
        if self._forget(request_id) is not None:
            self._send(AbortRequest(request_id, reason))

    def _forget(self, request_id: RequestId) -> GenerationStream | None:
        self._unstarted.discard(request_id)
        return self._streams.pop(request_id, None)


def _refusal_error(refused: RequestRefused) -> EngineError:
    build: dict[RefusalKind, Callable[[str], EngineError]] = {
        RefusalKind.NEVER_FITS: partial(NeverFitsError, param=refused.param),
        RefusalKind.INVALID: partial(InvalidRequestError, param=refused.param),
        RefusalKind.OVERLOADED: partial(OverloadedError, retry_after_s=RETRY_AFTER_S),
    }
    return build[refused.kind](refused.message)
