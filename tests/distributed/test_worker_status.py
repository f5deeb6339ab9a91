"""Rows: the few numbers that all workers tell each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.worker_status import (
    IN_ROUND,
    PendingStatuses,
    WorkerStatus,
    send_status,
    sync_point_id,
    write_status,
)
from tests.pool import Pool, PoolError


def table_of(*statuses: WorkerStatus) -> Tensor:
    """What all workers' rows add up to."""
    width = WorkerStatus.width(len(statuses[0].scalars))
    total = torch.zeros(len(statuses), width, dtype=torch.float64)
    for worker, status in enumerate(statuses):
        one = torch.empty_like(total)
        write_status(one, worker, status)
        total += one
    return total


def pending(*statuses: WorkerStatus) -> PendingStatuses:
    return PendingStatuses(lambda: table_of(*statuses), "round 4")


def test_statuses_come_back_as_they_were_written() -> None:
    statuses = [
        WorkerStatus(
            IN_ROUND,
            4,
            steps=10,
            weight=1,
            finite=1,
            loss=0.5,
            squared_distance=2.25,
            scalars=(1.5, -2.0),
        ),
        WorkerStatus(
            IN_ROUND,
            4,
            steps=0,
            weight=0,
            finite=0,
            loss=3.0,
            squared_distance=0.0,
            scalars=(7.0, 8.0),
        ),
    ]
    assert pending(*statuses).wait() == statuses


def test_what_a_worker_has_not_looked_at_is_unknown() -> None:
    (status,) = pending(WorkerStatus(7.0, 4, 10)).wait()
    assert (status.sync_point, status.round_index, status.steps) == (7, 4, 10)
    assert all(
        map(math.isnan, (status.weight, status.finite, status.loss, status.squared_distance))
    )


def test_one_workers_nan_leaves_the_rows_of_others_alone() -> None:
    first, second = pending(
        WorkerStatus(IN_ROUND, 4, 1, 1.0, 1.0), WorkerStatus(IN_ROUND, 4, 1)
    ).wait()
    assert (first.weight, first.finite) == (1, 1)
    assert math.isnan(second.weight)


def test_statuses_are_received_once() -> None:
    calls = []

    def receive() -> Tensor:
        calls.append(1)
        return table_of(WorkerStatus(IN_ROUND, 4, 1, 1.0))

    statuses = PendingStatuses(receive, "round 4", lambda: False)
    assert (statuses.has_been_read, statuses.has_arrived()) == (False, False)
    assert statuses.wait() is statuses.wait()
    assert (statuses.has_been_read, statuses.has_arrived(), len(calls)) == (True, True, 1)


def test_workers_in_different_rounds_are_told_to_resume_from_one_checkpoint() -> None:
    with pytest.raises(RuntimeError, match="Worker 1 is in round 5 and worker 0 in round 4"):
        pending(WorkerStatus(IN_ROUND, 4, 1, 1.0), WorkerStatus(IN_ROUND, 5, 1, 1.0)).wait()


@pytest.mark.parametrize(
    ("sync_points", "again"),
    [((IN_ROUND, 9.0), True), ((9.0, 9.0), False), ((IN_ROUND, IN_ROUND), False)],
    ids=str,
)
def test_statuses_without_weight_are_exchanged_again_in_a_round(
    sync_points: tuple[float, float], again: bool
) -> None:
    known = [WorkerStatus(sync_point, 4, 1, weight=1.0) for sync_point in sync_points]
    sent = [s if s.sync_point == IN_ROUND else s._replace(weight=math.nan) for s in known]
    resent: list[bool] = []

    def resend() -> PendingStatuses:
        resent.append(True)
        return PendingStatuses.known(known)

    statuses = PendingStatuses(lambda: table_of(*sent), "round 4", resend=resend)
    assert (statuses.wait() == known) is again
    assert bool(resent) is again


def test_weights_add_up_and_none_at_all_is_an_error() -> None:
    statuses = [WorkerStatus(IN_ROUND, 4, 1, weight=weight) for weight in (1.0, 0.0, 1.0)]
    assert pending(*statuses).total_weight() == 2.0
    with pytest.raises(RuntimeError, match="No worker has made finite progress in round 4"):
        pending(statuses[1]).total_weight()


def test_a_purpose_has_a_number_that_float32_holds_and_a_round_has_not() -> None:
    purposes = ["validation", "a checkpoint", "the end of training", ""]
    numbers = [sync_point_id(purpose) for purpose in purposes]
    assert len(set(numbers)) == len(purposes)
    assert all(number > IN_ROUND for number in numbers)
    assert torch.tensor(numbers, dtype=torch.float32).double().tolist() == numbers


def exchange(rank: int, world: int) -> dict[str, Any]:
    group, statistics = WorkerGroup.create(timeout_s=20), Statistics()
    at_sync_point = WorkerStatus(3.0, 0, rank)
    others = send_status(group, statistics, at_sync_point, "a sync point").wait()
    assert [other.steps for other in others] == list(range(world))
    status = WorkerStatus(IN_ROUND, 0, rank, weight=1.0, scalars=(10.0 * rank,))
    statuses = send_status(group, statistics, status, "round 0").wait()
    label = group.watchdog.label
    group.close()
    return {"statuses": statuses, "label": label, "waited": statistics.wait_s > 0}


def test_statuses_reach_all_workers(pool: Pool) -> None:
    for found in pool.run(exchange, world=3):
        assert [status.steps for status in found["statuses"]] == [0, 1, 2]
        assert [status.scalars for status in found["statuses"]] == [(0.0,), (10.0,), (20.0,)]
        assert (found["label"], found["waited"]) == ("round 0", True)


def test_a_worker_alone_receives_its_own_status() -> None:
    status = WorkerStatus(IN_ROUND, 3, 1, weight=1.0, finite=1.0, loss=2.0, squared_distance=0.0)
    assert send_status(WorkerGroup(0, 1), Statistics(), status, "round 3").wait() == [status]


def part(rank: int, world: int) -> None:
    group = WorkerGroup.create(timeout_s=20)
    try:
        send_status(group, Statistics(), WorkerStatus(IN_ROUND, rank, 1), "a test").wait()
    finally:
        group.close()


def test_every_worker_is_told_of_different_rounds(pool: Pool) -> None:
    with pytest.raises(PoolError, match="Resume all workers from the same checkpoint") as error:
        pool.run(part, world=2)
    assert sorted(error.value.failures) == [0, 1]
