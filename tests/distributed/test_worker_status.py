"""Rows: the few numbers that all workers tell each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.worker_status import (
    ROUND,
    PendingRows,
    Row,
    TravellingRows,
    meeting_number,
    start_rows,
    write_row,
)
from tests.pool import Pool, PoolError


def table_of(*rows: Row) -> Tensor:
    """What all workers' rows add up to."""
    width = Row.width(len(rows[0].scalars))
    total = torch.zeros(len(rows), width, dtype=torch.float64)
    for worker, row in enumerate(rows):
        one = torch.empty_like(total)
        write_row(one, worker, row)
        total += one
    return total


def pending(*rows: Row) -> PendingRows:
    return PendingRows(lambda: table_of(*rows), "round 4")


def test_rows_come_back_as_they_were_written() -> None:
    rows = [
        Row(ROUND, 4, steps=10, weight=1, finite=1, loss=0.5, spread=2.25, scalars=(1.5, -2.0)),
        Row(ROUND, 4, steps=0, weight=0, finite=0, loss=3.0, spread=0.0, scalars=(7.0, 8.0)),
    ]
    assert pending(*rows).wait() == rows


def test_what_a_worker_has_not_looked_at_is_unknown() -> None:
    (row,) = pending(Row(7.0, 4, 10)).wait()
    assert (row.place, row.round_index, row.steps) == (7, 4, 10)
    assert all(map(math.isnan, (row.weight, row.finite, row.loss, row.spread)))


def test_one_workers_nan_leaves_the_rows_of_others_alone() -> None:
    first, second = pending(Row(ROUND, 4, 1, 1.0, 1.0), Row(ROUND, 4, 1)).wait()
    assert (first.weight, first.finite) == (1, 1)
    assert math.isnan(second.weight)


def test_rows_are_received_once() -> None:
    calls = []

    def receive() -> Tensor:
        calls.append(1)
        return table_of(Row(ROUND, 4, 1, 1.0))

    rows = PendingRows(receive, "round 4", lambda: False)
    assert (rows.has_been_read, rows.has_arrived()) == (False, False)
    assert rows.wait() is rows.wait()
    assert (rows.has_been_read, rows.has_arrived(), len(calls)) == (True, True, 1)


def test_workers_in_different_rounds_are_told_to_resume_from_one_checkpoint() -> None:
    with pytest.raises(RuntimeError, match="Worker 1 is in round 5 and worker 0 in round 4"):
        pending(Row(ROUND, 4, 1, 1.0), Row(ROUND, 5, 1, 1.0)).wait()


@pytest.mark.parametrize(
    ("places", "again"),
    [((ROUND, 9.0), True), ((9.0, 9.0), False), ((ROUND, ROUND), False)],
    ids=str,
)
def test_rows_are_told_again_if_a_worker_that_has_not_looked_finds_a_round(
    places: tuple[float, float], again: bool
) -> None:
    known = [Row(place, 4, 1, weight=1.0) for place in places]
    rows = pending(*(r if r.place == ROUND else r._replace(weight=math.nan) for r in known))
    completed: list[bool] = []

    def complete() -> list[Row]:
        completed.append(True)
        return known

    rows.complete = complete
    told = rows.wait()
    assert bool(completed) is again
    assert (told is known) is again


def test_weights_add_up_and_none_at_all_is_an_error() -> None:
    rows = [Row(ROUND, 4, 1, weight=weight) for weight in (1.0, 0.0, 1.0)]
    assert pending(*rows).total_weight() == 2.0
    with pytest.raises(RuntimeError, match="No worker has made finite progress in round 4"):
        pending(rows[1]).total_weight()


def test_a_purpose_has_a_number_that_float32_holds_and_a_round_has_not() -> None:
    purposes = ["validation", "a checkpoint", "the end of training", ""]
    numbers = [meeting_number(purpose) for purpose in purposes]
    assert len(set(numbers)) == len(purposes)
    assert all(number > ROUND for number in numbers)
    assert torch.tensor(numbers, dtype=torch.float32).double().tolist() == numbers


def tell(rank: int, world: int) -> dict[str, Any]:
    group, statistics = WorkerGroup.create(timeout_s=20), Statistics()
    carrier = TravellingRows(group)
    met = carrier.meet(statistics, Row(3.0, 0, rank), "a meeting").wait()
    assert [other.steps for other in met] == list(range(world))
    row = Row(ROUND, 0, rank, weight=1.0, scalars=(10.0 * rank,))
    rows = carrier.carry(statistics, row, "round 0").wait()
    place = group.watchdog.place
    group.close()
    return {"rows": rows, "place": place, "waited": statistics.wait_s > 0}


def test_rows_that_travel_by_themselves_reach_all_workers(pool: Pool) -> None:
    for told in pool.run(tell, world=3):
        assert [row.steps for row in told["rows"]] == [0, 1, 2]
        assert [row.scalars for row in told["rows"]] == [(0.0,), (10.0,), (20.0,)]
        assert (told["place"], told["waited"]) == ("round 0", True)


def test_a_worker_alone_hears_itself() -> None:
    row = Row(ROUND, 3, 1, weight=1.0, finite=1.0, loss=2.0, spread=0.0)
    assert start_rows(WorkerGroup(0, 1), Statistics(), row, "round 3").wait() == [row]


def part(rank: int, world: int) -> None:
    group = WorkerGroup.create(timeout_s=20)
    try:
        start_rows(group, Statistics(), Row(ROUND, rank, 1), "a test").wait()
    finally:
        group.close()


def test_every_worker_hears_of_different_rounds(pool: Pool) -> None:
    with pytest.raises(PoolError, match="Resume all workers from the same checkpoint") as error:
        pool.run(part, world=2)
    assert sorted(error.value.failures) == [0, 1]
