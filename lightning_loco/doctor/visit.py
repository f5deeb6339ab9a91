"""Coming to the meeting: find machine 0, tell one's facts, try the doors, hear the summary."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Sequence
from functools import partial

from lightning_loco.doctor.contacts import REACH_SHARE, try_doors
from lightning_loco.doctor.deadlines import awaited
from lightning_loco.doctor.doors import Doors
from lightning_loco.doctor.facts import NAME_LIMIT_S
from lightning_loco.doctor.interfaces import Interface, interface_of
from lightning_loco.doctor.meeting import checks_s, longest_line_bytes
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
from lightning_loco.doctor.place import Place
from lightning_loco.doctor.records import GarbledError, receive, write

SLOW_LOOKUP_S = 0.5
"""A name server that takes longer is reported."""

_CONNECT_S = 2.0
_WELCOME_S = 2.0
_AGAIN_S = 0.2
_GRACE_S = 0.5
_BYTES_OF_A_CONTACT = 2**8
_SMALL_BYTES = 500


class MasterError(Exception):
    """Machine 0 cannot be reached, or has turned this machine away.

    Attributes:
        kind: ``name`` (it leads nowhere), ``refused`` (nobody listens), ``silent``,
            ``unreachable`` (no way there), ``stranger`` (another program answers), ``turned_away``,
            or ``lost`` (it has gone).
        address: Where it should be, as far as it is known.
        detail: What else is known.
    """

    def __init__(self, kind: str, address: str = "", detail: str = "") -> None:
        super().__init__(kind, address, detail)
        self.kind = kind
        self.address = address
        self.detail = detail


class Visit:
    """The way of one machine through the meeting.

    Args:
        place: Which machine this is.
        facts: Without the road to machine 0.
        own: Interfaces of this machine.
        doors: Open, for the others.
        deadline: When everything must be over, by the monotonic clock.

    Attributes:
        facts: With all that is known of this machine.
    """

    def __init__(
        self,
        place: Place,
        facts: Facts,
        own: Sequence[Interface],
        doors: Doors,
        deadline: float,
    ) -> None:
        self._place = place
        self._own = list(own)
        self._doors = doors
        self._deadline = deadline
        self._met_by = deadline - checks_s(place.timeout_s)
        self.facts = facts

    async def make(self) -> Summary:
        """Come, take part, and hear what all have found.

        Raises:
            MasterError: If machine 0 cannot be reached, or turns this machine away.
        """
        reader, writer = await self._come()
        address = str(writer.get_extra_info("peername")[0])
        try:
            return await self._take_part(reader, writer, address)
        except GarbledError as error:
            raise MasterError("stranger", address, str(error)) from error
        except OSError as error:
            raise MasterError("lost", address) from error
        finally:
            writer.transport.abort()

    async def _come(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to machine 0, again and again, since it may be started later."""
        while True:
            try:
                return await self._try_to_come()
            except MasterError:
                if time.monotonic() + _AGAIN_S > self._met_by:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def _try_to_come(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place, failure = self._place, MasterError("name")
        limit = longest_line_bytes(place.world) + _BYTES_OF_A_CONTACT * place.world**2 * 2
        for address in await self._addresses():
            limit_s = max(min(_CONNECT_S, self._met_by - time.monotonic()), _AGAIN_S)
            connecting = _connect(address, place.port, limit)
            try:
                return await asyncio.wait_for(connecting, limit_s)
            except asyncio.TimeoutError:
                failure = MasterError("silent", address)
            except ConnectionRefusedError:
                failure = MasterError("refused", address)
            except OSError as error:
                failure = MasterError("unreachable", address, error.strerror or "")
        raise failure

    async def _addresses(self) -> list[str]:
        """Of machine 0; none if its name is not known in time."""
        ask = partial(socket.getaddrinfo, self._place.host, None, type=socket.SOCK_STREAM)
        try:
            found = await awaited(NAME_LIMIT_S, ask)
        except (OSError, UnicodeError):
            return []
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    async def _take_part(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> Summary:
        self._learn_road(str(writer.get_extra_info("sockname")[0]))
        told_at, began = time.time(), time.monotonic()
        patience_s = max(self._met_by - began, 0.0)
        writer.write(write(Hello(PROTOCOL, self.facts, patience_s)))
        try:
            answer: Welcome | Refusal = await receive(reader, _WELCOME_S, Welcome, Refusal)
        except (GarbledError, OSError) as error:
            raise MasterError("stranger", address) from error
        round_trip_s = time.monotonic() - began
        if isinstance(answer, Refusal):
            raise MasterError("turned_away", address, answer.reason)
        roster = await receive(reader, self._met_by + _GRACE_S - time.monotonic(), Roster)
        self._doors.expect(roster.token)
        asked = [address] if self.facts.rank else [address, *roster.came_from]
        contacts, slow_lookups = await asyncio.gather(
            try_doors(self.facts, roster), _slow_lookups(asked, REACH_SHARE * roster.checks_s)
        )
        offset_s = told_at + round_trip_s / 2 - answer.clock_s
        results = Results(contacts, slow_lookups, offset_s, round_trip_s / 2)
        writer.write(write(results))
        summary = await receive(reader, self._deadline - time.monotonic(), Summary)
        if not summary.is_sound():
            raise GarbledError("no Summary")
        return summary

    def _learn_road(self, road_address: str) -> None:
        road = road_address.removeprefix("::ffff:")
        interface = interface_of(road, self._own)
        self.facts = dataclasses.replace(self.facts, road_interface=interface, road_address=road)


async def _connect(
    address: str, port: int, limit: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that sends small packets both ways: it works where large ones are lost."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_BYTES)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
        return await asyncio.open_connection(sock=connection, limit=limit)
    except BaseException:
        connection.close()
        raise


async def _slow_lookups(addresses: list[str], limit_s: float) -> tuple[str, ...]:
    """Those whose names take too long, in the form in which PyTorch's key-value store asks."""
    asked = sorted({one if ":" in one else f"::ffff:{one}" for one in addresses})
    limit_s = min(SLOW_LOOKUP_S, limit_s)
    answers = await asyncio.gather(*(_is_quick(one, limit_s) for one in asked))
    return tuple(one for one, quick in zip(asked, answers, strict=True) if not quick)


async def _is_quick(address: str, limit_s: float) -> bool:
    try:
        await awaited(limit_s, partial(socket.getnameinfo, (address, 0, 0, 0), 0))
    except TimeoutError:
        return False
    except OSError:
        return True  # that there is no name is an answer, too
    return True
