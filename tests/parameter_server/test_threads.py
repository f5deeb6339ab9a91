"""Threads of a server end with it: one that lets go of work as Python ends aborts the process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_loco.parameter_server import RemoteOptimizer, Transport, run_role
from lightning_loco.parameter_server.clients import Requests
from lightning_loco.parameter_server.keep_alive import PARTING_S, Meanwhile, Waiter
from lightning_loco.parameter_server.protocol import Kind, Note
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

    waiter.wait(waiter.begin(finish), 5.0, lambda: 0.0)
    del finish, work
    assert kept() is None
    waiter.end()
    assert not count_threads("loco-waiter-worker 7")


def test_nothing_more_is_waited_for_from_a_rank_that_is_lost() -> None:
    waiter, waited = Waiter("worker 9", Meanwhile(5.0)), []

    def fail() -> None:
        raise RuntimeError("gone")

    outcomes = [waiter.begin(finish) for finish in (lambda: waited.append(1), fail, fail)]
    outcomes.append(waiter.begin(lambda: waited.append(2)))
    waiter.wait(outcomes[0], 5.0, lambda: 0.0)
    with pytest.raises(RuntimeError, match="gone"):
        waiter.wait(outcomes[1], 5.0, lambda: 0.0)
    for outcome in outcomes[2:]:
        with pytest.raises(ConnectionError, match="is lost"):
            waiter.wait(outcome, 5.0, lambda: 0.0)
    assert waited == [1]
    waiter.end()


def test_the_thread_that_waits_for_a_lost_rank_is_left_behind(blocked: threading.Event) -> None:
    waiter = Waiter("worker 8", Meanwhile(0.1))
    with pytest.raises(TimeoutError):
        waiter.wait(waiter.begin(lambda: blocked.wait(60.0)), 0.1, lambda: 0.0)
    began = time.monotonic()
    waiter.end()
    assert PARTING_S <= time.monotonic() - began < 20.0
    assert count_threads("loco-waiter-worker 8")


def serve_one(rank: int, world: int) -> int:
    """Hear the last words of a client; how many threads are left then."""
    wire = Transport(timeout_s=20).wire(1 - rank, f"rank {1 - rank}")
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


def gloo_threads() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop\n")


def train_in_a_group(num_workers: int) -> None:
    """Train in a group of its own, and destroy that."""
    group = dist.new_group()
    model = torch.nn.Linear(2, 2)

    def train(remote: RemoteOptimizer) -> None:
        for _ in range(3):
            remote.expect_backward()
            model(torch.ones(1, 2)).sum().backward()
            remote.step()

    sgd = torch.optim.SGD
    transport = Transport(group=group, timeout_s=20)
    run_role(train, model.parameters(), sgd, num_workers, transport=transport)
    dist.destroy_process_group(group)


def threads_after_training(rank: int, world: int, num_workers: int) -> tuple[int, int]:
    """How many threads of gloo are left, before and after a garbage collection."""
    gc.collect()  # what other tests have left
    gc.disable()
    try:
        train_in_a_group(num_workers)
        time.sleep(0.2)  # until the system has forgotten those that have ended
        before = gloo_threads()
    finally:
        gc.enable()
    gc.collect()
    return before, gloo_threads()


@pytest.mark.parametrize("num_workers", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_group_that_is_destroyed_has_no_threads_any_more(pool: Pool, num_workers: int) -> None:
    for before, after in pool.run(threads_after_training, num_workers, world=4):
        assert before == after > 0
