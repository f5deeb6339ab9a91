"""Tests that measure time run alone: without other tests or garbage collections."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def pytest_collection_finish() -> None:
    """Exclude the collected tests from later garbage collections, which take a second otherwise."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With `pytest -n`, run no other test at the same time as one that is marked `alone`."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    shared = Path(item.config.getoption("basetemp")).parent
    with lock(shared, exclusive=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def lock(folder: Path, exclusive: bool) -> Iterator[None]:
    """Hold a lock together with other processes, or exclusively.

    An exclusive holder waits until the others have released the lock; no new one gets it meanwhile.

    Args:
        folder: The same for all processes; two files in it are locked.
        exclusive: Whether no other process may hold the lock.
    """
    with (folder / "queue.lock").open("a") as queue, (folder / "tests.lock").open("a") as tests:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(tests, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(tests, fcntl.LOCK_UN)  # also for processes that have inherited the file
