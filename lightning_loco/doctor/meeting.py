"""The meeting of all machines, at the master's address: who is there, and what they have found."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from dataclasses import dataclass

from lightning_loco.doctor.messages import (
    PROTOCOL,
    Facts,
    Hello,
    Refusal,
    Results,
    Roster,
    Summary,
    Welcome,
)
from lightning_loco.doctor.records import GarbledError, printable, receive, write

HELLO_S = 2.0
CHECKS_S = 5.0
"""Seconds for all checks, once the machines have met; half of the whole time if that is less."""

SUMMARY_SHARE = 0.85
"""Share of them after which machine 0 waits for no more results."""

_MOST_STRANGERS = 64
_MOST_REFUSED = 16


def checks_s(timeout_s: float) -> float:
    """How much of the whole time is for the checks."""
    return min(CHECKS_S, timeout_s / 2)


def longest_line_bytes(world: int) -> int:
    """The longest record of one machine: what it says of itself and of each other one."""
    return 2**14 + 2**10 * world


def open_meeting(port: int) -> socket.socket:
    """Listen at all addresses, as PyTorch's key-value store does.

    Raises:
        OSError: If the port is taken.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


@dataclass
class _Guest:
    facts: Facts
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    came_from: str
    leaves_at: float


class Meeting:
    """Waits until all are there or the first must go, and brings together what they find.

    Args:
        world: How many machines should come.
        timeout_s: For everything, from now on.
    """

    def __init__(self, world: int, timeout_s: float) -> None:
        self._world = world
        self._checks_s = checks_s(timeout_s)
        self._ends_at = time.monotonic() + timeout_s - self._checks_s
        self._guests: dict[int, _Guest] = {}
        self._num_strangers = 0
        self._refused: list[str] = []
        self._has_begun = False
        self._news = asyncio.Event()

    async def hold(self, listening: socket.socket) -> None:
        """Do all that, for those who come to a listening socket, which is closed at the end."""
        limit = longest_line_bytes(self._world)
        server = await asyncio.start_server(self._receive, sock=listening, limit=limit)
        try:
            await self._gather_guests()
            await self._share(await self._send_out())
        finally:
            server.close()
            for guest in self._guests.values():
                guest.writer.close()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a machine in, or turn away who does not belong here."""
        self._num_strangers += 1
        try:
            if self._num_strangers > _MOST_STRANGERS + self._world:
                raise GarbledError("too many")
            hello = await receive(reader, HELLO_S, Hello)
        except (GarbledError, OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        finally:
            self._num_strangers -= 1
        came_from = str((writer.get_extra_info("peername") or ("?",))[0]).removeprefix("::ffff:")
        reason = printable(self._reason_against(hello, came_from))
        if reason:
            if len(self._refused) < _MOST_REFUSED:
                self._refused.append(reason)
            writer.write(write(Refusal(reason)))
            writer.close()
            return
        writer.write(write(Welcome(time.time())))
        leaves_at = time.monotonic() + hello.patience_s
        writer.transport.set_write_buffer_limits(high=0)  # what is drained has left
        guest = _Guest(hello.facts, reader, writer, came_from, leaves_at)
        self._guests[hello.facts.rank] = guest
        self._news.set()

    def _reason_against(self, hello: Hello, came_from: str) -> str:
        facts = hello.facts
        who = f"machine {facts.rank} ({facts.name}, {came_from})"
        if hello.protocol != PROTOCOL:
            return f"{who} runs another version of lightning-loco doctor: install the same"
        if facts.world != self._world:
            return (
                f"{who} expects {facts.world} machines and machine 0 {self._world}: give all the "
                "same --world"
            )
        if not 0 <= facts.rank < self._world:
            return f"{who} has a number that does not exist: give --rank 0 to {self._world - 1}"
        if facts.rank in self._guests:
            first = self._guests[facts.rank]
            return (
                f"there are two machines {facts.rank}: {first.facts.name} ({first.came_from}) and "
                f"{facts.name} ({came_from}): give each its own --rank"
            )
        if self._has_begun:
            return (
                f"{who} has come after the others had begun: start all at the same time, or raise "
                "--timeout"
            )
        return ""

    async def _gather_guests(self) -> None:
        while len(self._guests) < self._world:
            ends_at = min([self._ends_at, *(guest.leaves_at for guest in self._guests.values())])
            try:
                await asyncio.wait_for(self._news.wait(), max(ends_at - time.monotonic(), 0))
            except asyncio.TimeoutError:
                break
            self._news.clear()
        self._has_begun = True

    async def _send_out(self) -> Summary:
        """Have the guests try each other's doors, and wait for what they find."""
        guests = [self._guests[rank] for rank in sorted(self._guests)]
        roster = Roster(
            token=secrets.token_hex(8),
            checks_s=self._checks_s,
            present=tuple(guest.facts for guest in guests),
            came_from=tuple(guest.came_from for guest in guests),
        )
        results = await asyncio.gather(*(self._ask(guest, roster) for guest in guests))
        return Summary(roster.present, tuple(results), tuple(self._refused))

    async def _ask(self, guest: _Guest, roster: Roster) -> Results | None:
        try:
            guest.writer.write(write(roster))
            results = await receive(guest.reader, SUMMARY_SHARE * self._checks_s, Results)
        except (GarbledError, OSError):
            return None
        return results if results.is_sound(guest.facts.rank, roster.present) else None

    async def _share(self, summary: Summary) -> None:
        line = write(summary)
        for guest in self._guests.values():
            guest.writer.write(line)
        draining = (guest.writer.drain() for guest in self._guests.values())
        with contextlib.suppress(asyncio.TimeoutError):
            everyone = asyncio.gather(*draining, return_exceptions=True)
            await asyncio.wait_for(everyone, (1 - SUMMARY_SHARE) * self._checks_s)
