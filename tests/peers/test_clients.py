"""Clients: only so many connections, and those who ask keep theirs."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from lightning_loco.peers.clients import MOST_HELD_BYTES, Clients, bound_port
from tests.peers.helpers import HOST, open_files

MOST = 5


class Server:
    """A ROUTER with its clients, driven by the test."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.clients = Clients(self.context, self.socket, MOST, is_encrypted=False)
        self.socket.bind(f"tcp://{HOST}:*")
        self.port = bound_port(self.socket)

    @property
    def num_seen(self) -> int:
        """Those who are connected and those whose connection was closed."""
        return len(self.clients) + self.clients.closed

    def take_note(self, num_seen: int) -> None:
        """Until so many have come and not gone by themselves."""
        deadline = time.monotonic() + 5
        while self.num_seen != num_seen:
            assert time.monotonic() < deadline, self.num_seen
            self.clients.take_note()
            time.sleep(0.001)

    def take_request(self) -> None:
        _, frame = self.socket.recv_multipart(copy=False)
        self.clients.take(frame)
        self.clients.note_request(frame)

    def close(self) -> None:
        self.clients.close()
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def server() -> Iterator[Server]:
    before = open_files()
    made = Server()
    yield made
    made.close()
    assert open_files() <= before


@contextlib.contextmanager
def dealers(server: Server, count: int) -> Iterator[list[zmq.Socket[bytes]]]:
    context = zmq.Context()
    made = [context.socket(zmq.DEALER) for _ in range(count)]
    for each in made:
        before = server.num_seen
        each.linger = 0
        each.reconnect_ivl = -1
        each.connect(f"tcp://{HOST}:{server.port}")
        server.take_note(before + 1)
    yield made
    for each in made:
        each.close(0)
    context.term()


def is_connected(server: Server, dealer: zmq.Socket[bytes]) -> bool:
    with contextlib.suppress(zmq.Again):
        dealer.send(b"are you there?", zmq.NOBLOCK)
        if server.socket.poll(300):
            server.take_request()
            return True
    return False


def test_who_has_gone_is_forgotten(server: Server) -> None:
    for _ in range(3):
        with dealers(server, 3):
            assert len(server.clients) == 3
        server.take_note(0)
    assert server.clients.closed == 0


def test_of_too_many_the_ones_that_never_asked_go_first_and_the_oldest_of_them(
    server: Server,
) -> None:
    with dealers(server, MOST) as first:
        assert is_connected(server, first[0])
        assert is_connected(server, first[2])
        with dealers(server, 2) as second:
            assert server.clients.closed == 2
            found = [is_connected(server, each) for each in [*first, *second]]
            assert found == [True, False, True, False, True, True, True]
            with dealers(server, 1):  # now all have asked, the first one the longest ago
                assert [is_connected(server, first[index]) for index in (0, 2)] == [False, True]


def test_a_message_without_end_costs_the_connection_and_no_other(server: Server) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\6DEALER"
    with dealers(server, 1) as (honest,), socket.create_connection((HOST, server.port)) as raw:
        server.take_note(2)
        raw.settimeout(5)
        raw.sendall(greeting + ready)
        assert raw.recv(64, socket.MSG_WAITALL)
        assert raw.recv(1000)  # it is ready, too
        raw.sendall(b"\x01\x01x" * (MOST_HELD_BYTES // 4))
        time.sleep(0.1)
        server.clients.look()
        assert server.clients.closed == 0
        raw.sendall(b"\x01\x01x" * (MOST_HELD_BYTES // 4))
        deadline = time.monotonic() + 5
        while not server.clients.closed and time.monotonic() < deadline:
            time.sleep(0.01)
            server.clients.look()
        assert server.clients.closed == 1
        with contextlib.suppress(ConnectionError):
            while raw.recv(1000):
                pass
        assert is_connected(server, honest)
