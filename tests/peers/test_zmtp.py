"""ZMTP: what ZeroMQ says is understood, and what is too long or foreign is refused."""

from __future__ import annotations

import random

import pytest

from lightning_loco.peers.zmtp import (
    GREETING,
    MOST_FRAMES,
    Handshake,
    Inbox,
    Message,
    ProtocolBroken,
    frame_head,
    parse_head,
)

# What libzmq 4.3.5 sends: its greeting, and READY with two properties.
FROM_ZEROMQ = (
    b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL"
    + bytes(48)
    + b"\4\x29\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"
)


def frame(body: bytes, *, has_more: bool = False) -> bytes:
    return frame_head(len(body), has_more=has_more) + body


def messages(inbox: Inbox) -> list[Message]:
    found = []
    while (message := inbox.take()) is not None:
        found.append(message)
    return found


def test_messages_are_found_however_the_bytes_arrive() -> None:
    sent = FROM_ZEROMQ + frame(b"one") + frame(b"", has_more=True) + frame(bytes(300)) + frame(b"")
    expected = [Message(b"one", 1), Message(b"", 2), Message(b"", 1)]
    draw = random.Random(0)
    for _ in range(50):
        inbox = Inbox(Handshake(b"ROUTER"), 1024)
        found, start = [], 0
        while start < len(sent):
            end = start + draw.randrange(1, 100)
            inbox.add(sent[start:end])
            found += messages(inbox)
            start = end
        assert found == expected
        assert inbox.room == Inbox.BYTES


def test_our_own_handshake_is_understood() -> None:
    theirs, data = Handshake(b"DEALER"), bytearray(Handshake(b"ROUTER").outgoing + b"rest")
    assert theirs.missing(data) == 0
    assert theirs.is_done
    assert data == b"rest"


def test_heads_are_read_as_they_were_written(subtests: pytest.Subtests) -> None:
    for size in (0, 1, 255, 256, 2**40):
        with subtests.test(size=size):
            for has_more in (False, True):
                data = frame_head(size, has_more=has_more)
                assert parse_head(data) == (len(data), size, has_more, False)
                assert parse_head(data[:-1]) is None


def test_what_is_not_of_the_protocol_is_refused(subtests: pytest.Subtests) -> None:
    for data, text in (
        (b"GET / HTTP/1.1", "another protocol"),
        (GREETING[:10] + b"\1" + GREETING[11:], "another version"),
        (GREETING.replace(b"NULL", b"CURV"), "needs keys"),
        (GREETING + frame(b"\5READY"), "that it is ready"),
        (GREETING + b"\4\6\5ERROR", "that it is ready"),
        (GREETING + b"\6" + (2**62).to_bytes(8, "big"), "that it is ready"),
        (FROM_ZEROMQ + b"\x08\1x", "flags 8"),
        (FROM_ZEROMQ + b"\4\7\4PING\0\0", "of another kind"),
        (FROM_ZEROMQ + frame(bytes(1025)), "1025 bytes"),
        (FROM_ZEROMQ + frame(b"x", has_more=True) * MOST_FRAMES, "too many frames"),
    ):
        with subtests.test(text, end=data[-20:]):
            inbox = Inbox(Handshake(b"ROUTER"), 1024)
            inbox.add(data)
            with pytest.raises(ProtocolBroken, match=text):
                messages(inbox)
