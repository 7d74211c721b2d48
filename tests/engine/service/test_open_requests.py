"""What the parent knows of its requests, without a child: one end for each, and out-of-memory events counted once."""

from __future__ import annotations

import pytest

from kvpilot_engine.core.ids import RequestId, TokenId
from kvpilot_engine.core.scheduler_output import FinishReason, SequenceOutput
from kvpilot_engine.errors import InvalidRequestError, OOMCause, OOMPhase, OverloadedError, RequestAbortedError
from kvpilot_engine.service.messages import AbortRequest, OOMEvent, RefusalKind, RequestRefused
from kvpilot_engine.service.oom_log import OOMLog
from kvpilot_engine.service.open_requests import OpenRequests
from kvpilot_engine.service.termination import build_termination
from kvpilot_engine.testing import make_request


class Door:
    def __init__(self, *, max_queue_len: int = 2, max_num_seqs: int = 1) -> None:
        self.sent: list[object] = []
        self.requests = OpenRequests(
            max_queue_len=max_queue_len, max_num_seqs=max_num_seqs, send=lambda command: self.sent.append(command)
        )

    @property
    def aborted(self) -> list[str]:
        return [command.request_id for command in self.sent if isinstance(command, AbortRequest)]


def output(name: str, reason: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(RequestId(name), (TokenId(1),), reason)


async def test_queue_counts_those_that_have_not_started() -> None:  # B23
    """More can have started than run at once: those that were preempted wait again, in the scheduler's queue."""
    door = Door()
    for name in ("a", "b", "c"):
        door.requests.open([make_request(name, [1])])
    with pytest.raises(OverloadedError):
        door.requests.open([make_request("d", [1])])
    door.requests.deliver([output(name) for name in ("a", "b", "c")])
    with pytest.raises(OverloadedError):
        door.requests.open([make_request(name, [1]) for name in ("d", "e", "f")])
    door.requests.open([make_request(name, [1]) for name in ("d", "e")])
    door.requests.deliver([output(name, FinishReason.LENGTH) for name in ("a", "b", "c", "d")])
    door.requests.open([make_request(name, [1]) for name in ("f", "g")])
    assert len(door.requests) == 3
    assert door.aborted == []


async def test_call_that_can_never_be_taken_is_the_client_s_fault() -> None:
    with pytest.raises(InvalidRequestError, match="at most 3"):
        Door().requests.open([make_request(name, [1]) for name in "abcd"])


async def test_all_aborted_are_told_to_the_child_once() -> None:  # B21
    door = Door()
    stream = door.requests.open([make_request("a", [1]), make_request("b", [1])])
    door.requests.deliver([output("a", FinishReason.STOP)])
    door.requests.abort_all(RequestAbortedError("over"))
    assert (await anext(stream)).request_id == "a"
    with pytest.raises(RequestAbortedError, match="over"):
        await anext(stream)
    stream.close()
    assert door.aborted == ["b"]


async def test_streams_of_a_lost_child_end_without_commands() -> None:  # A21
    door = Door()
    stream = door.requests.open([make_request("a", [1])])
    door.requests.fail_all(RequestAbortedError("gone"))
    with pytest.raises(RequestAbortedError, match="gone"):
        await anext(stream)
    stream.close()
    assert door.aborted == []
    assert len(door.requests) == 0


async def test_refusal_of_the_child_ends_its_request_only() -> None:
    door = Door()
    refused, other = (door.requests.open([make_request(name, [1])]) for name in "ab")
    door.requests.deliver_refusal(
        RequestRefused(request_id=RequestId("a"), kind=RefusalKind.INVALID, message="no", param="prompt")
    )
    with pytest.raises(InvalidRequestError, match="no"):
        await anext(refused)
    door.requests.deliver([output("b", FinishReason.STOP)])
    assert (await anext(other)).finish_reason is FinishReason.STOP


def test_repeated_events_are_counted_once_and_an_end_gets_the_next_number() -> None:
    log = OOMLog()
    events = [
        OOMEvent(seq=seq, phase=OOMPhase.DECODE, cause=OOMCause.OWN, utilization=0.9, message=f"{seq}", survived=True)
        for seq in (1, 2)
    ]
    log.note(events[:1])
    log.note(events)
    words = log.note_end(
        build_termination("HostOOMKilled", "killed", phase="load", cause="host", requested_bytes=5, utilization=0.5)
    )
    assert words["oom_seq"] == log.seq == 3
    assert [(event.seq, event.message, event.requested_bytes) for event in log.events] == [
        (1, "1", None),
        (2, "2", None),
        (3, "killed", 5),
    ]
    assert log.counts == {(OOMPhase.DECODE, OOMCause.OWN): 2, (OOMPhase.LOAD, OOMCause.HOST): 1}
