"""Worker groups: separate from the default group and from each other, and destroyed at the end."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_loco.distributed import watchdog
from lightning_loco.distributed.worker_group import WorkerGroup, abort_groups
from tests.harness.forked_jobs import Job
from tests.harness.guards import threads_named
from tests.harness.limits import HARNESS_S, LONG_S, SOON_S, wait_until
from tests.harness.pool import Pool, PoolError
from tests.harness.watchdogs import hurry, make_watchdogs, start


def describe(rank: int, world: int) -> dict[str, Any]:
    group = WorkerGroup.create(timeout_s=20)
    found = {
        "worker": (group.worker, group.num_workers),
        "sizes": [dist.get_world_size(own) for own in (group.data, group.control)],
        "are_own": group.data not in (None, dist.group.WORLD, group.control),
        "watchdog": group.watchdog.is_alive(),
        "gathered": group.gather_objects({"rank": rank}),
    }
    group.close()
    group.close()
    found["threads"] = threads_named("loco")
    found["closed"] = (group.data, group.control, group.watchdog)
    found["default group works"] = sum_over_the_default_group(rank)
    return found


def sum_over_the_default_group(rank: int) -> float:
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    return value.item()


@pytest.mark.parametrize("world", [2, 3])
def test_groups_of_every_worker(pool: Pool, world: int) -> None:
    for rank, found in enumerate(pool.run(describe, world=world)):
        assert found == {
            "worker": (rank, world),
            "sizes": [world, world],
            "are_own": True,
            "watchdog": True,
            "gathered": [{"rank": other} for other in range(world)],
            "threads": [],
            "closed": (None, None, None),
            "default group works": sum(range(world)),
        }


def test_a_single_worker_needs_no_group() -> None:
    group = WorkerGroup.create()
    assert group == WorkerGroup(worker=0, num_workers=1)
    assert group.gather_objects("mine") == ["mine"]
    group.raise_together(None)
    with pytest.raises(KeyError, match="mine"):
        group.raise_together(KeyError("mine"))
    group.close()


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_a_timeout_is_positive(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s is in seconds and must be positive"):
        WorkerGroup.create(timeout_s=timeout_s)


def write_and_read(rank: int, world: int) -> list[str]:
    groups = [WorkerGroup.create(timeout_s=20) for _ in range(2)]
    stores = [group.own_store(name) for group in groups for name in ("a", "b")]
    for number, store in enumerate(stores):
        if rank == 0:
            store.set("key", f"value {number}")
    read = [store.get("key").decode() for store in stores]
    for group in groups:
        group.close()
    return read


def test_stores_of_two_groups_and_of_two_names_are_separate(pool: Pool) -> None:
    for read in pool.run(write_and_read, world=2):
        assert read == ["value 0", "value 1", "value 2", "value 3"]


def raise_some(rank: int, world: int, broken: tuple[int, ...]) -> str:
    group = WorkerGroup.create(timeout_s=20)
    try:
        group.raise_together(ValueError(f"bad luck of {rank}") if rank in broken else None)
    finally:
        group.close()
    return "fine"


def test_an_error_of_one_worker_is_raised_on_all(pool: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(raise_some, (1, 2), world=3)
    failures = caught.value.failures
    assert {failure.type_name for failure in failures.values()} == {"ValueError"}
    texts = [failures[rank].message for rank in range(3)]
    assert texts == ["Worker 1: bad luck of 1", "bad luck of 1", "bad luck of 2"]


class TwoArguments(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def raise_any(rank: int, world: int) -> None:
    group = WorkerGroup.create(timeout_s=20)
    errors = [None, TwoArguments("a", "b"), ZeroDivisionError("division by zero")]
    try:
        with group.errors_shared("the test"):
            error = errors[rank]
            if error is not None:
                raise error
    finally:
        group.close()


def test_a_shared_error_keeps_its_type_on_its_worker(pool: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(raise_any, world=3)
    found = {r: (f.type_name, f.message) for r, f in caught.value.failures.items()}
    assert found == {
        0: ("RuntimeError", "Worker 1: TwoArguments: ab"),
        1: ("TwoArguments", "ab"),
        2: ("ZeroDivisionError", "division by zero"),
    }


def gather_without_worker_1(rank: int, world: int) -> float:
    group = WorkerGroup.create(timeout_s=3)
    group.announce_wait("the beginning")
    began = time.monotonic()
    if rank == 1:
        time.sleep(HARNESS_S)
    try:
        group.gather_objects(rank, "the gathering")
    finally:
        took_s = time.monotonic() - began
        group.close()
        assert took_s < 3 + 6
    return took_s


@pytest.mark.soak
@pytest.mark.process
def test_a_gather_names_the_missing_worker() -> None:
    with Job(gather_without_worker_1, world=3) as job:
        for outcome in job.outcomes([0, 2], HARNESS_S):
            assert outcome.error is not None
            assert "from worker 1 (alive, last exchange: the beginning)" in outcome.error


def gather_and_watch_long(rank: int, world: int) -> None:
    group = WorkerGroup.create(timeout_s=2)
    group.announce_wait("the beginning")
    if rank == 1:
        time.sleep(HARNESS_S)
    if rank == 2:
        watchdog._MISSING_AFTER_S = 5.0
    group.gather_objects(rank, "the gathering")


@pytest.mark.process
def test_worker_0_does_not_end_before_the_others_know_the_error() -> None:
    with Job(gather_and_watch_long, world=3) as job:
        for outcome in job.outcomes([0, 2], HARNESS_S):
            assert outcome.error is not None
            assert "from worker 1 (alive, last exchange: the beginning)" in outcome.error


def create_without_worker_1(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(HARNESS_S)
    WorkerGroup.create(timeout_s=5)


def test_worker_0_ends_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may end with worker 0, and another worker may see late that all have finished."""
    hurry(monkeypatch)
    with make_watchdogs(2) as watchdogs:
        start(*watchdogs)
        first, second = (
            WorkerGroup(worker, 2, watchdog=one, store=one._store, timeout_s=SOON_S)
            for worker, one in enumerate(watchdogs)
        )
        second.store.with_prefix("end/the end of fit").set("1", "")
        with ThreadPoolExecutor() as threads:
            ending = threads.submit(first.end_together, "the end of fit")
            wait_until(lambda: first.store.with_prefix("end_seen/the end of fit").check(["0"]))
            second.watchdog.report("no space left")
            with pytest.raises(RuntimeError, match="^Worker 1 failed:\nno space left"):
                ending.result()


