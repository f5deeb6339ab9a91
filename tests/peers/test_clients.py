"""Clients: only so many connections, and those who ask keep theirs."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from lightning_loco.peers.clients import MOST_HELD_BYTES, Clients, bound_port
from lightning_loco.peers.keys import Keys, write_key_file
from tests.peers.helpers import HOST, open_files

MOST = 5


class Server:
    """A ROUTER with its clients, driven by the test."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        keys.guard(self.socket)
        self.clients = Clients(self.context, self.socket, MOST)
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
def server(tmp_path: Path) -> Iterator[Server]:
    before = open_files()
    made = Server(write_key_file(tmp_path / "keys"))
    yield made
    made.close()
    assert open_files() <= before


@contextlib.contextmanager
def dealers(
    server: Server, count: int, port: int | None = None
) -> Iterator[list[zmq.Socket[bytes]]]:
    """Clients with the server's keys that connect to it, or to who passes on what they send."""
    context = zmq.Context()
    made = [context.socket(zmq.DEALER) for _ in range(count)]
    for each in made:
        before = server.num_seen
        each.linger = 0
        each.reconnect_ivl = -1
        server.keys.present(each)
        each.connect(f"tcp://{HOST}:{port or server.port}")
        server.take_note(before + 1)
    yield made
    for each in made:
        each.close(0)
    context.term()


def is_connected(server: Server, dealer: zmq.Socket[bytes]) -> bool:
    with contextlib.suppress(zmq.Again):
        dealer.send(b"are you there?", zmq.NOBLOCK)
        if server.socket.poll(1000):
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


class Relay:
    """Passes on what one client sends, up to so many bytes, and all that the server returns."""

    def __init__(self, port: int) -> None:
        self.most = 0
        self._ends = threading.Event()
        self._listening = socket.create_server((HOST, 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()

    def _run(self, port: int) -> None:
        there, sent = socket.create_connection((HOST, port)), 0
        here, _ = self._listening.accept()
        with here, there, contextlib.suppress(ConnectionError):
            while not self._ends.wait(0.001):
                senders = [there, here] if sent < self.most else [there]
                ready, _, _ = select.select(senders, [], [], 0.01)
                if there in ready:
                    here.sendall(there.recv(1000))
                if here in ready:
                    part = here.recv(self.most - sent)
                    there.sendall(part)
                    sent += len(part)

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._listening.close()


def test_a_message_without_end_costs_the_connection_and_no_other(server: Server) -> None:
    with dealers(server, 1) as (honest,), contextlib.closing(Relay(server.port)) as relay:
        relay.most = MOST_HELD_BYTES // 2
        with dealers(server, 1, relay.port) as (endless,):
            endless.send_multipart([b"x"] * MOST_HELD_BYTES)
            time.sleep(0.3)
            server.clients.look()
            assert server.clients.closed == 0
            relay.most = 2 * MOST_HELD_BYTES
            deadline = time.monotonic() + 5
            while not server.clients.closed and time.monotonic() < deadline:
                time.sleep(0.01)
                server.clients.look()
            assert server.clients.closed == 1
            assert is_connected(server, honest)
