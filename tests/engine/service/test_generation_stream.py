"""News of several requests, taken in batches: nothing is lost, failures come after what preceded them."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.scheduler_output import FinishReason, SequenceOutput
from kvpilot_engine.errors import DeadlineExceededError, ModelExecutionError, RequestAbortedError
from kvpilot_engine.service.generation_stream import GenerationStream

A, B = RequestId("a"), RequestId("b")


def make_stream() -> tuple[GenerationStream, list[tuple[RequestId, FinishReason]]]:
    aborted: list[tuple[RequestId, FinishReason]] = []
    return GenerationStream([A, B], abort=lambda request_id, reason: aborted.append((request_id, reason))), aborted


def news(request_id: RequestId, token: int, end: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(request_id, (TokenId(token),), finish_reason=end)


async def test_batch_holds_all_that_is_there() -> None:
    stream, _ = make_stream()
    for output in (news(A, 1), news(B, 2), news(A, 3)):
        stream.put(output)
    assert [output.new_token_ids for output in await stream.next_batch()] == [(1,), (2,), (3,)]


@pytest.mark.parametrize("end", [FinishReason.ERROR, FinishReason.ABORT, None])
async def test_failure_comes_after_what_preceded_it(end: FinishReason | None) -> None:
    stream, _ = make_stream()
    stream.put(news(A, 1))
    stream.put(DeadlineExceededError("late") if end is None else news(B, 2, end))
    assert [output.request_id for output in await stream.next_batch()] == [A]
    with pytest.raises((DeadlineExceededError, ModelExecutionError, RequestAbortedError)):
        await stream.next_batch()


async def test_empty_batch_tells_the_end_and_news_of_ended_requests_is_dropped() -> None:  # B21
    stream, aborted = make_stream()
    stream.put(news(A, 1, FinishReason.LENGTH))
    assert len(await stream.next_batch()) == 1
    stream.finish(B)
    stream.put(news(B, 2))
    assert await stream.next_batch() == []
    stream.close()
    assert aborted == [(B, FinishReason.STOP)]
