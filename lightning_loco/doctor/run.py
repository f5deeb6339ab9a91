"""One run of the doctor, from the command line to the exit status."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import shutil
import socket
import sys
import time
from contextlib import suppress

from lightning_loco.doctor.doors import Doors
from lightning_loco.doctor.facts import gather_facts
from lightning_loco.doctor.findings import FAILED
from lightning_loco.doctor.meeting import Meeting, open_meeting
from lightning_loco.doctor.messages import Summary
from lightning_loco.doctor.place import Place, find_place
from lightning_loco.doctor.report import report
from lightning_loco.doctor.roads import measured
from lightning_loco.doctor.this_machine import judge_this_machine
from lightning_loco.doctor.verdict import judge, judge_alone
from lightning_loco.doctor.visit import MasterError, Visit

_MOST_ROADS = 12


def run(args: argparse.Namespace) -> int:
    """Examine this machine together with the others, if there are, and print what is found.

    Args:
        args: Of :func:`lightning_loco.doctor.place.add_arguments`.

    Returns:
        0 if all is well, 1 if something has failed.

    Raises:
        ValueError: If an argument is missing or out of range.
    """
    place = find_place(args, os.environ)
    if not place.is_first:
        return 0
    deadline = time.monotonic() + place.timeout_s
    facts, own, found = gather_facts(place)
    doors = Doors(place.rank, found)
    facts = dataclasses.replace(
        facts, doors=tuple(doors.records), faults=(*facts.faults, *doors.faults)
    )
    visit = Visit(place, facts, own, doors, deadline)
    try:
        summary = asyncio.run(_meet(visit, doors, place, deadline))
    except MasterError as error:
        findings, roads = judge_alone(place, visit.facts, error), []
    else:
        findings = judge(summary, visit.facts, place.world)
        roads = measured(summary, _MOST_ROADS)
    if place.world == 1:
        findings += judge_this_machine()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(report(place, visit.facts, findings, roads, width), flush=True)
    return int(any(one.status == FAILED for one in findings))


async def _meet(visit: Visit, doors: Doors, place: Place, deadline: float) -> Summary:
    """Take part in the meeting; machine 0 holds it as well."""
    async with doors.opened():
        if place.rank:
            return await visit.make()
        meeting = Meeting(place.world, deadline - time.monotonic())
        holding = asyncio.create_task(meeting.hold(_listen(place.port)))
        try:
            return await visit.make()
        finally:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(holding, max(deadline - time.monotonic(), 0))


def _listen(port: int) -> socket.socket:
    try:
        return open_meeting(port)
    except OSError as error:
        raise MasterError("taken", detail=error.strerror or "") from error
