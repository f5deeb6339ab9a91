"""Messages between machines, and the check of which machines can connect to which others.

A message is one line of JSON. Anybody who can reach a port can send anything, so only lines are
accepted that have exactly the fields and types of an expected dataclass, within a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_loco.tools.doctor.facts import MAX_TEXT_LENGTH, TIMEOUTS, Facts, family_of

T = TypeVar("T")

# ------------------------------------------------------------------------------ messages

_MAX_NUMBER = 2**53


class BadMessageError(ValueError):
    """A line is not a message of an expected kind."""


def encode(message: Any) -> bytes:
    """Encode a dataclass as one line: its name and its fields."""
    named = {type(message).__name__: dataclasses.asdict(message)}
    return json.dumps(named, allow_nan=False).encode() + b"\n"


def decode(line: bytes, *kinds: type[T]) -> T:
    """Decode a line as one of these dataclasses; BadMessageError if it is anything else.

    Texts are cut to ``MAX_TEXT_LENGTH`` characters, and characters that cannot be printed become
    ``?``.
    """
    try:
        ((name, value),) = json.loads(line.decode()).items()
        kind = next(kind for kind in kinds if kind.__name__ == name)
    except (ValueError, AttributeError, RecursionError, StopIteration) as error:
        raise BadMessageError(f"no {' or '.join(kind.__name__ for kind in kinds)}") from error
    message: T = _parse(kind, value)
    return message


_field_types = functools.cache(get_type_hints)


def _parse(kind: Any, value: Any) -> Any:
    """Convert a value of JSON to the declared type of a field."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        types = _field_types(kind)
        if isinstance(value, dict) and value.keys() == types.keys():
            return kind(**{name: _parse(one, value[name]) for name, one in types.items()})
    elif get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_parse(get_args(kind)[0], one) for one in value)
    elif get_origin(kind) is dict and isinstance(value, dict):
        return {_parse(str, key): _parse(str, one) for key, one in value.items()}
    elif kind is str and type(value) is str:
        return "".join(one if one.isprintable() else "?" for one in value[:MAX_TEXT_LENGTH])
    elif kind is int and type(value) is int and abs(value) <= _MAX_NUMBER:
        return value
    elif kind is float and type(value) in (int, float) and abs(value) <= _MAX_NUMBER:
        return float(value)
    raise BadMessageError(f"{str(value)[:100]!r} where {kind} is expected")


async def receive(reader: asyncio.StreamReader, limit_s: float, *kinds: type[T]) -> T:
    """Receive the next message, one of these dataclasses, within ``limit_s`` seconds.

    BadMessageError if it is another one, or longer than the reader's limit; TimeoutError if no
    whole line arrives in time; ConnectionError if the connection ends before.
    """
    try:
        line = await asyncio.wait_for(reader.readline(), max(limit_s, 0))
    except TIMEOUTS as error:
        raise TimeoutError from error
    except ValueError as error:
        raise BadMessageError("a line that is too long") from error
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection has ended")
    return decode(line, *kinds)


# --------------------------------------------------------------------------- connections

FAILURES = {
    "silent": "no answer, as when a firewall drops packets",
    "refused": "the connection is refused, by a firewall or by another machine with that address",
    "unreachable": "there is no route to that address",
    "wrong host": "another program answers, so another machine may have the same address",
    "stalled": "the connection opens and then breaks or stalls, as when large packets are lost",
}
"""Why a connection failed."""

CONNECT_SHARE = 0.35
"""Share of the time for all checks after which a connection has failed to open."""

LARGE_PACKETS_SHARE = 0.65
"""Share of the time for all checks after which the exchange of large packets has failed."""

TRANSFER_SHARE = 0.6
"""Share of the time for measuring the bandwidth in which data is sent; the rest is for replies."""

_LARGE_BYTES = 10_000  # more than the largest packets of usual networks
_MAX_LINE_BYTES = 2**11
_BLOCK_BYTES = 2**18
_MAX_CONNECTION_S = 10.0
_NUM_ROUND_TRIPS = 4


@dataclass(frozen=True)
class ConnectionResult:
    """The result of connecting to another machine.

    Attributes:
        target: Rank of the other machine.
        failure: One of :data:`FAILURES`, or empty if the connection works.
        round_trip_s: Shortest of a few round trips in seconds; 0 if the connection failed.
    """

    target: int
    failure: str
    round_trip_s: float


@dataclass(frozen=True)
class Results:
    """The results of a machine's checks of the others.

    Attributes:
        rank: Rank of this machine.
        connections: The results of the connections to all others.
        slow_names: Addresses whose names took too long to look up.
        mbit_per_s: Bandwidth to the next machine, in megabits per second; 0 if not measured.
    """

    rank: int
    connections: tuple[ConnectionResult, ...]
    slow_names: tuple[str, ...]
    mbit_per_s: float

    def are_valid(self, rank: int, present: Collection[int]) -> bool:
        """Whether these can be the results of machine ``rank`` if those in ``present`` joined."""
        targets = [one.target for one in self.connections]
        return (
            self.rank == rank
            and sorted([rank, *targets]) == sorted(present)
            and all(one.failure in ("", *FAILURES) for one in self.connections)
            and self.mbit_per_s >= 0
        )


@dataclass(frozen=True)
class Identity:
    """A machine sends it when another one connects, and again after the large packets."""

    rank: int
    name: str


@dataclass(frozen=True)
class Transfer:
    """A machine sends it before data that goes on for ``seconds``."""

    seconds: float


