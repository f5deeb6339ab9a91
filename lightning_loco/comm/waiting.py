"""Waiting for other workers: timed, and with an error that says who is missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics


@contextmanager
def waiting(statistics: Statistics) -> Iterator[None]:
    """Add the seconds spent inside to ``statistics.wait_s``."""
    started = time.perf_counter()
    try:
        yield
    finally:
        statistics.wait_s += time.perf_counter() - started


@contextmanager
def explained(group: WorkerGroup, place: str) -> Iterator[None]:
    """Turn a backend's error into one that names the missing or failed worker.

    Args:
        group: The workers.
        place: What is being waited for, e.g. ``"round 12"``.

    Raises:
        RuntimeError: Instead of the backend's error, which stays its cause.
    """
    started = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        if group.watchdog is None:
            raise
        waited_s = time.perf_counter() - started
        raise RuntimeError(group.watchdog.explain(place, waited_s)) from error
