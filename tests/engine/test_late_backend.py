"""Engines on a backend whose ``wait`` returns at once, as with NCCL: harness/late_backend.py."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import ClockEngine, DiLoCo, GASLoC, ModelAverage, StepEngine
from lightning_loco.algorithms import Algorithm
from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine import Engine
from tests.cases import CASES, KINDS, Case, rows, without_variants
from tests.harness.late_backend import DELAY_S, LateGroup, late_group
from tests.harness.pool import Pool, PoolError, run_each
from tests.harness.rounds import LARGE, SMALL_BUCKET, approach, zeros
from tests.harness.small_model import flat
from tests.harness.toys import Point

TIMEOUT_S = 2.0
LATEST_S = TIMEOUT_S + 6.0


def make_group(late: bool) -> WorkerGroup:
    return late_group() if late else WorkerGroup.create(timeout_s=20)


# ------------------------------------------------------------------------ the same numbers


def train(
    rank: int, world: int, case: Case, late: bool, compression: str | None = None
) -> dict[str, Any]:
    """Run rounds of two steps; worker 1 runs two rounds more than the others."""
    model = zeros()
    settings = case.settings(sync_every=2, bucket_bytes=SMALL_BUCKET)
    settings["compression"] = compression or case.compression
    engine = StepEngine(model, case.algorithm, group=make_group(late), **settings)
    history: list[Tensor] = []
    for _ in range(8 if rank == 1 else 4):
        approach(rank, model)
        if engine.step():
            history.append(flat(model))
    engine.finish()
    history.append(flat(model))
    found = {"history": history, "wait_s": engine.statistics.wait_s}
    engine.close()
    return found


@rows("same numbers", without_variants(), KINDS)
def test_rounds_by_the_step_give_the_numbers_of_gloo(pool: Pool, case: Case) -> None:
    world = 3 if case.algorithm.exchange == "neighbors" else 2
    results = run_each(pool, train, {late: (case, late) for late in (False, True)}, world=world)
    for on_gloo, on_late in zip(*results.values(), strict=True):
        assert torch.equal(torch.stack(on_late["history"]), torch.stack(on_gloo["history"]))
        assert on_late["wait_s"] > 3 * DELAY_S


def test_compressed_rounds_give_the_numbers_of_gloo(pool: Pool, subtests: pytest.Subtests) -> None:
    codecs = {"diloco": "e3m0", "async_diloco": "sparse", "gasloc": "int8", "local_sgd": "int8"}
    rows = {
        (name, late): (CASES[name], late, codec)
        for name, codec in codecs.items()
        for late in (False, True)
    }
    results = run_each(pool, train, rows, world=2)
    for name in codecs:
        with subtests.test(name):
            for expected, found in zip(results[name, False], results[name, True], strict=True):
                assert torch.equal(torch.stack(found["history"]), torch.stack(expected["history"]))


def train_by_clock(
    rank: int, world: int, topology: str | None, late: bool
) -> tuple[list[Tensor], float]:
    """Apply each round one local step after its start."""
    model = zeros()
    engine = ClockEngine(
        model, interval_s=0, warmup_steps=2, topology=topology, group=make_group(late)
    )
    history = []
    for _ in range(2):
        (value,) = model.parameters()
        value.grad = torch.full_like(value, float(rank))
        engine.average_gradients(model.parameters())
        value.data.sub_(value.grad)
        engine.count_step()
        history.append(flat(model))
    for _ in range(3):
        for _ in range(2):
            approach(rank, model)
            engine.count_step()
            deadline = time.monotonic() + 20
            while not engine.check_due():
                assert time.monotonic() < deadline, "nothing has arrived"
                time.sleep(0.001)
            engine.make_round()
            history.append(flat(model))
    engine.finish()
    history.append(flat(model))
    distance_s = engine.statistics.wait_s
    engine.close()
    return history, distance_s


@pytest.mark.parametrize("topology", [None, "ring"])
def test_rounds_by_the_clock_give_the_numbers_of_gloo(pool: Pool, topology: str | None) -> None:
    rows = {late: (topology, late) for late in (False, True)}
    results = run_each(pool, train_by_clock, rows, world=3)
    for (on_gloo, _), (on_late, _) in zip(*results.values(), strict=True):
        assert torch.equal(torch.stack(on_late), torch.stack(on_gloo))


# --------------------------------------------------------------------------------- faults


def engine_of(name: str, model: Point, group: WorkerGroup) -> Engine:
    if name == "clock":
        return ClockEngine(model, interval_s=0, group=group)
    if name == "clock ring":
        return ClockEngine(model, interval_s=0, topology="ring", group=group)
    algorithm: Algorithm = {"diloco": DiLoCo(), "late diloco": DiLoCo(0.7, 0.0)}.get(name, GASLoC())
    overlap = name.startswith("late")
    return StepEngine(
        model, algorithm, sync_every=1, overlap=overlap, warm_start=False, group=group
    )


ENGINES = ["diloco", "late diloco", "gasloc", "late gasloc", "clock", "clock ring"]


def lose_a_worker(rank: int, world: int, name: str, how: str) -> tuple[str, float, float, bool]:
    """Worker 1 runs no further round; return the others' error, its delay, and how they end."""
    model = Point(torch.zeros(LARGE, dtype=torch.float64))
    group = late_group(TIMEOUT_S)
    data = group.data
    assert isinstance(data, LateGroup)
    engine = engine_of(name, model, group)
    for _ in range(4):
        approach(rank, model)
        engine.step()
        time.sleep(3 * DELAY_S)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LATEST_S)
        group.failed = True
        engine.close()
        return "", 0.0, 0.0, True
    error, began = "", time.monotonic()
    while not error:
        assert time.monotonic() < began + 3 * LATEST_S, "no missing worker was detected"
        approach(rank, model)
        try:
            engine.step()
        except RuntimeError as raised:
            error = str(raised)
    lasted_s = time.monotonic() - began
    began = time.monotonic()
    engine.close()
    return error, lasted_s, time.monotonic() - began, data.was_aborted


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("name", ENGINES)
def test_a_worker_that_makes_no_round_is_named(pool: Pool, name: str) -> None:
    (error, lasted_s, closing_s, was_aborted), _, _ = pool.run(
        lose_a_worker, name, "asleep", world=3
    )
    assert "No message in round" in error
    assert "worker 1 (alive, last exchange: " in error
    assert TIMEOUT_S / 2 < lasted_s < LATEST_S
    assert was_aborted
    assert closing_s < 3.0


