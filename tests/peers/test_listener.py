"""Listener: plain clients, of which none waits for, or takes the place of, those who ask."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers import listener as listening
from lightning_loco.peers.answers import Answers
from lightning_loco.peers.listener import Listener
from lightning_loco.peers.model import Model
from lightning_loco.peers.protocol import LATEST, Request, pack_request, parse_reply
from lightning_loco.peers.publications import Publications
from lightning_loco.peers.zmtp import Handshake
from tests.peers.flooder import frame, read
from tests.peers.helpers import CHECKSUM, HOST, MODEL, open_files

MOST = 5
LEASE_S = 0.1
LARGE = Model(CHECKSUM, 8_000_000, torch.float32)
WHOLE = Request(CHECKSUM, MODEL.wire_format, 7, LATEST, 0, 4000)


@contextlib.contextmanager
def serving(model: Model = MODEL) -> Iterator[tuple[Listener, Publications]]:
    """One that serves ones in a thread."""
    before = open_files()
    publications = Publications(model, lease_s=LEASE_S)
    publications.publish(torch.ones(model.numel), Tag(1, 1))
    listener = Listener(Answers(model, publications), HOST, 0, MOST)
    thread = threading.Thread(target=listener.serve)
    thread.start()
    try:
        yield listener, publications
    finally:
        listener.stop()
        thread.join(5)
        assert not thread.is_alive()
        listener.close()
        listener.close()
        assert open_files() <= before


@contextlib.contextmanager
def client(listener: Listener) -> Iterator[socket.socket]:
    """A connection after the handshake."""
    with socket.create_connection((HOST, listener.port)) as connection:
        connection.settimeout(5)
        connection.sendall(Handshake(b"DEALER").outgoing)
        read(connection, len(Handshake(b"ROUTER").outgoing))
        yield connection


def ask(connection: socket.socket, request: Request = WHOLE) -> bytes:
    """The chunk of a reply."""
    connection.sendall(frame(pack_request(request)))
    header = read(connection, read(connection, 2)[1])
    length = int.from_bytes(read(connection, 9)[1:], "big")
    assert parse_reply(header).length == length == request.length
    return read(connection, length)


def is_open(connection: socket.socket) -> bool:
    """Whether requests are answered; looks for a while."""
    with contextlib.suppress(OSError):
        return len(ask(connection)) == 4000
    return False


def wait_until_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while connection.recv(2**20):
            pass


def test_of_too_many_the_ones_that_never_asked_go_first_and_the_oldest_of_them() -> None:
    with serving() as (listener, _), contextlib.ExitStack() as stack:
        first = [stack.enter_context(client(listener)) for _ in range(MOST)]
        assert is_open(first[0])
        assert is_open(first[2])
        second = [stack.enter_context(client(listener)) for _ in range(2)]
        found = [is_open(each) for each in [*first, *second]]
        assert found == [True, False, True, False, True, True, True]
        stack.enter_context(client(listener))  # now all have asked, the first one the longest ago
        assert [is_open(first[index]) for index in (0, 2)] == [False, True]
        assert len(listener) == MOST


def test_who_does_not_greet_or_does_not_read_loses_the_connection_and_who_is_idle_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, seconds in (("_HANDSHAKE_S", 0.2), ("_SILENCE_S", 0.2), ("_LOOK_S", 0.05)):
        monkeypatch.setattr(listening, name, seconds)
    with serving(LARGE) as (listener, _), client(listener) as idle, client(listener) as stalled:
        ask(idle)
        request = frame(pack_request(WHOLE._replace(length=2**22)))
        stalled.sendall(request * 16)
        with socket.create_connection((HOST, listener.port)) as silent:
            silent.settimeout(5)
            wait_until_closed(silent)
        deadline = time.monotonic() + 5
        while len(listener) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(listener) == 1
        ask(idle)


def test_a_client_that_never_reads_keeps_no_publication_and_no_other_client_waiting() -> None:
    """Its chunk is gone when it reads on, which the end of the connection tells."""
    with serving(LARGE) as (listener, publications), client(listener) as stalled:
        stalled.sendall(frame(pack_request(WHOLE._replace(length=2**22))) * 16)
        with client(listener) as honest:
            for value in range(2, 6):
                time.sleep(2 * LEASE_S)
                publications.publish(torch.full((LARGE.numel,), float(value)), Tag(1, 1))
                chunk = ask(honest, WHOLE._replace(request_id=value))
                assert torch.frombuffer(bytearray(chunk), dtype=torch.float32).unique() == value
        wait_until_closed(stalled)


def test_requests_that_come_faster_than_replies_are_taken_wait_and_none_is_lost() -> None:
    with serving(LARGE) as (listener, _), client(listener) as connection:
        connection.settimeout(30)
        count = 500
        request = frame(pack_request(WHOLE._replace(length=100_000)))
        sender = threading.Thread(target=connection.sendall, args=(request * count,))
        sender.start()
        for _ in range(count):
            parse_reply(read(connection, read(connection, 2)[1]))
            read(connection, int.from_bytes(read(connection, 9)[1:], "big"))
        sender.join()
