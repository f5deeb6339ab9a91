"""Tests that measure time run while nothing else does: neither another test nor a collection."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def pytest_collection_finish() -> None:
    """Leave the collected tests out of later garbage collections: a look at them takes a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With `pytest -n`, a test that is marked `alone` runs while no other one does."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    shared = Path(item.config.getoption("basetemp")).parent
    with turn(shared, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Be in the room with others, or alone in it.

    Who wants to be alone waits at the door until the room is empty, and nobody passes meanwhile.

    Args:
        folder: The same for all processes; two files in it are locked.
        alone: Whether nobody else may be in the room.
    """
    with (folder / "door").open("a") as door, (folder / "room").open("a") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # also for processes that have inherited the file
