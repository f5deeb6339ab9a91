"""Held: bytes that came and were not handed over are counted exactly."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from lightning_loco.peers.held import Held
from lightning_loco.peers.keys import Keys, write_key_file
from tests.peers.helpers import HOST, open_files

HANDSHAKE_BYTES = 1000


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return write_key_file(tmp_path / "keys")


@contextlib.contextmanager
def pair(keys: Keys) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes], Held]]:
    """A connected pair of sockets, and what the second holds back."""
    context = zmq.Context()
    sender, receiver = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    keys.guard(receiver)
    keys.present(sender)
    monitor = receiver.get_monitor_socket(zmq.EVENT_ACCEPTED)
    port = receiver.bind_to_random_port(f"tcp://{HOST}")
    sender.connect(f"tcp://{HOST}:{port}")
    event = parse_monitor_message(monitor.recv_multipart())
    held = Held(int(event["value"]))
    try:
        yield sender, receiver, held
    finally:
        held.close()
        receiver.disable_monitor()
        for each in (monitor, sender, receiver):
            each.close(0)
        context.term()


def take(receiver: zmq.Socket[bytes], held: Held) -> None:
    for frame in receiver.recv_multipart(copy=False):
        held.take(len(frame))


def test_what_is_taken_is_no_longer_held_whatever_its_length(keys: Keys) -> None:
    with pair(keys) as (sender, receiver, held):
        sender.send(b"first")
        take(receiver, held)
        handshake = held.received_bytes
        assert 0 < handshake < HANDSHAKE_BYTES
        for length in (0, 1, 48, 221, 222, 223, 255, 256, 300, 100_000):
            sender.send_multipart([bytes(length), bytes(48)])
            take(receiver, held)
            assert held.received_bytes == handshake, length
        for _ in range(2000):
            sender.send(bytes(48))
            take(receiver, held)
        assert held.received_bytes == held.bytes == handshake


def test_messages_that_are_not_taken_are_held(keys: Keys) -> None:
    with pair(keys) as (sender, _, held):
        sender.send(bytes(100_000))
        deadline = time.monotonic() + 5
        while held.bytes < 100_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 100_000 <= held.bytes <= held.received_bytes < 100_000 + HANDSHAKE_BYTES


def test_what_nobody_has_read_is_not_held_by_zeromq() -> None:
    with (
        socket.create_server((HOST, 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as here,
    ):
        held = Held(here.fileno())
        assert held.own_port == server.getsockname()[1]
        sender.sendall(bytes(1000))
        assert held.received_bytes == 1000
        assert held.bytes == 0
        here.recv(600)
        assert held.bytes == 600
        held.cut()
        sender.settimeout(5)
        assert sender.recv(1) == b""


def test_a_number_that_is_no_connection_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    before = open_files()
    with (tmp_path / "file").open("w") as file, pytest.raises(OSError, match="non-socket"):
        Held(file.fileno())
    unused = os.open("/dev/null", os.O_RDONLY)
    os.close(unused)
    with pytest.raises(OSError, match="Bad file"):
        Held(unused)
    assert open_files() == before