@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    [
        "diloco",
        pytest.param("gasloc", marks=pytest.mark.soak),
        pytest.param("clock", marks=pytest.mark.soak),
    ],
)
def test_a_killed_worker_is_named(pool: Pool, name: str) -> None:
    with pytest.raises(PoolError) as raised:
        pool.run(raise_what_is_said, name, world=3, grace_s=LATEST_S)
    assert raised.value.missing == [1]
    for rank in (0, 2):
        assert "worker 1 (no sign of life; last seen in " in raised.value.failures[rank].message


def raise_what_is_said(rank: int, world: int, name: str) -> None:
    error, lasted_s, _, _ = lose_a_worker(rank, world, name, "killed")
    assert lasted_s < LATEST_S
    raise RuntimeError(error)


def report(rank: int, world: int) -> tuple[str, float]:
    """Let worker 1 fail alone, and report it."""
    model = Point(torch.zeros(10, dtype=torch.float64))
    engine = StepEngine(model, DiLoCo(), sync_every=1, group=late_group(timeout_s=30))
    if rank == 1:
        engine.worker.group.watchdog.report("ValueError: a bad batch")
        engine.worker.group.failed = True
        engine.close()
        return "", 0.0
    began, error = time.monotonic(), ""
    try:
        engine.step()
    except RuntimeError as raised:
        error = str(raised)
    engine.close()
    return error, time.monotonic() - began


def test_a_reported_failure_ends_the_wait_at_once(pool: Pool) -> None:
    (error, lasted_s), _ = pool.run(report, world=2)
    assert error == "Worker 1 failed:\nValueError: a bad batch"
    assert lasted_s < 10


def leave(rank: int, world: int, name: str) -> float:
    """Let worker 0 give up while a round is pending that worker 1 has not started."""
    engine = engine_of(name, Point(torch.zeros(10)), late_group())
    if rank == 0:
        engine.step()
    time.sleep(0.1)
    began = time.monotonic()
    engine.close()
    return time.monotonic() - began


@pytest.mark.parametrize("name", ["late gasloc", "clock"])
def test_who_leaves_a_round_does_not_wait_for_it(pool: Pool, name: str) -> None:
    for closing_s in pool.run(leave, name, world=2):
        assert closing_s < 3.0


# ------------------------------------------------------------------------------ invitation


def wait_for_the_device(rank: int, world: int) -> int:
    """Start a round, wait for the device, and take another step; return the number of rounds."""
    model = Point(torch.zeros(10, dtype=torch.float64))
    group = late_group(timeout_s=10)
    data = group.data
    assert isinstance(data, LateGroup)
    engine = ClockEngine(model, interval_s=0, group=group)
    if rank == 0:
        engine.step()  # a round starts; the other worker is already at its end
        data.synchronize()
        engine.step()
    engine.finish()
    engine.close()
    return engine.statistics.rounds


def test_workers_at_a_sync_point_are_called_before_a_round_begins(pool: Pool) -> None:
    assert pool.run(wait_for_the_device, world=2, timeout_s=20) == [1, 1]


# ---------------------------------------------------------------------------------- groups


def patience(rank: int, world: int) -> tuple[bool, float, bool]:
    group = late_group(timeout_s=7)
    data = group.data
    assert isinstance(data, LateGroup)
    found = group.wait_blocks_host, data.timeout.total_seconds(), data.was_aborted
    group.close()
    return *found[:2], data.was_aborted


def test_a_backend_that_ends_processes_has_more_patience_than_we(pool: Pool) -> None:
    for wait_blocks_host, seconds, was_aborted in pool.run(patience, world=2):
        assert not wait_blocks_host
        assert seconds > 7 + 6
        assert not was_aborted


def test_the_table_has_rounds_that_are_applied_late() -> None:
    merge_policy = [case for case in map(CASES.get, without_variants()) if case and case.overlap]
    assert {type(case.algorithm) for case in merge_policy} >= {DiLoCo, GASLoC, ModelAverage}
