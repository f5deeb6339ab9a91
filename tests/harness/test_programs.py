"""Ports for tests: no other process gets them first, however many tests run at the same time."""

from __future__ import annotations

import multiprocessing
import socket

from tests.harness.guards import open_files
from tests.harness.programs import free_ports

SYSTEM_FIRST = 32768
"""The first port that Linux assigns to connections by default."""


def test_ports_are_free_and_none_of_those_that_the_system_gives_away() -> None:
    ports = free_ports(10)
    assert len(set(ports)) == 10
    assert max(ports) < SYSTEM_FIRST
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ports[0] not in [port for _ in range(6) for port in free_ports(10)]


def test_a_port_is_free_again_after_its_connections() -> None:
    (port,) = free_ports()
    for _ in range(2):
        address = ("127.0.0.1", port)
        with socket.create_server(address) as server, socket.create_connection(address):
            server.accept()[0].close()  # the side that closes first keeps the port for a minute
        assert port in [one for _ in range(20) for one in free_ports(10)]


def test_no_files_are_left_open() -> None:
    free_ports()
    before = open_files()
    free_ports(5)
    assert open_files() == before


def test_other_processes_have_other_ports() -> None:
    processes = multiprocessing.get_context("fork")
    ours, theirs = processes.Pipe()
    other = processes.Process(target=lambda: theirs.send(free_ports(50)))
    other.start()
    assert not set(ours.recv()) & set(free_ports(50))
    other.join()
    ours.close()
    theirs.close()
