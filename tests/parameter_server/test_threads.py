"""A server's threads end with it: a thread that releases work at exit aborts the process."""

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
from lightning_loco.parameter_server.clients import Clients
from lightning_loco.parameter_server.keep_alive import JOIN_TIMEOUT_S, KeepAlive, WaitThread
from lightning_loco.parameter_server.protocol import Message, MessageKind
from tests.harness.pool import Pool


class Work:
    """Replaces gloo's work, which keeps references to connections."""


def count_threads(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


@pytest.fixture
def blocked() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_wait_thread_releases_finished_work() -> None:
    wait_thread = WaitThread("worker 7", KeepAlive(5.0))
    work = Work()
    kept = weakref.ref(work)

    def finish(_: Work = work) -> None:
        time.sleep(0.01)

    wait_thread.wait(wait_thread.submit(finish), 5.0, lambda: 0.0)
    del finish, work
    assert kept() is None
    wait_thread.close()
    assert not count_threads("loco-wait-worker 7")


def test_waits_for_a_lost_rank_fail_at_once() -> None:
    wait_thread, waited = WaitThread("worker 9", KeepAlive(5.0)), []

    def fail() -> None:
        raise RuntimeError("gone")

    results = [wait_thread.submit(finish) for finish in (lambda: waited.append(1), fail, fail)]
    results.append(wait_thread.submit(lambda: waited.append(2)))
    wait_thread.wait(results[0], 5.0, lambda: 0.0)
    with pytest.raises(RuntimeError, match="gone"):
        wait_thread.wait(results[1], 5.0, lambda: 0.0)
    for result in results[2:]:
        with pytest.raises(ConnectionError, match="is lost"):
            wait_thread.wait(result, 5.0, lambda: 0.0)
    assert waited == [1]
    wait_thread.close()


def test_a_thread_that_waits_for_a_lost_rank_is_not_joined(blocked: threading.Event) -> None:
    wait_thread = WaitThread("worker 8", KeepAlive(0.1))
    with pytest.raises(TimeoutError):
        wait_thread.wait(wait_thread.submit(lambda: blocked.wait(60.0)), 0.1, lambda: 0.0)
    began = time.monotonic()
    wait_thread.close()
    assert JOIN_TIMEOUT_S <= time.monotonic() - began < 20.0
    assert count_threads("loco-wait-worker 8")


def serve_one(rank: int, world: int) -> int:
    """Receive the last request of a client; return how many threads remain."""
    connection = Transport(timeout_s=20).connect(1 - rank, f"rank {1 - rank}")
    if rank == 1:
        connection.send_request(Message(MessageKind.LEAVE, {}))
        return 0
    clients = Clients([connection], lambda *_: False, KeepAlive(20.0))
    clients.wait_for_all()
    assert not clients.active
    clients.close()
    return count_threads("loco-requests")


def test_the_thread_of_a_client_that_has_left_ends(pool: Pool) -> None:
    assert pool.run(serve_one, world=2) == [0, 0]


def gloo_threads() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop\n")


def train_in_a_group(num_workers: int) -> None:
    """Train in a new process group, and destroy it."""
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


def threads_around_training(rank: int, world: int, num_workers: int) -> tuple[int, int]:
    """Return the number of gloo threads before and after, without a garbage collection."""
    gc.collect()  # garbage of other tests
    before = gloo_threads()
    gc.disable()
    try:
        train_in_a_group(num_workers)
        deadline = time.monotonic() + 20.0
        while gloo_threads() != before and time.monotonic() < deadline:
            time.sleep(0.05)  # until ended threads are no longer listed
        return before, gloo_threads()
    finally:
        gc.enable()


@pytest.mark.parametrize("num_workers", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_destroyed_group_has_no_threads(pool: Pool, num_workers: int) -> None:
    for before, after in pool.run(threads_around_training, num_workers, world=4):
        assert before == after > 0
