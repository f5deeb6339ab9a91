"""Waits are timed, and errors of the backend name the missing worker."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from lightning_loco import DiLoCo, StepEngine
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.watchdog import Watchdog, WorkerFailure
from lightning_loco.distributed.work import (
    AllReduceSum,
    PendingWork,
    WaitTimer,
)
from lightning_loco.distributed.worker_group import ExplainErrors, WorkerGroup
from lightning_loco.engine.fragment_sync import labelled
from tests.harness.late_backend import late_group
from tests.harness.limits import HARNESS_S, LONG_S
from tests.harness.manual_clock import ManualClock, SkippingClock
from tests.harness.pool import Pool
from tests.harness.watchdogs import group_of, hurry, make_watchdogs, start


def test_waited_seconds_are_added() -> None:
    statistics, clock = Statistics(wait_s=1.0), ManualClock()
    for seconds in (0.5, 0.25):
        with WaitTimer(statistics, clock):
            clock.advance(seconds)
        clock.advance(100.0)
    assert statistics.wait_s == 1.75


def test_waited_seconds_are_added_if_the_wait_fails() -> None:
    statistics, clock = Statistics(), ManualClock()

    def fail() -> None:
        with WaitTimer(statistics, clock):
            clock.advance(0.5)
            raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed"):
        fail()
    assert statistics.wait_s == 0.5


def fail(watchdog: Watchdog, num_workers: int, error: Exception) -> None:
    """Raise an error of the backend in round 4 on worker 0."""
    with ExplainErrors(group_of(watchdog, 0, num_workers), "round 4"):
        raise error


def test_an_error_names_the_missing_worker_and_keeps_its_cause() -> None:
    cause, clock = RuntimeError("Connection closed by peer"), ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        watchdogs[1].label = "round 3"
        start(*watchdogs)
        watchdogs[1].end()
        with pytest.raises(RuntimeError) as raised:
            clock.pass_during(lambda: fail(watchdogs[0], 3, cause), others=2)
    assert "No message in round 4 after 0 s from worker 1" in str(raised.value)
    assert raised.value.__cause__ is cause


def test_an_error_is_replaced_by_a_reported_failure() -> None:
    cause, clock = RuntimeError("Connection closed by peer"), ManualClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(*watchdogs)
        watchdogs[1].report("IndexError: 7")
        with pytest.raises(RuntimeError, match="^Worker 1 failed:\nIndexError: 7$"):
            clock.pass_during(lambda: fail(watchdogs[0], 2, cause), others=2)


def fail_among_some(watchdog: Watchdog, num_workers: int, error: Exception) -> None:
    """Raise an error of the backend on worker 0 while only some workers wait."""
    with ExplainErrors(group_of(watchdog, 0, num_workers), "validation", involves_all=False):
        raise error


def test_among_some_workers_only_a_silent_one_is_blamed() -> None:
    cause, clock = RuntimeError("sizes differ"), ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        start(*watchdogs)
        watchdogs[2].num_exchanges = watchdogs[0].num_exchanges + 1
        with pytest.raises(RuntimeError) as raised:
            clock.pass_during(lambda: fail_among_some(watchdogs[0], 3, cause), others=3)
        assert raised.value is cause
        watchdogs[1].end()
        with pytest.raises(WorkerFailure, match=r"from worker 1 \(no sign of life") as explained:
            clock.pass_during(lambda: fail_among_some(watchdogs[0], 3, cause), others=2)
    assert "worker 2" not in str(explained.value)


def test_among_some_workers_a_reported_failure_is_raised() -> None:
    cause, clock = RuntimeError("Connection closed by peer"), ManualClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(*watchdogs)
        watchdogs[1].report("IndexError: 7")
        with pytest.raises(WorkerFailure, match="^Worker 1 failed:\nIndexError: 7$"):
            clock.pass_during(lambda: fail_among_some(watchdogs[0], 2, cause), others=2)


def test_an_explained_error_is_not_explained_again() -> None:
    with make_watchdogs(2) as watchdogs:
        group = group_of(watchdogs[0], 0, 2)
        error = WorkerFailure("worker 1 is gone")
        with (
            pytest.raises(WorkerFailure, match="^worker 1 is gone$") as raised,
            ExplainErrors(group, "round 4"),
            ExplainErrors(group, "a part of it"),
        ):
            raise error
        assert raised.value is error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_other_errors_are_raised_unchanged(error: BaseException) -> None:
    with (
        make_watchdogs(2) as watchdogs,
        pytest.raises(type(error)) as raised,
        ExplainErrors(group_of(watchdogs[0], 0, 2), "round 4"),
    ):
        raise error
    assert raised.value is error


class KillsItsProcess(Dataset[int]):
    """Kills the process that loads it, like the kernel's out-of-memory killer."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def wait_while_loading(loader: DataLoader[int]) -> None:
    batches = iter(loader)
    time.sleep(10 * HARNESS_S)
    del batches


