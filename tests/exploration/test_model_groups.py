"""The model of gloo does what gloo does, where both can be asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from tests.exploration.choices import RecordedChoices
from tests.exploration.model_groups import DifferentCalls, Groups, registered
from tests.exploration.scheduler import Scheduler

Program = Callable[[Any, int], Any]


def on_model(
    size: int, program: Program, timeout_s: float = 5.0, leaves: bool = False
) -> list[Any]:
    """Run a program on every worker of a model; a worker that has returned may close its group."""
    scheduler = Scheduler(RecordedChoices([]))
    hosts = [f"w{rank}" for rank in range(size)]
    with registered():
        groups = Groups(scheduler, timeout_s)
        made = [groups.make("data", rank, hosts) for rank in range(size)]

        def run(rank: int) -> Any:
            result = program(made[rank], rank)
            if leaves:
                made[rank].shutdown()
            return result

        tasks = [scheduler.start(h, lambda r=r: run(r)) for r, h in enumerate(hosts)]
        scheduler.run()
    for task in tasks:
        if task.error is not None:
            raise task.error
    return [task.result for task in tasks]


def on_gloo(size: int, program: Program, timeout_s: float = 5.0, leaves: bool = False) -> list[Any]:
    """Run the same on gloo, in threads."""
    store, results = dist.HashStore(), [None] * size

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        results[rank] = program(group, rank)
        if not leaves:
            kept.append(group)

    kept: list[Any] = []
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def collectives(group: Any, rank: int) -> list[list[float]]:
    size = group.size()
    own = torch.full((3,), float(rank + 1))
    group.allreduce([own], AllreduceOptions()).wait()
    rows = [torch.zeros(2) for _ in range(size)]
    options = AllgatherOptions()
    group.allgather([rows], [torch.tensor([float(rank), 7.0])], options).wait()
    sent = torch.full((2,), float(10 * rank + 5))
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 0
    group.broadcast([sent], options).wait()
    received = torch.zeros(2)
    works = [
        group.recv([received], (rank - 1) % size, 0),
        group.send([torch.tensor([1.0 + rank, 2.0])], (rank + 1) % size, 0),
    ]
    for work in works:
        work.wait()
    return [t.tolist() for t in (own, *rows, sent, received)]


@pytest.mark.parametrize("size", [2, 3])
def test_messages_arrive_as_with_gloo(size: int) -> None:
    assert on_model(size, collectives) == on_gloo(size, collectives)


def with_one_that_leaves(group: Any, rank: int) -> list[bool]:
    """Worker 1 leaves after one collective; the others call two more."""
    errors = []
    for index in range(3):
        if rank == 1 and index == 1:
            break
        try:
            group.allreduce([torch.ones(1)], AllreduceOptions()).wait()
        except RuntimeError as error:
            errors.append("gloo/" in str(error))
    return errors


def test_a_worker_that_leaves_ends_all_later_collectives_as_with_gloo() -> None:
    expected = [[True, True], [], [True, True]]
    assert on_gloo(3, with_one_that_leaves, leaves=True) == expected
    assert on_model(3, with_one_that_leaves, leaves=True) == expected


def with_one_that_is_late(group: Any, rank: int) -> list[bool]:
    if rank == 1:
        return []
    work, errors = group.allreduce([torch.ones(1)], AllreduceOptions()), list[bool]()
    for arguments in [[timedelta(seconds=0.2)], []]:
        try:
            work.wait(*arguments)
        except RuntimeError as error:
            errors.append("gloo/" in str(error))
    return errors


def test_a_wait_may_be_shorter_than_the_timeout_as_with_gloo() -> None:
    expected = [[False, True], []]
    assert on_gloo(2, with_one_that_is_late, timeout_s=1.0) == expected
    assert on_model(2, with_one_that_is_late, timeout_s=1.0) == expected


def test_different_collectives_at_the_same_time_are_an_error() -> None:
    def program(group: Any, rank: int) -> None:
        expected = DifferentCalls if rank == 1 else RuntimeError
        with pytest.raises(expected):
            group.allreduce([torch.ones(1 + rank)], AllreduceOptions()).wait()

    on_model(2, program)