@dataclass(frozen=True)
class TransferReply:
    """The reply to a :class:`Transfer`: the bytes of its second half, and how long that took."""

    num_bytes: int
    seconds: float


class ConnectError(Exception):
    """A connection could not be opened. The text is one of :data:`FAILURES`."""


def listen(address: str, port: int) -> socket.socket:
    """Listen on an address, or on all addresses if it is empty.

    OSError if this machine does not have the address, or the port is taken.
    """
    if not address and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((address, port), family=family_of(address))


@contextlib.asynccontextmanager
async def answering(facts: Facts, listener: socket.socket) -> AsyncIterator[None]:
    """Answer the connections of other machines within the context, then close the listener."""
    answer = functools.partial(_answer, encode(Identity(facts.rank, facts.name)))
    server = await asyncio.start_server(answer, sock=listener)
    try:
        yield
    finally:
        server.close()


async def _answer(
    identity: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    async def serve() -> None:
        writer.write(identity)
        await reader.readexactly(_LARGE_BYTES)
        writer.write(identity)
        while (byte := await reader.read(1)) == b".":
            writer.write(b".")
            await writer.drain()
        if byte:
            writer.write(encode(await _count(reader)))
            await writer.drain()
            while await reader.read(_BLOCK_BYTES):  # until the other machine has the reply
                pass

    with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
        await asyncio.wait_for(serve(), _MAX_CONNECTION_S)
    writer.transport.abort()


async def connect(
    address: str, port: int, limit_s: float, max_line_bytes: int = _MAX_LINE_BYTES
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an address; ConnectError if that is not possible in time."""
    try:
        ip_address(address)  # fails for a name, which would be looked up at a name server
        opening = asyncio.open_connection(address, port, limit=max_line_bytes)
        return await asyncio.wait_for(opening, max(limit_s, 0))
    except ConnectionRefusedError as error:
        raise ConnectError("refused") from error
    except TIMEOUTS as error:
        raise ConnectError("silent") from error
    except (OSError, ValueError, OverflowError) as error:
        raise ConnectError("unreachable") from error


async def connect_to_all(
    machines: Sequence[Facts], checks_s: float
) -> tuple[ConnectionResult, ...]:
    """Connect to machines, all at the same time, within a share of the time for all checks."""
    return tuple(await asyncio.gather(*(_test_connection(one, checks_s) for one in machines)))


async def _test_connection(target: Facts, checks_s: float) -> ConnectionResult:
    started = time.monotonic()
    try:
        reader, writer = await connect(target.address, target.port, CONNECT_SHARE * checks_s)
    except ConnectError as error:
        return ConnectionResult(target.rank, str(error), 0.0)
    failure = "wrong host"
    try:
        left_s = started + CONNECT_SHARE * checks_s - time.monotonic()
        if await receive(reader, left_s, Identity) == Identity(target.rank, target.name):
            failure = "stalled"
            left_s = started + LARGE_PACKETS_SHARE * checks_s - time.monotonic()
            round_trip_s = await asyncio.wait_for(_measure_round_trip(reader, writer), left_s)
            return ConnectionResult(target.rank, "", round_trip_s)
    except (BadMessageError, OSError, EOFError, asyncio.TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return ConnectionResult(target.rank, failure, 0.0)


async def measure_bandwidth(target: Facts, seconds: float) -> float:
    """Send data to another machine; return megabits per second, 0 if it fails within ``seconds``.

    The other machine counts in the second half only, when TCP has reached its full rate.
    """
    with contextlib.suppress(ConnectError, BadMessageError, OSError, *TIMEOUTS):
        received = await asyncio.wait_for(_transfer(target, seconds), seconds)
        return 8e-6 * received.num_bytes / received.seconds if received.seconds > 0 else 0.0
    return 0.0


async def _transfer(target: Facts, limit_s: float) -> TransferReply:
    reader, writer = await connect(target.address, target.port, limit_s)
    sending = asyncio.ensure_future(_send(writer, TRANSFER_SHARE * limit_s))
    try:
        for _ in range(2):
            await receive(reader, limit_s, Identity)
        return await receive(reader, limit_s, TransferReply)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, seconds: float) -> None:
    """Announce a transfer, and send until cancelled."""
    writer.write(bytes(_LARGE_BYTES) + b"t" + encode(Transfer(seconds)))
    block = bytes(_BLOCK_BYTES)
    while True:
        writer.write(block)
        await writer.drain()


async def _count(reader: asyncio.StreamReader) -> TransferReply:
    """Count the bytes of the second half of a transfer that has been announced."""
    transfer = await receive(reader, _MAX_CONNECTION_S, Transfer)
    seconds = min(transfer.seconds, _MAX_CONNECTION_S)
    now = time.monotonic()
    half, end, num_bytes = now + seconds / 2, now + seconds, 0
    with contextlib.suppress(*TIMEOUTS):
        while now < end and (data := await asyncio.wait_for(reader.read(_BLOCK_BYTES), end - now)):
            now = time.monotonic()
            num_bytes += len(data) if now > half else 0
    return TransferReply(num_bytes, max(time.monotonic() - half, 0.0))


async def _measure_round_trip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    """Send large packets, then return the shortest of a few round trips in seconds."""
    writer.write(bytes(_LARGE_BYTES))
    await reader.readline()
    times = []
    for _ in range(_NUM_ROUND_TRIPS):
        started = time.monotonic()
        writer.write(b".")
        await reader.readexactly(1)
        times.append(time.monotonic() - started)
    return min(times)