def test_a_signal_ends_the_wait_for_others_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    with make_watchdogs(2) as watchdogs:
        start(*watchdogs)
        first = WorkerGroup(
            0, 2, watchdog=watchdogs[0], store=watchdogs[0]._store, timeout_s=SOON_S
        )
        watchdogs[0].stop_reason = "SIGTERM of a run that was over before it could stop"
        with ThreadPoolExecutor() as threads:
            ending = threads.submit(first.end_together, "the end of fit")
            wait_until(lambda: first.store.with_prefix("end/the end of fit").check(["0"]))
            assert not ending.done()
            watchdogs[0].stop_reason = "SIGTERM"
            ending.result()


@pytest.mark.process
def test_a_worker_missing_in_the_setup_is_named() -> None:
    with Job(create_without_worker_1, world=3) as job:
        for outcome in job.outcomes([0, 2], HARNESS_S):
            assert outcome.error is not None
            assert "No message in the set-up within 5 s from worker 1. Check" in outcome.error


def test_without_an_error_all_continue(pool: Pool) -> None:
    assert pool.run(raise_some, (), world=3) == ["fine"] * 3


def close_with_pending_work(rank: int, world: int) -> float:
    group = WorkerGroup.create(timeout_s=LONG_S)
    dist.barrier()
    if rank != 1:  # worker 1 does not call it
        work = dist.all_reduce(torch.ones(10), group=group.data, async_op=True)
        assert work is not None
        del work
        group.report_error(RuntimeError("a bad day"))
    began = time.monotonic()
    if rank != 1:
        group.close()
    took = time.monotonic() - began
    dist.barrier()
    group.close()
    return took


@pytest.mark.process
def test_after_a_failure_closing_does_not_wait_for_pending_work(pool: Pool) -> None:
    assert max(pool.run(close_with_pending_work, world=3)) < SOON_S


def abort_with_pending_work(rank: int, world: int) -> tuple[float, int]:
    """Rank 0 waits for a message and a sum that rank 1 never sends, and aborts first."""
    groups = [dist.new_group(timeout=timedelta(seconds=LONG_S))]
    dist.barrier()
    if rank == 0:
        dist.irecv(torch.zeros(3), 1, group=groups[0])
        dist.all_reduce(torch.zeros(3), group=groups[0], async_op=True)
    else:
        dist.barrier()
    began = time.monotonic()
    abort_groups(groups)
    lasted_s = time.monotonic() - began
    if rank == 0:
        dist.barrier()
    return lasted_s, len(groups)


def test_aborting_groups_does_not_wait_for_pending_work(pool: Pool) -> None:
    for lasted_s, left in pool.run(abort_with_pending_work, world=2):
        assert lasted_s < SOON_S
        assert left == 0
