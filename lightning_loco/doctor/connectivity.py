"""Which machines reach which others: each listens where gloo would, and connects to all others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from lightning_loco.doctor.facts import Facts, family_of
from lightning_loco.doctor.messages import TIMEOUTS, BadMessageError, encode, receive

FAILURES = {
    "silent": "no answer, as when a firewall drops packets",
    "refused": "the connection is refused, by a firewall or by another machine with that address",
    "unreachable": "there is no way to that address",
    "stranger": "something else answers there, so another machine has that address, too",
    "stalled": "the connection opens and then breaks or stalls, as when large packets are lost",
}

CONNECT_SHARE = 0.35
"""Share of the time of all checks after which a connection has failed."""

LARGE_SHARE = 0.65
"""The same for the large packets that follow."""

_LARGE_BYTES = 10_000  # more than the largest packets of usual networks
_LONGEST_LINE_BYTES = 2**11
_VISIT_S = 10.0
_NUM_ROUND_TRIPS = 4


@dataclass(frozen=True)
class Contact:
    """What came of a connection to another machine.

    Attributes:
        target: Its number.
        failure: Empty if all is well, else one of :data:`FAILURES`.
        round_trip_s: The shortest of a few; 0 if it failed.
    """

    target: int
    failure: str
    round_trip_s: float


@dataclass(frozen=True)
class Results:
    """What a machine has found out about the others.

    Attributes:
        rank: Of the machine.
        contacts: One for each of the others.
        slow_names: Addresses for which the name server took too long.
    """

    rank: int
    contacts: tuple[Contact, ...]
    slow_names: tuple[str, ...]

    def are_of(self, rank: int, present: Collection[int]) -> bool:
        """Whether they can be those of a machine, among those that are present."""
        targets = [one.target for one in self.contacts]
        return (
            self.rank == rank
            and sorted([rank, *targets]) == sorted(present)
            and all(one.failure in ("", *FAILURES) for one in self.contacts)
        )


@dataclass(frozen=True)
class Answer:
    """What a machine says to who connects, and again when large packets have come."""

    rank: int
    name: str


class ConnectError(Exception):
    """No connection; the text is one of :data:`FAILURES`."""


def listen(address: str, port: int) -> socket.socket:
    """Listen at an address, or at all addresses if it is empty.

    Raises:
        OSError: If the address is not here, or the port is taken.
    """
    if not address and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((address, port), family=family_of(address))


@contextlib.asynccontextmanager
async def answering(facts: Facts, listening: socket.socket) -> AsyncIterator[None]:
    """Answer to the other machines while the context lasts, which closes the socket."""
    answer = functools.partial(_answer, encode(Answer(facts.rank, facts.name)))
    server = await asyncio.start_server(answer, sock=listening)
    try:
        yield
    finally:
        server.close()


async def _answer(line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def serve() -> None:
        writer.write(line)
        await reader.readexactly(_LARGE_BYTES)
        writer.write(line)
        while await reader.read(1):
            writer.write(b".")
            await writer.drain()

    with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
        await asyncio.wait_for(serve(), _VISIT_S)
    writer.transport.abort()


async def connect(
    address: str, port: int, limit_s: float, longest_line: int = _LONGEST_LINE_BYTES
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an address.

    Raises:
        ConnectError: If that is not possible in time.
    """
    try:
        ip_address(address)  # a name would be asked of a name server
        opening = asyncio.open_connection(address, port, limit=longest_line)
        return await asyncio.wait_for(opening, max(limit_s, 0))
    except ConnectionRefusedError as error:
        raise ConnectError("refused") from error
    except TIMEOUTS as error:
        raise ConnectError("silent") from error
    except (OSError, ValueError, OverflowError) as error:
        raise ConnectError("unreachable") from error


async def connect_to_all(machines: Sequence[Facts], checks_s: float) -> tuple[Contact, ...]:
    """Connect to machines, all at once, within a share of the time; what came of each."""
    return tuple(await asyncio.gather(*(_contact(one, checks_s) for one in machines)))


async def _contact(there: Facts, checks_s: float) -> Contact:
    began = time.monotonic()
    try:
        reader, writer = await connect(there.address, there.port, CONNECT_SHARE * checks_s)
    except ConnectError as error:
        return Contact(there.rank, str(error), 0.0)
    failure = "stranger"
    try:
        left_s = began + CONNECT_SHARE * checks_s - time.monotonic()
        if await receive(reader, left_s, Answer) == Answer(there.rank, there.name):
            failure = "stalled"
            left_s = began + LARGE_SHARE * checks_s - time.monotonic()
            round_trip_s = await asyncio.wait_for(_exchange(reader, writer), left_s)
            return Contact(there.rank, "", round_trip_s)
    except (BadMessageError, OSError, EOFError, asyncio.TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return Contact(there.rank, failure, 0.0)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    """Send large packets; then the shortest of a few round trips, in seconds."""
    writer.write(bytes(_LARGE_BYTES))
    await reader.readline()
    times = []
    for _ in range(_NUM_ROUND_TRIPS):
        began = time.monotonic()
        writer.write(b".")
        await reader.readexactly(1)
        times.append(time.monotonic() - began)
    return min(times)