@pytest.mark.process
def test_a_killed_process_of_a_data_loader_is_not_explained() -> None:
    """PyTorch raises the error in a signal handler, wherever this process is waiting."""
    with make_watchdogs(2) as watchdogs:
        start(*watchdogs)
        group = group_of(watchdogs[0], 0, 2)
        loader = DataLoader(KillsItsProcess(), num_workers=1, multiprocessing_context="spawn")
        with (
            pytest.raises(RuntimeError, match="DataLoader worker .* is killed by signal: Killed"),
            ExplainErrors(group, "round 4"),
        ):
            wait_while_loading(loader)


def test_errors_of_a_single_worker_are_raised_unchanged() -> None:
    with (
        pytest.raises(RuntimeError, match="^as it is$"),
        ExplainErrors(WorkerGroup(0, 1), "round 4"),
    ):
        raise RuntimeError("as it is")


def test_without_an_error_nothing_happens() -> None:
    with ExplainErrors(WorkerGroup(0, 1), "round 4"):
        pass


def test_the_sum_of_a_single_worker_is_its_tensor() -> None:
    statistics, flat = Statistics(), torch.ones(3)
    total = AllReduceSum(WorkerGroup(0, 1), statistics, flat, "the test")
    assert total.has_arrived()
    assert total.arrives_within(0.0)
    assert total.wait().tolist() == [1.0, 1.0, 1.0]
    assert statistics == Statistics()


def sum_up(rank: int, world: int) -> tuple[list[float], int]:
    group, statistics = WorkerGroup.create(timeout_s=20), Statistics()
    flat = torch.arange(6.0) * (rank + 1)
    total = AllReduceSum(group, statistics, flat, "the test").wait()
    group.close()
    assert total is flat
    return flat.tolist(), statistics.bytes_sent


def test_a_sum_is_counted_as_a_ring_all_reduce(pool: Pool) -> None:
    for flat, num_bytes in pool.run(sum_up, world=3):
        assert flat == [0.0, 6.0, 12.0, 18.0, 24.0, 30.0]
        assert num_bytes == 2 * 2 * 24 // 3


def sum_up_with_late_worker(rank: int, world: int) -> dict[str, Any]:
    """Run a sum that worker 1 starts after the others have polled."""
    group, statistics, clock = late_group(timeout_s=1e6), Statistics(), SkippingClock()
    group.clock, store = clock, group.own_store("test")
    flat = torch.arange(6.0) * (rank + 1)
    while rank == 1 and not store.check(["polled/0", "polled/2"]):
        time.sleep(0.001)
    total = AllReduceSum(group, statistics, flat, "the test")
    timeouts = (0.0, 0.05) if rank != 1 else ()
    arrived = total.has_arrived(), *map(total.arrives_within, timeouts)
    store.set(f"polled/{rank}", "")
    found = {"arrived": arrived, "sum": total.wait().tolist(), "wait_s": statistics.wait_s}
    found["slept_s"] = clock.now()
    found["then"] = total.has_arrived(), total.arrives_within(0.0)
    group.close()
    return found


def test_the_host_polls_if_wait_does_not_block_it(pool: Pool) -> None:
    found = pool.run(sum_up_with_late_worker, world=3)
    assert [one["sum"] for one in found] == [[0.0, 6.0, 12.0, 18.0, 24.0, 30.0]] * 3
    assert all(one["then"] == (True, True) for one in found)
    for one in (found[0], found[2]):
        assert one["arrived"] == (False, False, False)
        assert one["wait_s"] > 0.05
    for one in found:
        assert one["wait_s"] == pytest.approx(one["slept_s"])


class Stuck(dist.Work):
    """Never completes; ``wait`` does not block the host."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def test_a_pending_work_times_out() -> None:
    clock = SkippingClock()
    group = WorkerGroup(0, 2, timeout_s=0.5, wait_blocks_host=False, clock=clock)
    works = PendingWork(group, "round 4", [Stuck()])
    assert not works.is_completed()
    with pytest.raises(RuntimeError, match="^No message in round 4 after 0.5 s"):
        works.wait()
    waited_s = clock.now()
    assert waited_s == pytest.approx(0.5, abs=0.002)
    assert works.is_completed()  # a wait would raise immediately
    assert not works.completes_within(LONG_S)
    assert clock.now() == waited_s
    assert group.failed


def test_a_failure_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    with make_watchdogs(2) as watchdogs:
        start(*watchdogs)
        group = dataclasses.replace(group_of(watchdogs[0], 0, 2), wait_blocks_host=False)
        works = PendingWork(group, "round 4", [Stuck()])
        assert not works.completes_within(0.05)
        watchdogs[1].report("IndexError: 7")
        with pytest.raises(RuntimeError, match="^Worker 1 failed:\nIndexError: 7$"):
            works.wait()


def test_a_profile_names_the_phases() -> None:
    engine = StepEngine(torch.nn.Linear(4, 4), DiLoCo(), sync_every=1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.step()
    engine.close()
    names = {event.name for event in profiler.events() or []}
    assert {"loco/propose", "loco/exchange", "loco/apply"} <= names


def test_no_record_function_without_a_profiler() -> None:
    assert not isinstance(labelled("loco/apply"), torch.autograd.profiler.record_function)
