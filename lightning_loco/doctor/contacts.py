"""Trying the doors of all other machines: can they be reached, how far are they, how wide the road.

All are tried at once. Then each machine measures one after the other, beginning with the next one,
so that in every turn each sends to one machine and hears from one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextlib import suppress
from dataclasses import dataclass

from lightning_loco.doctor.doors import (
    LONGEST_LINE_BYTES,
    MOST_BULK_BYTES,
    MOST_BULK_S,
    VISIT_S,
)
from lightning_loco.doctor.messages import (
    Bulk,
    Contact,
    Counted,
    Door,
    Facts,
    Here,
    Knock,
    Ping,
    Roster,
)
from lightning_loco.doctor.records import GarbledError, receive, write

REACH_SHARE = 0.35
"""Share of the time of all checks in which doors must open."""

MEASURE_SHARE = 0.3
"""Share of it for measuring all of them."""

WAIT_SHARE = 0.15
"""Share of it for answers that are late, if doors have opened quickly."""

FIRST_S = 0.3
"""Shortest time for the first one, enough to notice whether large packets are lost."""

PATIENCE_S = 1.0
"""Longest wait for an answer that is due, if there is time."""

NUM_PINGS = 5
_STALLED_S = 0.1
_STALLED_ROUND_TRIPS = 4
_PIECE = bytes(2**16)
_GRACE_S = 0.3  # for the last answer


@dataclass
class _Visit:
    """A door that is tried, and the connection while there is one."""

    door: Door
    contact: Contact
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None

    def fail(self, failure: str) -> None:
        self.contact = dataclasses.replace(self.contact, failure=failure)
        self.leave()

    def leave(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        self.reader = self.writer = None


async def try_doors(own: Facts, roster: Roster) -> tuple[Contact, ...]:
    """What comes of trying all doors of the others.

    Args:
        own: Of this machine.
        roster: All who are there, and how much time there is.
    """
    others = [facts for facts in roster.present if facts.rank != own.rank]
    others.sort(key=lambda facts: (facts.rank - own.rank) % own.world)
    visits = [
        _Visit(door, Contact(own.rank, facts.rank, number, "", 0.0, 0.0))
        for facts in others
        for number, door in enumerate(facts.doors)
    ]
    began = time.monotonic()
    try:
        reach_s = REACH_SHARE * roster.checks_s
        await asyncio.gather(*(_reach(visit, roster.token, reach_s) for visit in visits))
        measure_s = MEASURE_SHARE * roster.checks_s
        turn_s = min(measure_s / max(len(visits), 1), MOST_BULK_S)
        wait_s = WAIT_SHARE * roster.checks_s
        ends_at = min(began + reach_s, time.monotonic() + wait_s) + measure_s
        open_ones = [visit for visit in visits if visit.reader is not None]
        for number, visit in enumerate(open_ones):
            left_s = ends_at - time.monotonic()
            if left_s > 0:
                limit_s = min(turn_s if number else max(turn_s, FIRST_S), left_s)
                await _measure(visit, limit_s, min(left_s, limit_s + PATIENCE_S) + _GRACE_S)
    finally:
        for visit in visits:
            visit.leave()
    return tuple(visit.contact for visit in visits)


async def _reach(visit: _Visit, token: str, limit_s: float) -> None:
    """Connect, and see that the right machine answers."""
    door, deadline = visit.door, time.monotonic() + limit_s
    try:
        connecting = asyncio.open_connection(door.address, door.port, limit=LONGEST_LINE_BYTES)
        reader, writer = await asyncio.wait_for(connecting, limit_s)
    except asyncio.TimeoutError:
        return visit.fail("silent")
    except ConnectionRefusedError:
        return visit.fail("refused")
    except OSError:
        return visit.fail("unreachable")
    visit.reader, visit.writer = reader, writer
    try:
        writer.write(write(Knock(token, visit.contact.source)))
        here = await receive(reader, deadline - time.monotonic(), Here)
    except (GarbledError, OSError):
        return visit.fail("stranger")
    if here.rank != visit.contact.target:
        return visit.fail("stranger")
    return None


async def _measure(visit: _Visit, limit_s: float, patience_s: float) -> None:
    """Round trips, then as many bytes as the time allows.

    If not even the answer comes in time, as on a narrow road that others use, nothing is known.
    """
    try:
        round_trip_s, counted = await asyncio.wait_for(_exchange(visit, limit_s), patience_s)
    except (asyncio.TimeoutError, TimeoutError):
        return visit.leave()
    except (GarbledError, OSError):
        return visit.fail("broken")
    if counted.count == 0:
        is_stalled = counted.seconds > max(_STALLED_S, _STALLED_ROUND_TRIPS * round_trip_s)
        return visit.fail("broken") if is_stalled else visit.leave()
    rate = counted.count / counted.seconds if counted.seconds > 0 else 0.0
    visit.contact = dataclasses.replace(
        visit.contact, round_trip_s=round_trip_s, bytes_per_s=max(rate, 0.0)
    )
    return visit.leave()


async def _exchange(visit: _Visit, limit_s: float) -> tuple[float, Counted]:
    assert visit.reader is not None
    assert visit.writer is not None
    deadline, shortest = time.monotonic() + limit_s, 0.0
    for _ in range(NUM_PINGS):
        began = time.monotonic()
        visit.writer.write(write(Ping()))
        await receive(visit.reader, VISIT_S, Ping)
        passed = time.monotonic() - began
        shortest = min(shortest or passed, passed)
        if time.monotonic() + passed > deadline:
            break
    seconds = max(deadline - time.monotonic(), limit_s / 4)
    visit.writer.write(write(Bulk(seconds)))
    sending = asyncio.create_task(_send_pieces(visit.writer))
    try:
        return shortest, await receive(visit.reader, VISIT_S, Counted)
    finally:
        sending.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await sending


async def _send_pieces(writer: asyncio.StreamWriter) -> None:
    for _ in range(MOST_BULK_BYTES // len(_PIECE)):
        writer.write(_PIECE)
        await writer.drain()
