"""What comes of connections to addresses that a test chooses."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from lightning_loco.doctor import connectivity
from lightning_loco.doctor.connectivity import Answer, answering, connect_to_all, listen
from lightning_loco.doctor.facts import Facts
from lightning_loco.doctor.messages import encode
from tests.doctor.fake_machine import facts_of

CHECKS_S = 1.0


def there(address: str = "127.0.0.1", port: int = 0) -> Facts:
    return facts_of(1, 2, address=address, port=port)


def failure_of(facts: Facts) -> str:
    (contact,) = asyncio.run(connect_to_all([facts], CHECKS_S))
    assert contact.target == 1
    assert contact.round_trip_s == 0
    return contact.failure


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", ""])
def test_machines_that_reach_each_other(address: str) -> None:
    async def reach() -> None:
        listening = listen(address, 0)
        facts = there(address or "127.0.0.1", listening.getsockname()[1])
        async with answering(facts, listening):
            contacts = await connect_to_all([facts, facts], 10.0)
        assert [contact.failure for contact in contacts] == ["", ""]
        assert all(0 < contact.round_trip_s < 1 for contact in contacts)

    asyncio.run(reach())


def test_another_machine_with_that_address() -> None:
    async def reach() -> None:
        listening = listen("127.0.0.1", 0)
        port = listening.getsockname()[1]
        async with answering(facts_of(1, 2, name="another"), listening):
            (contact,) = await connect_to_all([there(port=port)], 10.0)
        assert contact.failure == "stranger"

    asyncio.run(reach())


def test_a_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        _, port = closed.getsockname()
    assert failure_of(there(port=port)) == "refused"


@pytest.mark.skipif(sys.platform != "linux", reason="others answer when a queue is full")
def test_a_port_that_does_not_answer() -> None:
    with silent_socket() as silent:
        assert failure_of(there(*silent.getsockname())) == "silent"


def test_addresses_that_lead_nowhere(subtests: pytest.Subtests) -> None:
    # TCP leads to no multicast address; other reserved ones are refused on some networks.
    for address, port in [("224.0.0.1", 40000), ("no-address", 40000), ("127.0.0.1", 10**9)]:
        with subtests.test(address=address, port=port):
            assert failure_of(there(address, port)) == "unreachable"


def test_a_port_of_another_program(subtests: pytest.Subtests) -> None:
    for answer in [b"SSH-2.0-OpenSSH_9.6\r\n", b"", b"x" * 100_000]:
        with subtests.test(answer=answer[:10]), other_program(answer) as stranger:
            assert failure_of(there(*stranger.getsockname())) == "stranger"


def test_a_machine_that_stops_answering() -> None:
    with other_program(encode(Answer(1, "node-1"))) as stops:
        assert failure_of(there(*stops.getsockname())) == "stalled"


def test_strangers_at_the_port_are_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "_VISIT_S", 0.1)

    async def visit() -> None:
        listening = listen("127.0.0.1", 0)
        async with answering(there(), listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            assert await reader.readline() == encode(Answer(1, "node-1"))
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(visit())


@contextmanager
def silent_socket() -> Iterator[socket.socket]:
    """A port whose queue is full: Linux drops what else comes, as a firewall does."""
    with socket.socket() as listening, ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening


@contextmanager
def other_program(answer: bytes) -> Iterator[socket.socket]:
    """A port at which somebody says something else, and hangs up on who listens to the end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)

        def talk() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(answer)

        talking = threading.Thread(target=talk)
        talking.start()
        try:
            yield listening
        finally:
            talking.join()
