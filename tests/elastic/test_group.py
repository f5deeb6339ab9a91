"""Messages between members of a process group; one member dies during a message."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch

from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.quorum import QuorumPlan
from tests.harness.limits import SOON_S
from tests.harness.pool import PRELOADED, Pool

_processes = multiprocessing.get_context("forkserver")

TIMEOUT_S = 60.0
NUMEL = 2**26
"""Elements of a message that takes longer than the dying member stays alive."""


def plan_of(rank: int, stores: tuple[str, ...]) -> QuorumPlan:
    """Return the plan of a round of all members, in a new group."""
    names = tuple(f"m{i}" for i in range(len(stores)))
    return QuorumPlan(f"test/{len(names)}", names, rank, stores, True, 0, (), 0, 0)


def swap_in_ring(rank: int, world: int) -> tuple[dict[int, torch.Tensor], int]:
    """Send to the next member, receive from the previous one."""
    group = MemberGroup("127.0.0.1", TIMEOUT_S)
    stores: list[str] = [""] * world
    torch.distributed.all_gather_object(stores, group.address)
    group.open(plan_of(rank, tuple(stores)))
    inbox = {(rank - 1) % world: torch.zeros(5)}
    for value in (rank, 10 + rank):
        group.swap({(rank + 1) % world: torch.full((5,), float(value))}, inbox)
    torch.distributed.barrier()
    group.close()
    return inbox, rank


def test_members_swap_messages_in_a_ring(pool: Pool) -> None:
    for inbox, rank in pool.run(swap_in_ring, world=3):
        previous = (rank - 1) % 3
        assert torch.equal(inbox[previous], torch.full((5,), 10.0 + previous))


def run_member(rank: int, pipe: Connection, dies: bool, sends: bool) -> None:
    """Swap a message with the other member; die during it, or report how long it took to fail."""
    group = MemberGroup("127.0.0.1", TIMEOUT_S)
    pipe.send(group.address)
    group.open(plan_of(rank, pipe.recv()))
    message = torch.ones(NUMEL)
    if dies:
        threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGKILL)).start()
    started = time.monotonic()
    try:
        if sends:
            group.swap({1 - rank: message}, {})
        else:
            group.swap({}, {1 - rank: message})
    except RuntimeError:
        pipe.send(time.monotonic() - started)
    else:
        pipe.send(None)


@pytest.mark.process
@pytest.mark.parametrize("sender_dies", [False, True])
def test_a_death_during_a_message_is_detected_at_once(sender_dies: bool) -> None:
    _processes.set_forkserver_preload(PRELOADED)
    pipes = [_processes.Pipe() for _ in range(2)]
    roles = ((False, not sender_dies), (True, sender_dies))
    members = [
        _processes.Process(target=run_member, args=(rank, pipes[rank][1], *roles[rank]))
        for rank in range(2)
    ]
    for process in members:
        process.start()
    try:
        stores = tuple(pipe.recv() for pipe, _ in pipes)
        for pipe, _ in pipes:
            pipe.send(stores)
        assert pipes[0][0].poll(TIMEOUT_S)
        assert pipes[0][0].recv() < SOON_S
        members[1].join()
        assert members[1].exitcode == -signal.SIGKILL
    finally:
        for process in members:
            process.kill()
            process.join()
