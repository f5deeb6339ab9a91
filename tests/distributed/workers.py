"""Several workers in one process: a store, and a watchdog of each that is really beating."""

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

from lightning_loco.clock import REAL_CLOCK, Clock
from lightning_loco.distributed import watchdog as module
from lightning_loco.distributed.store import TimeoutStore
from lightning_loco.distributed.watchdog import Watchdog
from lightning_loco.distributed.worker_group import WorkerGroup

TIMEOUT_S = 20.0
INTERVAL_S = 0.02


def hurry(monkeypatch: pytest.MonkeyPatch, settle_s: float = 0.3) -> None:
    """Let watchdogs beat fifty times a second and look at others for a moment only."""
    monkeypatch.setattr(module, "_HEARTBEAT_INTERVAL_S", INTERVAL_S)
    monkeypatch.setattr(module, "_MISSING_AFTER_S", settle_s)


def sleeps(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[float]:
    """Each ``time.sleep`` that a module calls from now on, in seconds; it sleeps as before."""
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
) -> Iterator[list[Watchdog]]:
    """Watchdogs that are not started yet, on one store that answers at once; ended at the end."""
    store = dist.HashStore()
    stores = [TimeoutStore(store) for _ in range(num_workers)]
    watchdogs = [
        Watchdog(own, worker, num_workers, names, monitor=monitor, clock=clock)
        for worker, own in enumerate(stores)
    ]
    try:
        yield watchdogs
    finally:
        for watchdog, own in zip(watchdogs, stores, strict=True):
            own.close()
            watchdog.end()


def start(*watchdogs: Watchdog) -> None:
    """Let them beat, and wait until each has done so."""
    for watchdog in watchdogs:
        watchdog.start()
    for watchdog in watchdogs:
        wait_until(lambda watchdog=watchdog: watchdog._num_heartbeats > 0)


def wait_until(condition: Callable[[], Any]) -> None:
    """Look again and again, for a while."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "nothing has happened"
        time.sleep(0.005)


def group_of(watchdog: Watchdog, worker: int, num_workers: int) -> WorkerGroup:
    """A group without process groups, for what needs the watchdog alone."""
    return WorkerGroup(worker, num_workers, watchdog=watchdog, timeout_s=TIMEOUT_S)


def on_every_worker(num_workers: int, fn: Callable[[int], Any]) -> list[Any]:
    """Call fn(worker) in a thread of each worker; the results in order."""
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(fn, range(num_workers)))


def threads_named(name: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(name)]
