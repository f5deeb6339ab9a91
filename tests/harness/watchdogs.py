"""Watchdogs of several workers in one process, and a store whose server a test may kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.distributed import watchdog as module
from lightning_loco.distributed.store import TimeoutStore
from lightning_loco.distributed.watchdog import Watchdog
from lightning_loco.distributed.worker_group import WorkerGroup
from tests.harness.limits import wait_until
from tests.harness.pool import PRELOADED

TIMEOUT_S = 20.0
INTERVAL_S = 0.02


def hurry(monkeypatch: pytest.MonkeyPatch, settle_s: float = 0.3) -> None:
    """Let watchdogs send fifty heartbeats per second, and watch others for only ``settle_s``."""
    monkeypatch.setattr(module, "_HEARTBEAT_INTERVAL_S", INTERVAL_S)
    monkeypatch.setattr(module, "_MISSING_AFTER_S", settle_s)


@contextmanager
def make_watchdogs(
    num_workers: int,
    names: list[str] | None = None,
    clock: Clock = REAL_CLOCK,
    *,
    monitor: bool = False,
    replica_size: int = 1,
) -> Iterator[list[Watchdog]]:
    """Yield watchdogs that are not started yet, on one store that answers at once, and end them."""
    store = dist.HashStore()
    stores = [TimeoutStore(store) for _ in range(num_workers)]
    watchdogs = [
        Watchdog(
            own,
            worker,
            num_workers,
            names,
            monitor=monitor,
            replica_size=replica_size,
            clock=clock,
        )
        for worker, own in enumerate(stores)
    ]
    try:
        yield watchdogs
    finally:
        for watchdog, own in zip(watchdogs, stores, strict=True):
            own.close()
            watchdog.end()


def start(*watchdogs: Watchdog) -> None:
    """Start watchdogs, and wait until each has sent a heartbeat."""
    for watchdog in watchdogs:
        watchdog.start()
    for watchdog in watchdogs:
        wait_until(lambda watchdog=watchdog: watchdog._num_heartbeats > 0)


def group_of(watchdog: Watchdog, worker: int, num_workers: int) -> WorkerGroup:
    """Return a group without process groups, for code that only needs the watchdog."""
    return WorkerGroup(worker, num_workers, watchdog=watchdog, timeout_s=TIMEOUT_S)


def on_every_worker(num_workers: int, fn: Callable[[int], Any]) -> list[Any]:
    """Call fn(worker) in a thread for each worker, and return the results in order."""
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(fn, range(num_workers)))


def _host(connection: Connection) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(server.port)
    connection.poll(None)


@contextmanager
def server_in_a_process(clock: Clock = REAL_CLOCK) -> Iterator[tuple[TimeoutStore, int]]:
    """Yield a connection to a server in a separate process, and the id of that process."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_host, args=(theirs,))
    process.start()
    client = dist.TCPStore("127.0.0.1", ours.recv(), is_master=False, wait_for_workers=False)
    store = TimeoutStore.from_clone(client, 10.0, clock=clock)
    assert process.pid is not None
    try:
        yield store, process.pid
    finally:
        with suppress(ProcessLookupError):  # a test may have killed it
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        store.close()
        ours.close()
