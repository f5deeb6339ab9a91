"""Worker statuses: the few numbers that every worker sends with a round."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.worker_status import (
    IN_ROUND,
    GatheredStatuses,
    KnownStatuses,
    WorkerStatus,
    statuses_in,
    sync_point_id,
    total_weight,
    write_status,
)
from tests.harness.pool import Pool, PoolError


def table_of(*statuses: WorkerStatus) -> Tensor:
    """Return the sum of the tables of all workers."""
    width = WorkerStatus.width(len(statuses[0].scalars))
    total = torch.zeros(len(statuses), width, dtype=torch.float64)
    for worker, status in enumerate(statuses):
        one = torch.empty_like(total)
        write_status(one, worker, status)
        total += one
    return total


def exchanged(*statuses: WorkerStatus) -> list[WorkerStatus]:
    return statuses_in(table_of(*statuses))


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
            step_s=0.125,
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
            step_s=0.25,
            scalars=(7.0, 8.0),
        ),
    ]
    assert exchanged(*statuses) == statuses


def test_what_a_worker_has_not_measured_is_nan() -> None:
    (status,) = exchanged(WorkerStatus(7.0, 4, 10))
    assert (status.sync_point, status.round_index, status.steps) == (7, 4, 10)
    assert all(
        map(math.isnan, (status.weight, status.finite, status.loss, status.squared_distance))
    )


def test_one_workers_nan_leaves_the_statuses_of_others_alone() -> None:
    first, second = exchanged(WorkerStatus(IN_ROUND, 4, 1, 1.0, 1.0), WorkerStatus(IN_ROUND, 4, 1))
    assert (first.weight, first.finite) == (1, 1)
    assert math.isnan(second.weight)


def test_statuses_that_are_known_need_no_wait() -> None:
    statuses = KnownStatuses([WorkerStatus(IN_ROUND, 4, 1, 1.0)], "round 4")
    assert (statuses.has_been_read, statuses.has_arrived()) == (True, True)
    assert statuses.wait() == [WorkerStatus(IN_ROUND, 4, 1, 1.0)]


def test_workers_in_different_rounds_are_asked_to_resume_from_one_checkpoint() -> None:
    with pytest.raises(RuntimeError, match="Worker 1 is in round 5 and worker 0 in round 4"):
        exchanged(WorkerStatus(IN_ROUND, 4, 1, 1.0), WorkerStatus(IN_ROUND, 5, 1, 1.0))


SYNC_POINTS = {
    "one in a round": ((IN_ROUND, 9.0), True),
    "all at a sync point": ((9.0, 9.0), False),
    "all in a round": ((IN_ROUND, IN_ROUND), False),
}


def exchange_weights(rank: int, world: int) -> dict[str, tuple[list[float], bool]]:
    """A worker at a sync point has weight 0 at first, and sends its weight if there is a round."""
    group, statistics, found = WorkerGroup.create(timeout_s=20), Statistics(), {}
    for name, (sync_points, again) in SYNC_POINTS.items():
        weight = 1.0 if sync_points[rank] == IN_ROUND else math.nan
        status = WorkerStatus(sync_points[rank], 4, 1, weight)
        pending = GatheredStatuses(group, statistics, status, "round 4", needs_weights=rank == 0)
        statuses = pending.wait()
        if rank == 1 and again:
            statuses = GatheredStatuses(
                group, statistics, status._replace(weight=0.5), "round 4"
            ).wait()
        found[name] = ([s.weight for s in statuses], pending.wait() is pending.wait())
    group.close()
    return found


def test_statuses_without_weight_are_exchanged_again_in_a_round(pool: Pool) -> None:
    for found in pool.run(exchange_weights, world=2):
        weights = {name: values for name, (values, _) in found.items()}
        assert weights["one in a round"] == [1.0, 0.5]
        assert all(map(math.isnan, weights["all at a sync point"]))
        assert weights["all in a round"] == [1.0, 1.0]
        assert all(is_kept for _, is_kept in found.values())


def test_weights_add_up_and_none_at_all_is_an_error() -> None:
    assert total_weight([1.0, 0.0, 1.0], "round 4") == 2.0
    with pytest.raises(RuntimeError, match="No worker has made finite progress in round 4"):
        total_weight([0.0], "round 4")


def test_a_purpose_has_a_number_that_float32_holds_and_a_round_has_not() -> None:
    purposes = ["validation", "a checkpoint", "the end of training", ""]
    numbers = [sync_point_id(purpose) for purpose in purposes]
    assert len(set(numbers)) == len(purposes)
    assert all(number > IN_ROUND for number in numbers)
    assert torch.tensor(numbers, dtype=torch.float32).double().tolist() == numbers


def exchange(rank: int, world: int) -> dict[str, Any]:
    group, statistics = WorkerGroup.create(timeout_s=20), Statistics()
    at_sync_point = WorkerStatus(3.0, 0, rank)
    others = GatheredStatuses(group, statistics, at_sync_point, "a sync point").wait()
    assert [other.steps for other in others] == list(range(world))
    status = WorkerStatus(IN_ROUND, 0, rank, weight=1.0, scalars=(10.0 * rank,))
    statuses = GatheredStatuses(group, statistics, status, "round 0").wait()
    label = group.watchdog.label
    group.close()
    return {"statuses": statuses, "label": label, "waited": statistics.wait_s > 0}


def test_statuses_reach_all_workers(pool: Pool) -> None:
    for found in pool.run(exchange, world=3):
        assert [status.steps for status in found["statuses"]] == [0, 1, 2]
        assert [status.scalars for status in found["statuses"]] == [(0.0,), (10.0,), (20.0,)]
        assert (found["label"], found["waited"]) == ("round 0", True)


def test_a_worker_alone_receives_its_own_status() -> None:
    status = WorkerStatus(IN_ROUND, 3, 1, 1.0, 1.0, loss=2.0, squared_distance=0.0, step_s=0.5)
    assert GatheredStatuses(WorkerGroup(0, 1), Statistics(), status, "round 3").wait() == [status]


def part(rank: int, world: int) -> None:
    group = WorkerGroup.create(timeout_s=20)
    try:
        GatheredStatuses(group, Statistics(), WorkerStatus(IN_ROUND, rank, 1), "a test").wait()
    finally:
        group.close()


def test_different_rounds_are_an_error_on_every_worker(pool: Pool) -> None:
    with pytest.raises(PoolError, match="Resume all workers from the same checkpoint") as error:
        pool.run(part, world=2)
    assert sorted(error.value.failures) == [0, 1]
