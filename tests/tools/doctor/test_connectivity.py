"""Results of connections to addresses chosen by a test."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from lightning_loco.tools.doctor import connectivity
from lightning_loco.tools.doctor.connectivity import (
    Identity,
    answering,
    connect_to_all,
    encode,
    listen,
)
from lightning_loco.tools.doctor.facts import Facts
from tests.tools.doctor.fake_machine import facts_of

CHECKS_S = 1.0


def target(address: str = "127.0.0.1", port: int = 0) -> Facts:
    return facts_of(1, 2, address=address, port=port)


def failure_of(facts: Facts) -> str:
    (result,) = asyncio.run(connect_to_all([facts], CHECKS_S))
    assert result.target == 1
    assert result.round_trip_s == 0
    return result.failure


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", ""])
def test_machine_can_be_reached(address: str) -> None:
    async def reach() -> None:
        listener = listen(address, 0)
        facts = target(address or "127.0.0.1", listener.getsockname()[1])
        async with answering(facts, listener):
            results = await connect_to_all([facts, facts], 10.0)
        assert [result.failure for result in results] == ["", ""]
        assert all(0 < result.round_trip_s < 1 for result in results)

    asyncio.run(reach())


def test_another_machine_with_the_same_address() -> None:
    async def reach() -> None:
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        async with answering(facts_of(1, 2, name="another"), listener):
            (result,) = await connect_to_all([target(port=port)], 10.0)
        assert result.failure == "wrong host"

    asyncio.run(reach())


def test_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        _, port = closed.getsockname()
    assert failure_of(target(port=port)) == "refused"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems answer when a queue is full")
def test_port_that_does_not_answer() -> None:
    with silent_socket() as silent:
        assert failure_of(target(*silent.getsockname())) == "silent"


def test_unreachable_addresses(subtests: pytest.Subtests) -> None:
    # TCP cannot connect to a multicast address. Some networks refuse other reserved addresses.
    for address, port in [("224.0.0.1", 40000), ("no-address", 40000), ("127.0.0.1", 10**9)]:
        with subtests.test(address=address, port=port):
            assert failure_of(target(address, port)) == "unreachable"


def test_port_of_another_program(subtests: pytest.Subtests) -> None:
    for answer in [b"SSH-2.0-OpenSSH_9.6\r\n", b"", b"x" * 100_000]:
        with subtests.test(answer=answer[:10]), other_program(answer) as other:
            assert failure_of(target(*other.getsockname())) == "wrong host"


def test_machine_that_stops_answering() -> None:
    with other_program(encode(Identity(1, "node-1"))) as other:
        assert failure_of(target(*other.getsockname())) == "stalled"


def test_other_clients_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "_MAX_CONNECTION_S", 0.1)

    async def visit() -> None:
        listener = listen("127.0.0.1", 0)
        async with answering(target(), listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.readline() == encode(Identity(1, "node-1"))
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(visit())


@contextmanager
def silent_socket() -> Iterator[socket.socket]:
    """Yield a port whose queue is full: Linux drops further connections, like a firewall."""
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener


@contextmanager
def other_program(answer: bytes) -> Iterator[socket.socket]:
    """Yield a port of another program, which sends different data and then disconnects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)

        def reply() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(answer)

        replying = threading.Thread(target=reply)
        replying.start()
        try:
            yield listener
        finally:
            replying.join()
