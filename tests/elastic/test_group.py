"""Messages between members of a real group, one of which dies within a message."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch

from lightning_loco.elastic.group import Groups
from lightning_loco.elastic.quorum import Plan
from tests.limits import SOON_S
from tests.pool import PRELOADED, Pool

_processes = multiprocessing.get_context("forkserver")

TIMEOUT_S = 60.0
NUMEL = 2**26
"""Elements of a message that takes longer than the life of the member that dies."""


def plan_of(place: int, stores: tuple[str, ...]) -> Plan:
    """A round of all members, in a new group."""
    names = tuple(f"m{i}" for i in range(len(stores)))
    return Plan(f"test/{len(names)}", names, place, stores, True, 0, (), 0, 0)


def opened(place: int, stores: tuple[str, ...], groups: Groups) -> Groups:
    groups.open(plan_of(place, stores))
    return groups


def swap_around(rank: int, world: int) -> tuple[dict[int, torch.Tensor], int]:
    """Send to the next one, receive from the one before."""
    groups = Groups("127.0.0.1", TIMEOUT_S)
    stores: list[str] = [""] * world
    torch.distributed.all_gather_object(stores, groups.address)
    opened(rank, tuple(stores), groups)
    inbox = {(rank - 1) % world: torch.zeros(5)}
    for value in (rank, 10 + rank):
        groups.swap({(rank + 1) % world: torch.full((5,), float(value))}, inbox)
    torch.distributed.barrier()
    groups.close()
    return inbox, rank


def test_messages_go_around(pool: Pool) -> None:
    for inbox, rank in pool.run(swap_around, world=3):
        before = (rank - 1) % 3
        assert torch.equal(inbox[before], torch.full((5,), 10.0 + before))


def member(place: int, line: Connection, dies: bool, sends: bool) -> None:
    """Exchange a message with the other member; die within it, or say how long it took to fail."""
    groups = Groups("127.0.0.1", TIMEOUT_S)
    line.send(groups.address)
    opened(place, line.recv(), groups)
    message = torch.ones(NUMEL)
    if dies:
        threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        if sends:
            groups.swap({1 - place: message}, {})
        else:
            groups.swap({}, {1 - place: message})
    except RuntimeError:
        line.send(time.monotonic() - began)
    else:
        line.send(None)


@pytest.mark.process
@pytest.mark.parametrize("sender_dies", [False, True])
def test_a_death_within_a_message_is_noticed_at_once(sender_dies: bool) -> None:
    _processes.set_forkserver_preload(PRELOADED)
    lines = [_processes.Pipe() for _ in range(2)]
    roles = ((False, not sender_dies), (True, sender_dies))
    members = [
        _processes.Process(target=member, args=(place, lines[place][1], *roles[place]))
        for place in range(2)
    ]
    for process in members:
        process.start()
    try:
        stores = tuple(line.recv() for line, _ in lines)
        for line, _ in lines:
            line.send(stores)
        assert lines[0][0].poll(TIMEOUT_S)
        assert lines[0][0].recv() < SOON_S
        members[1].join()
        assert members[1].exitcode == -signal.SIGKILL
    finally:
        for process in members:
            process.kill()
            process.join()
