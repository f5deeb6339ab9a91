"""Several workers in one process: a store, and a watchdog of each that sends heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.distributed import watchdog as module
from lightning_loco.distributed.store import TimeoutStore
from lightning_loco.distributed.watchdog import Watchdog
from lightning_loco.distributed.worker_group import WorkerGroup

TIMEOUT_S = 20.0
INTERVAL_S = 0.02


def hurry(monkeypatch: pytest.MonkeyPatch, settle_s: float = 0.3) -> None:
    """Let watchdogs send fifty heartbeats per second, and watch others for ``settle_s`` only."""
    monkeypatch.setattr(module, "_HEARTBEAT_INTERVAL_S", INTERVAL_S)
    monkeypatch.setattr(module, "_MISSING_AFTER_S", settle_s)


def sleeps(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[float]:
    """Return a list to which the seconds of each ``time.sleep`` of a module are added."""
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(module, "time", clock)
    return asked


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


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition is still false"
        time.sleep(0.005)


def group_of(watchdog: Watchdog, worker: int, num_workers: int) -> WorkerGroup:
    """Return a group without process groups, for code that needs only the watchdog."""
    return WorkerGroup(worker, num_workers, watchdog=watchdog, timeout_s=TIMEOUT_S)


def on_every_worker(num_workers: int, fn: Callable[[int], Any]) -> list[Any]:
    """Call fn(worker) in a thread for each worker, and return the results in order."""
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(fn, range(num_workers)))


def threads_named(name: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(name)]
