"""Where a machine listens as gloo and NCCL would, and what it answers to those who come."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterable

from lightning_loco.doctor.addresses import Addresses
from lightning_loco.doctor.interfaces import Interface
from lightning_loco.doctor.messages import Bulk, Counted, Door, Here, Knock, Ping
from lightning_loco.doctor.records import GarbledError, printable, receive, write

LONGEST_LINE_BYTES = 4096
MOST_BULK_BYTES = 8 * 2**20
MOST_BULK_S = 1.0
VISIT_S = 10.0
"""No visitor stays for longer."""

KNOCK_S = 2.0
MOST_VISITORS = 1024

_PIECE_BYTES = 2**16


class Doors:
    """Listening sockets, one for each address, each at a free port.

    Args:
        rank: Of this machine.
        found: Where gloo and NCCL would listen.

    Attributes:
        records: What others need to know of them.
        faults: Addresses at which nobody can listen, with the mend.
    """

    def __init__(self, rank: int, found: Addresses) -> None:
        self._rank = rank
        self._token: asyncio.Future[str] | None = None
        self._num_visitors = 0
        self._sockets: list[socket.socket] = []
        self.records: list[Door] = []
        self.faults: list[str] = []
        for use, one in _uses(found):
            self._open(use, one)

    def _open(self, use: str, one: Interface) -> None:
        is_ipv6 = ":" in one.address
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        try:
            listening = socket.create_server((one.address, 0), family=family)
        except OSError as error:
            text = (
                f"{use} cannot listen at {one.address} ({one.name}): {error.strerror}; choose "
                "another interface with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            )
            self.faults.append(printable(text))
            return
        self._sockets.append(listening)
        self.records.append(Door(use, one.name, one.address, listening.getsockname()[1]))

    def expect(self, token: str) -> None:
        """Answer to those who show this token, also if they came before it was known here."""
        if self._token is not None and not self._token.done():
            self._token.set_result(token)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Answer while the context lasts; closes the sockets at its end."""
        self._token = asyncio.get_running_loop().create_future()
        limit = LONGEST_LINE_BYTES
        servers = [
            await asyncio.start_server(self._answer, sock=one, limit=limit) for one in self._sockets
        ]
        try:
            yield
        finally:
            for server in servers:
                server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_visitors += 1
        try:
            if self._num_visitors <= MOST_VISITORS:
                await asyncio.wait_for(self._serve(reader, writer), VISIT_S)
        except (GarbledError, OSError, asyncio.TimeoutError):
            pass  # a stranger, or one that has gone
        except asyncio.CancelledError:
            pass  # all is over; passed on, it would end up as a traceback of Python 3.11's streams
        finally:
            self._num_visitors -= 1
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knock = await receive(reader, KNOCK_S, Knock)
        assert self._token is not None
        if knock.token != await asyncio.wait_for(asyncio.shield(self._token), KNOCK_S):
            return
        writer.write(write(Here(self._rank)))
        while True:
            wish = await receive(reader, VISIT_S, Ping, Bulk)
            if isinstance(wish, Bulk):
                writer.write(write(await _count(reader, min(wish.seconds, MOST_BULK_S))))
            else:
                writer.write(write(wish))
            await writer.drain()
            if isinstance(wish, Bulk):
                while await reader.read(_PIECE_BYTES):
                    pass  # closing before the rest has come would destroy the answer


async def _count(reader: asyncio.StreamReader, limit_s: float) -> Counted:
    """Bytes that come before the time is up, or until there are enough."""
    count = 0

    async def add() -> None:
        nonlocal count
        while count < MOST_BULK_BYTES and (piece := await reader.read(_PIECE_BYTES)):
            count += len(piece)

    began = time.monotonic()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(add(), limit_s)
    return Counted(count, time.monotonic() - began)


def _uses(found: Addresses) -> Iterable[tuple[str, Interface]]:
    """Each address once, with who would listen there."""
    for one in found.gloo:
        yield ("gloo and NCCL" if one in found.nccl else "gloo"), one
    for one in found.nccl:
        if one not in found.gloo:
            yield "NCCL", one
