"""Hostile messages to a serving node, and hostile replies to a reading one."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers import PeerNode
from lightning_loco.peers.protocol import (
    GONE,
    MAX_CHUNK_BYTES,
    Request,
    pack_reply,
    pack_request,
)
from tests.limits import LONG_S, SOON_S
from tests.peers.helpers import (
    CHECKSUM,
    HOST,
    MODEL,
    answering,
    dealer,
    fetch,
    make_node,
    peers,
    right_answer,
    right_reply,
    two_nodes,
    wait_until_ended,
)

pytestmark = pytest.mark.recovery

NUMEL = 500_000
TOTAL_BYTES = 4 * NUMEL
GOOD = Request(CHECKSUM, MODEL.wire_format, 7, 0, 0, 4096)
MB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def hostile_messages(
    count: int, good: Request = GOOD, total_bytes: int = TOTAL_BYTES
) -> Iterator[list[bytes]]:
    """Everything that somebody could think of, as frames."""
    draw = random.Random(0)
    frame = pack_request(good)
    for number in range(count):
        match number % 10:
            case 0:
                yield [draw.randbytes(draw.randrange(300))]
            case 1:
                yield [draw.randbytes(len(frame))]
            case 2:
                yield [frame[: draw.randrange(len(frame))]]
            case 3:
                yield [frame + draw.randbytes(1 + draw.randrange(500))]
            case 4:
                length = draw.choice([0, MAX_CHUNK_BYTES + 1, 2**32 - 1])
                yield [pack_request(good._replace(length=length))]
            case 5:
                offset = draw.choice([total_bytes, total_bytes - 1, 2**40, 2**64 - 1])
                yield [pack_request(good._replace(offset=offset))]
            case 6:
                place = draw.randrange(8)
                yield [frame[:place] + draw.randbytes(1) + frame[place + 1 :]]
            case 7:
                yield [frame] * draw.randrange(2, 20)
            case 8:
                yield [b"", frame]
            case 9:
                reply = right_reply(good, total_bytes)
                yield [pack_reply(reply), bytes(1000)]


def wait_for_malformed(node: PeerNode, count: int) -> None:
    deadline = time.monotonic() + 20
    while node.statistics.malformed < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert node.statistics.malformed >= count


@pytest.mark.parametrize("compression", [None, "int8"])
def test_ten_thousand_hostile_messages_change_nothing(
    caplog: pytest.LogCaptureFixture, compression: str | None
) -> None:
    with two_nodes(NUMEL, compression=compression) as (here, there):
        flat = torch.randn(NUMEL)
        good, model = GOOD._replace(wire_format=there.model.wire_format), there.model
        there.publish(flat, Tag(1, 2))
        for attempt in range(2):  # the first may fill caches of the allocator
            before = resident_bytes()
            for part in range(10):
                seen = there.statistics.malformed
                count = 1000 if attempt else 200
                with dealer(there.port, b"stranger%d" % (part + 100 * attempt)) as connection:
                    for frames in hostile_messages(count, good, model.total_bytes):
                        connection.send_multipart(frames)
                    wait_for_malformed(there, seen + count - 10)  # some may be right by chance
        assert resident_bytes() - before < 30 * MB
        for _ in range(3):
            received = fetch(here)
            assert received is not None
            lost = (received.params - flat).abs().max()
            assert lost == 0 if compression is None else 0 < lost < 0.02
            assert received.tag == Tag(1, 2)
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "Dropped a message from 127.0.0.1" in lines[0]


def test_replayed_requests_from_many_strangers_need_no_memory() -> None:
    """Good requests, again and again, from clients that never read and soon go away."""
    with two_nodes(NUMEL) as (here, there):
        flat = torch.randn(NUMEL)
        there.publish(flat, Tag(1, 2))
        request = pack_request(GOOD._replace(length=2**18))
        levels = []
        for _ in range(3):
            for _ in range(5):
                with dealer(there.port) as connection:
                    for _ in range(100):
                        connection.send(request)
                    connection.poll(2000)
            received = fetch(here)
            assert received is not None
            assert torch.equal(received.params, flat)
            levels.append(resident_bytes())
        assert levels[-1] - levels[0] < 30 * MB


def test_raw_garbage_on_the_port_changes_nothing() -> None:
    draw = random.Random(1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\6DEALER"
    with two_nodes(NUMEL) as (here, there):
        flat = torch.randn(NUMEL)
        there.publish(flat, Tag(1, 2))
        before = resident_bytes()
        for number in range(300):
            with socket.create_connection((HOST, there.port)) as raw, contextlib.suppress(OSError):
                match number % 6:
                    case 0:
                        raw.sendall(draw.randbytes(draw.randrange(2000)))
                    case 1:
                        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                    case 2:
                        raw.sendall(greeting + draw.randbytes(500))
                    case 3:  # a frame that announces 2**62 bytes
                        raw.sendall(greeting + ready + b"\x02" + struct.pack(">Q", 2**62) + b"xyz")
                    case 4:
                        raw.sendall(greeting[: draw.randrange(64)])
                    case 5:  # more than a queue might hold, then pings, then a reset
                        raw.sendall(greeting + ready)
                        time.sleep(0.005)
                        raw.sendall(b"\x00\x02hi" * 1500 + b"\x04\x08\x04PING\0\0x" * 100)
                        time.sleep(0.005)
                        reset = struct.pack("ii", 1, 0)
                        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        for _ in range(3):
            received = fetch(here)
            assert received is not None
            assert torch.equal(received.params, flat)
        assert resident_bytes() - before < 30 * MB


class FalseAnswers:
    """Wrong ones of all kinds, which all hold nines, and then the right one, of ones."""

    def __init__(self) -> None:
        self._seen: list[list[bytes]] = []

    def __call__(self, request: Request) -> Iterator[list[bytes]]:
        right = right_reply(request, TOTAL_BYTES)
        ones, nines = (right_answer(request, TOTAL_BYTES, value) for value in (1.0, 9.0))
        yield from self._seen[:3]  # replays
        yield [b"nonsense"]
        yield [nines[0][:-1], nines[1]]
        for change in (
            {"request_id": request.request_id ^ 1},
            {"offset": request.offset + 8},
            {"offset": 2**63},
            {"length": request.length + 1},
            {"length": 0},
            {"total_bytes": TOTAL_BYTES + 4},
            {"checksum": 1},
            {"wire_format": 2},
            {"publication": 0},
        ):
            yield [pack_reply(right._replace(**change)), nines[1]]
        yield [pack_reply(right._replace(kind=GONE)), nines[1]]
        yield [pack_reply(right)]
        self._seen.append(nines)
        yield ones
        yield nines  # again


def test_a_reader_drops_replies_that_it_has_not_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = peers(2)
    with answering(nodes[1].port, FalseAnswers()):
        here = make_node(nodes, 0, NUMEL)
        for _ in range(3):
            received = fetch(here)
            assert received is not None
            assert received.params.unique().tolist() == [1.0]
        assert here.statistics.malformed > 20
        assert len(caplog.records) <= 10
        here.close()


def test_a_frame_of_another_length_than_announced_is_not_handed_over(
    subtests: pytest.Subtests,
) -> None:
    for length in (0, 1, 100, MAX_CHUNK_BYTES, 2 * MAX_CHUNK_BYTES):

        def answer(request: Request, length: int = length) -> Iterator[list[bytes]]:
            yield [pack_reply(right_reply(request, TOTAL_BYTES)), bytes(length)]

        nodes = peers(2)
        with (
            subtests.test(length=length),
            answering(nodes[1].port, answer),
            contextlib.closing(make_node(nodes, 0, NUMEL, fetch_timeout_s=0.3)) as here,
        ):
            started = time.monotonic()
            assert fetch(here) is None
            assert time.monotonic() - started < SOON_S
            wait_until_ended(here)
            found = here.statistics
            assert (found.fetches, found.timeouts + found.refused) == (0, 1)


def test_a_peer_whose_publications_are_always_gone_does_not_hold_up_a_wait() -> None:
    asked = []

    def answer(request: Request) -> Iterator[list[bytes]]:
        asked.append(request)
        reply = right_reply(request, TOTAL_BYTES, request.publication)
        yield [pack_reply(reply._replace(kind=GONE, length=0))]

    nodes = peers(2)
    with answering(nodes[1].port, answer):
        here = make_node(nodes, 0, NUMEL, fetch_timeout_s=LONG_S)
        started = time.monotonic()
        assert fetch(here) is None
        assert time.monotonic() - started < SOON_S
        assert here.statistics.timeouts == 1
        here.close()
    assert 0 < len(asked) < 100  # no busy loop
