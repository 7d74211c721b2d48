"""Messages of a Connection, read in whatever pieces the pipe gives them."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection

import pytest

from kvpilot_engine.service.child_link import Inbox


def _written(*messages: object) -> bytes:
    """What a Connection writes for these messages."""
    ours, theirs = socket.socketpair()
    with ours, Connection(theirs.detach()) as connection:
        for message in messages:
            connection.send(message)
        return ours.recv(1 << 20)


MESSAGES = [{"a": 1}, "x" * 20_000, ("two", 2)]


@pytest.mark.parametrize("size", [1, 3, 4096, 1 << 20])
def test_messages_come_whole_and_in_order_however_the_stream_is_cut(size: int) -> None:
    data = _written(*MESSAGES)
    inbox = Inbox()
    assert [m for at in range(0, len(data), size) for m in inbox.take(data[at : at + size])] == MESSAGES


def test_half_a_message_waits_for_its_other_half() -> None:
    data = _written("whole")
    inbox = Inbox()
    assert list(inbox.take(data[:-1])) == []
    assert list(inbox.take(b"")) == []
    assert list(inbox.take(data[-1:])) == ["whole"]


def test_a_length_beyond_four_bytes_is_read() -> None:
    data = _written("whole")
    long_form = (-1).to_bytes(4, "big", signed=True) + (len(data) - 4).to_bytes(8, "big") + data[4:]
    assert list(Inbox().take(long_form)) == ["whole"]
