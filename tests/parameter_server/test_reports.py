"""Failures reported by the watchdog reach waiting ranks; frozen ranks cause no delay."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_loco.distributed.store import TimeoutStore
from lightning_loco.distributed.watchdog import Watchdog, WorkerFailure
from lightning_loco.parameter_server import RemoteOptimizer, Transport, run_role
from tests.harness.failing import freeze
from tests.harness.forked_jobs import Job

pytestmark = pytest.mark.process

REPORTING, WAITING, FROZEN, SERVER = range(4)
TIMEOUT_S = 60.0
LONGEST_S = 20.0
"""Seconds from the report to the server's watchdog until the server has ended."""


def run_rank(rank: int, world: int) -> float | None:
    """Take one step; the server returns how long it took to end after a report."""
    store = TimeoutStore(dist.distributed_c10d._get_default_store())
    watchdog = Watchdog(store.with_prefix("watchdog"), rank, world)
    watchdog.start()
    model = nn.Linear(3, 1)
    reported_at: list[float] = []

    def listen() -> None:
        while watchdog.failure is None:
            time.sleep(0.005)
        reported_at.append(time.monotonic())

    def train(remote: RemoteOptimizer) -> None:
        model(torch.ones(2, 3)).square().mean().backward()
        remote.step()
        if rank == FROZEN:
            freeze()
        if rank == WAITING:
            remote.step()
        time.sleep(1.0)  # until the others have got there
        watchdog.report("a meteor")
        time.sleep(TIMEOUT_S)

    if rank == SERVER:
        threading.Thread(target=listen, daemon=True).start()
    transport = Transport(
        timeout_s=TIMEOUT_S, watchdog=watchdog if rank in (REPORTING, SERVER) else None
    )
    params = model.parameters()
    try:
        run_role(
            train, params, lambda own: torch.optim.SGD(own, lr=0.1), SERVER, transport=transport
        )
    except WorkerFailure:
        return time.monotonic() - reported_at[0]
    return None


def test_a_server_with_a_reported_failure_ends_soon_and_tells_its_clients() -> None:
    with Job(run_rank, world=4) as job:
        waiting, server = job.outcomes([WAITING, SERVER], 60)
    assert server.error is None, server.error
    assert server.result < LONGEST_S
    assert waiting.error is not None
    assert "a meteor" in waiting.error.rpartition("Error: ")[2]
