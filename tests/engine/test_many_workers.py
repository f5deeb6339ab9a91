"""Properties that show only with many workers: 32, as a job of separate processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_loco import DiLoCo, StepEngine
from lightning_loco.algorithms import NeighborAverage
from lightning_loco.distributed import WorkerGroup
from lightning_loco.topology import TOPOLOGIES, RandomMatching
from tests.harness.forked_jobs import Job

pytestmark = [pytest.mark.soak, pytest.mark.process]

WORKERS = 32
ROUNDS = 7
LIMIT_S = 240.0
TIMEOUT_S = 60.0
PATIENCE_S = 20.0
MATCHINGS = [RandomMatching(seed) for seed in (1, 2)]
TOPOLOGIES_HERE = [*(kind() for kind in TOPOLOGIES.values()), *MATCHINGS]


class Number(nn.Module):
    """A model with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def results(fn: Any, *args: Any) -> list[Any]:
    """Return the results of all workers."""
    with Job(fn, *args, world=WORKERS, group_timeout_s=TIMEOUT_S) as job:
        outcomes = job.outcomes(range(WORKERS), LIMIT_S)
    assert [outcome.error for outcome in outcomes] == [None] * WORKERS
    return [outcome.result for outcome in outcomes]


class Mixed(NamedTuple):
    """Results of one worker.

    Attributes:
        values: Its value after each round, by topology; the initial value is its number.
        partners: Its partner in each round, by matching.
    """

    values: list[list[float]]
    partners: list[list[int]]


def mix_by_all(rank: int, world: int) -> Mixed:
    group = WorkerGroup.create(timeout_s=TIMEOUT_S)
    mixed = Mixed([], [])
    for topology in TOPOLOGIES_HERE:
        module = Number()
        engine = StepEngine(module, NeighborAverage(), topology=topology, sync_every=1, group=group)
        module.value.data.fill_(float(rank))
        mixed.values.append([])
        for _ in range(ROUNDS):
            engine.step()
            mixed.values[-1].append(module.value.item())
    engine.close()
    for matching in MATCHINGS:
        mixed.partners.append([matching.partner(rank, world, number) for number in range(500)])
    return mixed


@pytest.fixture(scope="module")
def mixed() -> list[Mixed]:
    return results(mix_by_all)


def test_a_topology_mixes_by_its_matrix_and_keeps_the_mean(
    mixed: list[Mixed], subtests: pytest.Subtests
) -> None:
    for index, topology in enumerate(TOPOLOGIES_HERE):
        with subtests.test(str(topology)):
            expected = torch.arange(float(WORKERS), dtype=torch.float64)
            for number in range(ROUNDS):
                matrix = torch.zeros(WORKERS, WORKERS, dtype=torch.float64)
                for worker in range(WORKERS):
                    for peer, weight in topology.weights(worker, WORKERS, number).items():
                        matrix[worker, peer] = weight
                expected = matrix @ expected
                held = torch.tensor(
                    [one.values[index][number] for one in mixed], dtype=torch.float64
                )
                torch.testing.assert_close(held, expected, rtol=1e-12, atol=1e-10)
                assert held.mean().item() == pytest.approx((WORKERS - 1) / 2, abs=1e-10)


def test_random_matchings_agree_and_are_involutions(mixed: list[Mixed]) -> None:
    everyone = list(range(WORKERS))
    for index in range(len(MATCHINGS)):
        rounds = list(zip(*(one.partners[index] for one in mixed), strict=True))
        for pairs in rounds:
            assert [pairs[peer] for peer in pairs] == everyone
            assert all(peer != worker for worker, peer in enumerate(pairs))
        for worker in everyone:  # 500 rounds pair each worker with all others
            assert len({pairs[worker] for pairs in rounds}) == WORKERS - 1
    assert mixed[0].partners[0] != mixed[0].partners[1]


def train_until_stopped(rank: int, world: int) -> tuple[int, int, int]:
    """Return the rounds, the local steps since the last one, and all local steps at the stop."""
    engine = StepEngine(Number(), DiLoCo(), sync_every=[2 + worker % 3 for worker in range(world)])
    for step in range(100_000):
        engine.step()
        if rank in (7, 30) and step == 20:
            engine.worker.stop.request("SIGTERM")
        if engine.worker.stop_agreed is not None:
            break
    worker = engine.worker
    found = worker.round_index, worker.steps_since_round, worker.steps
    engine.close()
    return found


def test_all_stop_at_one_point() -> None:
    found = results(train_until_stopped)
    assert len({rounds for rounds, _, _ in found}) == 1
    for rank, (rounds, since, steps) in enumerate(found):
        pace = 2 + rank % 3
        assert rounds > 0
        assert since < pace
        assert steps == rounds * pace + since


def train_until_killed(rank: int, world: int) -> None:
    engine = StepEngine(
        Number(), DiLoCo(), sync_every=5, group=WorkerGroup.create(timeout_s=PATIENCE_S)
    )
    try:
        for step in range(1000):
            if rank == 17 and step == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
    except BaseException as error:
        engine.worker.group.close(error)
        raise


def test_one_that_is_killed_is_named_by_all() -> None:
    with Job(train_until_killed, world=WORKERS, group_timeout_s=TIMEOUT_S) as job:
        killed, _ = job.workers[17]
        killed.join(LIMIT_S)
        killed_at = time.time()
        others = [rank for rank in range(WORKERS) if rank != 17]
        outcomes = job.outcomes(others, LIMIT_S)
    for outcome in outcomes:
        assert outcome.error is not None
        assert "worker 17 (no sign of life" in outcome.error
        assert outcome.ended_at < killed_at + PATIENCE_S + 6
