"""A worker without an engine: sync points, checks of the model, and the consensus."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.algorithms import DiLoCo, GASLoC, LocalSGD
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.model.flat import Cuts
from lightning_loco.model.worker import EarlierRun, Worker
from tests.harness.manual_clock import ManualClock
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import flat, norm_model


class Plain:
    """Settings with a single value.

    Args:
        value: Any value.
    """

    def __init__(self, value: object = None) -> None:
        self.value = value
        self.seed = -1

    link = None
    outer_device = None

    def prepare(self, num_workers: int, seed: int) -> Plain:
        self.seed = seed
        return self

    algorithm = LocalSGD()
    granularity = 1

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        return [[range(sum(sizes.values()))]]

    def cuts(
        self, numel: int, itemsize: int, longest: int, boundaries: tuple[int, ...] = ()
    ) -> Cuts:
        return Cuts()

    def describe(self) -> dict[str, Any]:
        return {"value": self.value}


def joined(model: nn.Module, value: object = None) -> Worker:
    worker, _ = Worker.join(model, lambda: Plain(value), WorkerGroup.create(timeout_s=20))
    return worker


def start(rank: int, world: int) -> tuple[Tensor, int, int]:
    torch.manual_seed(5 + rank)
    model = nn.Linear(3, 2)
    worker, settings = Worker.join(model, Plain, WorkerGroup.create(timeout_s=20))
    worker.group.close()
    return flat(model), worker.checksum, settings.seed


def test_all_start_from_worker_0_and_its_seed(pool: Pool) -> None:
    first, second = pool.run(start, world=2)
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    assert first[2] == 5


def start_differently(rank: int, world: int, kind: str) -> None:
    group = WorkerGroup.create(timeout_s=20)

    def settings() -> Plain:
        if kind == "error" and rank == 1:
            raise ValueError("sync_every must be at least 1")
        return Plain(rank if kind == "settings" else None)

    model = nn.Linear(3, 2 + rank if kind == "model" else 2)
    try:
        Worker.join(model, settings, group)
    finally:
        group.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("error", "sync_every must be at least 1"),
        ("settings", "Worker 1 has value=1 and worker 0 has value=0"),
        ("model", "Worker 1 holds a different model"),
    ],
)
def test_what_does_not_fit_is_an_error_on_every_worker(pool: Pool, kind: str, text: str) -> None:
    with pytest.raises(PoolError, match=text) as error:
        pool.run(start_differently, kind, world=2)
    assert sorted(error.value.failures) == [0, 1]


def sync_point(rank: int, world: int) -> tuple[list[float], list[float]]:
    worker = joined(nn.Linear(2, 2))
    for _ in range(rank + 1):
        worker.count_step(10)
    worker.last_loss = torch.tensor(0.5 * rank)
    statuses = worker.sync_point("a barrier")
    worker.group.close()
    return [status.steps for status in statuses], [status.loss for status in statuses]


def test_a_sync_point_returns_the_statuses_of_all(pool: Pool) -> None:
    assert pool.run(sync_point, world=3) == [([1, 2, 3], [0.0, 0.5, 1.0])] * 3


def test_a_loss_that_is_remembered_keeps_no_graph_alive() -> None:
    worker = joined(model := nn.Linear(2, 2))
    worker.last_loss = loss = model(torch.ones(1, 2)).sum()
    assert isinstance(worker.last_loss, Tensor)
    assert worker.last_loss.grad_fn is None
    assert worker.status(1.0).loss == pytest.approx(loss.item())


def miss_each_other(rank: int, world: int) -> None:
    worker = joined(nn.Linear(2, 2))
    try:
        worker.count_step()
        worker.sync_point("validation" if rank else "a checkpoint")
    finally:
        worker.group.close()


def test_workers_at_different_sync_points_get_an_error(pool: Pool) -> None:
    found = "worker 0 at a checkpoint after 1 local steps; worker 1 at validation after 1 local"
    text = f"Workers wait for each other at different sync points: {found}"
    with pytest.raises(PoolError, match=text) as error:
        pool.run(miss_each_other, world=2)
    assert sorted(error.value.failures) == [0, 1]


def show(rank: int, world: int, broken: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    model = norm_model()
    worker = joined(model)
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    for tensor in [*model.parameters(), *buffers]:
        tensor.data.fill_(math.nan if rank in broken else float(rank))
    local = flat(model)
    worker.show_consensus()
    worker.show_consensus()  # a second call does nothing
    shown, shown_buffers = flat(model), torch.cat([b.flatten() for b in buffers])
    saved = worker.state_dict()["params"]
    worker.show_local()
    back = flat(model)
    worker.group.close()
    assert torch.equal(saved.isnan(), local.isnan())
    return shown, shown_buffers, back, local


@pytest.mark.parametrize("broken", [[], [1]], ids=str)
def test_the_consensus_is_the_mean_of_the_finite_and_local_values_come_back(
    pool: Pool, broken: list[int]
) -> None:
    finite = [rank for rank in range(3) if rank not in broken]
    mean = sum(finite) / len(finite)
    for shown, buffers, back, local in pool.run(show, broken, world=3):
        assert set(shown.tolist()) == set(buffers.tolist()) == {mean}
        torch.testing.assert_close(back, local, rtol=0, atol=0, equal_nan=True)


LOWEST = torch.tensor([torch.finfo(torch.float64).min, 0.1], dtype=torch.float64)


def show_buffers(rank: int, world: int) -> tuple[list[Tensor], list[str]]:
    """Show the consensus of a buffer that differs, one of unequal shapes, and one that is equal."""
    model = norm_model()
    model.register_buffer("mask", LOWEST.clone())
    worker = joined(model)
    model[1].running_mean.fill_(float(rank))
    model[1].running_var = torch.full((2 + rank,), float(rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker.show_consensus()
    assert torch.equal(model.mask, LOWEST), "a sum over the workers would be infinite"
    found = [model[1].running_mean.clone(), model[1].running_var.clone()]
    worker.show_local()
    assert model[1].running_mean.eq(rank).all()
    assert torch.equal(model.mask, LOWEST)
    worker.group.close()
    return found, [str(one.message) for one in caught]


def test_only_buffers_that_differ_and_are_alike_are_averaged(pool: Pool) -> None:
    results = pool.run(show_buffers, world=2)
    for rank, ((means, variances), said) in enumerate(results):
        assert means.eq(0.5).all()
        assert variances.tolist() == [float(rank)] * (2 + rank)
        assert len(said) == 1 - rank
    assert "1.running_var: these buffers, or parameters" in results[0][1][0]


def test_without_a_finite_worker_there_is_no_consensus(pool: Pool) -> None:
    with pytest.raises(PoolError, match="NaN or infinity on every worker") as error:
        pool.run(show, [0, 1], world=2)
    assert sorted(error.value.failures) == [0, 1]


def test_worker_0_names_those_that_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    worker = joined(nn.Linear(2, 2))
    statuses = [
        WorkerStatus(0.0, 4, 1, float(f), float(f), loss=i) for i, f in enumerate((1, 0, 1, 0))
    ]
    with caplog.at_level(logging.WARNING, "lightning_loco"):
        worker.record_statuses(statuses)
    assert "worker 1, 3 at round 4: left out" in caplog.text
    assert worker.statistics.losses == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="Lower the learning rate"):
        worker.record_statuses(statuses[1::2])


def test_a_state_is_where_the_worker_was() -> None:
    model = norm_model()
    worker = joined(model)
    for _ in range(3):
        worker.count_step(2)
    worker.round_index, worker.steps_since_round = 1, 1
    saved = worker.state_dict()
    other = norm_model(seed=1)
    again = joined(other)
    again.load_state_dict(saved)
    assert (again.steps, again.round_index, again.steps_since_round) == (3, 1, 1)
    assert torch.equal(flat(other), flat(model))


def test_the_time_of_a_step_is_of_this_interval_of_this_process_without_waits() -> None:
    clock = ManualClock()
    worker, _ = Worker.join(norm_model(), Plain, WorkerGroup(0, 1, clock=clock))

    def step(seconds: float) -> float:
        clock.advance(seconds)
        worker.count_step(2)
        return worker.step_s()

    assert worker.step_s() == 0.0
    assert (step(1.0), step(2.0)) == (1.0, 1.5)
    clock.advance(50.0)
    worker.statistics.count_wait(2.0, 52.0)
    assert worker.step_s() == 1.5
    worker.begin_interval()
    assert worker.step_s() == 0.0
    assert step(4.0) == 4.0
    worker.load_state_dict(worker.state_dict())
    assert worker.step_s() == 0.0
    assert step(5.0) == 5.0


def test_a_distance_to_a_mean_of_one_worker_is_none() -> None:
    assert joined(nn.Linear(2, 2)).measure_consensus(100) == 0.0


def test_what_another_algorithm_drops_is_said() -> None:
    state: dict[str, Any] = {
        "fragments": [{"pending": None}, {"pending": {"index": 3}}],
        "shared": [{"state": {"outer": 1, "momentum": 2}}],
    }
    start, pending = "all workers start from the consensus", "a pending round is dropped"
    saved = EarlierRun(state, "DiLoCo", {}, has_same_workers=True)
    dropped = "the state of DiLoCo (momentum, outer) is dropped"
    assert saved.dropped_by(GASLoC()) == [start, dropped, pending]
    assert saved.dropped_by(DiLoCo()) == [start, pending]
    assert EarlierRun({}, "DiLoCo", {}, has_same_workers=True).dropped_by(GASLoC()) == [start]
