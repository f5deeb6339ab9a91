"""Threads of a server end with it: one that lets go of work as Python ends aborts the process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from lightning_loco.remote.meanwhile import Meanwhile
from lightning_loco.remote.requests import Requests
from lightning_loco.remote.waiter import PARTING_S, Waiter
from lightning_loco.remote.wire import Kind, Note, Wire
from tests.pool import Pool


class Work:
    """Stands for work of gloo, and for the connections that it holds."""


def count_threads(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


@pytest.fixture
def blocked() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_waiter_keeps_nothing_of_what_has_come() -> None:
    waiter = Waiter("worker 7", Meanwhile(5.0))
    work = Work()
    kept = weakref.ref(work)

    def finish(_: Work = work) -> None:
        time.sleep(0.01)

    waiter.wait(finish, 5.0, lambda: 0.0)
    del finish, work
    assert kept() is None
    waiter.end()
    assert not count_threads("loco-waiter-worker 7")


def test_the_thread_that_waits_for_a_lost_rank_is_left_behind(blocked: threading.Event) -> None:
    waiter = Waiter("worker 8", Meanwhile(0.1))
    with pytest.raises(TimeoutError):
        waiter.wait(blocked.wait, 0.1, lambda: 0.0)
    began = time.monotonic()
    waiter.end()
    assert PARTING_S <= time.monotonic() - began < PARTING_S + 3
    assert count_threads("loco-waiter-worker 8")


def serve_one(rank: int, world: int) -> int:
    """Hear the last words of a client; how many threads are left then."""
    wire = Wire(1 - rank, f"rank {1 - rank}", timeout_s=20)
    if rank == 1:
        wire.ask(Note(Kind.LEAVE, {}))
        return 0
    requests = Requests([wire], Meanwhile(20.0))
    heard = requests.next(20.0, lambda: 0.0)
    assert heard is not None
    assert isinstance(heard[1], Note)
    assert heard[1].kind == Kind.LEAVE
    requests.end()
    return count_threads("loco-requests")


def test_who_has_left_is_listened_to_no_more(pool: Pool) -> None:
    assert pool.run(serve_one, world=2) == [0, 0]
