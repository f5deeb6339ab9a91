"""Rendezvous of workers before any process group exists; errors name the missing worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_loco.distributed.job import init_workers
from tests.harness.cover import cover
from tests.harness.failing import freeze
from tests.harness.forked_jobs import Outcome, Start
from tests.harness.limits import HARNESS_S
from tests.harness.programs import free_ports, start_together

pytestmark = pytest.mark.process

TIMEOUT_S = 3.0
PROMPT_S = TIMEOUT_S + 6


def init_with(rank: int, world: int, port: int, timeout_s: float, kind: str = "cpu") -> None:
    device = torch.device(kind)
    init_workers(lambda: ("127.0.0.1", port), (rank, world), "gloo", device, timeout_s)


def init_workers_twice(rank: int, world: int, port: int) -> float:
    """Create a second group in the same processes, with the same address and port."""
    total = torch.ones(1)
    for _ in range(2):
        init_with(rank, world, port, 30.0)
        dist.all_reduce(total)
        init_with(rank, world, port, 30.0)  # checks the existing group
        dist.barrier()
        dist.destroy_process_group()
    return float(total)


def init_with_different_devices(rank: int, world: int, port: int) -> str:
    try:
        init_with(rank, world, port, 60.0, "cuda" if rank == 1 else "cpu")
    except ValueError as error:
        return str(error)
    return "nothing"


def init_as(
    rank: int, world: int, port: int, folder: Path, jobs: list[tuple[int, int, str]]
) -> str:
    """Join with the rank, world size and name in ``jobs[rank]``; return an error or a sum."""
    number, num_workers, job_name = jobs[rank]
    address, cpu = ("127.0.0.1", port), torch.device("cpu")
    start_together(folder, rank, world)
    try:
        init_workers(lambda: address, (number, num_workers), "gloo", cpu, 30.0, job_name)
    except (ValueError, RuntimeError) as error:
        (folder / "refused").touch()
        return str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    deadline = time.monotonic() + HARNESS_S
    while not (folder / "refused").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # rank 0 hosts the store
    dist.barrier()
    return str(total.item())


def fail_to_join(rank: int, world: int, port: int, victim: int, how: str) -> tuple[str, float]:
    began = time.monotonic()
    if rank == victim:
        freeze() if how == "frozen" else os._exit(0)
    try:
        init_with(rank, world, port, TIMEOUT_S)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "nothing", 0.0


def outcomes(
    fn: Callable[..., Any], *args: Any, ranks: tuple[int, ...] = (0, 1, 2)
) -> list[Outcome]:
    (port,) = free_ports()
    with Start(fn, port, *args, world=3) as job:
        return job.outcomes(ranks, HARNESS_S)


def test_workers_can_be_initialized_repeatedly() -> None:
    assert [outcome.result for outcome in outcomes(init_workers_twice)] == [9.0, 9.0, 9.0]


def test_different_devices_are_an_error_before_a_group_is_made() -> None:
    began = time.monotonic()
    all_outcomes = outcomes(init_with_different_devices)
    assert time.monotonic() - began < 30  # includes starting processes; a group would wait for 60 s
    for outcome in all_outcomes:
        assert "Worker 1 is on a device of kind 'cuda' and worker 0 on 'cpu'" in outcome.result


def test_a_rank_of_another_job_is_refused_and_the_job_continues(tmp_path: Path) -> None:
    jobs = [(0, 2, "SLURM job 17"), (1, 2, "SLURM job 40017"), (1, 2, "SLURM job 17")]
    first, stranger, second = (one.result for one in outcomes(init_as, tmp_path, jobs))
    assert first == second == "2.0"
    assert "belongs to SLURM job 40017, but rank 0 at 127.0.0.1:" in stranger
    assert "to SLURM job 17, which goes on without it. Give each job a MASTER_PORT" in stranger


@pytest.mark.parametrize("counts", [(3, 3, 2), (2, 3, 3)])
def test_different_numbers_of_ranks_are_an_error_on_all(
    counts: tuple[int, int, int], tmp_path: Path
) -> None:
    jobs = [(min(rank, count - 1), count, "") for rank, count in enumerate(counts)]
    for outcome in outcomes(init_as, tmp_path, jobs):
        assert "ranks in all, and rank 0" in outcome.result
        assert "Trainer(devices=..., num_nodes=...)" in outcome.result


@pytest.mark.parametrize(
    ("victim", "how", "longest_s"),
    [
        *cover((0, 1, 2), ("frozen", "ended"), (HARNESS_S,), strength=1),
        *(
            pytest.param(victim, "frozen", PROMPT_S, marks=pytest.mark.soak) for victim in (0, 1)
        ),  # the host of the store, and one other rank
    ],
)
def test_a_missing_worker_is_named_in_time(victim: int, how: str, longest_s: float) -> None:
    others = tuple(rank for rank in range(3) if rank != victim)
    for outcome in outcomes(fail_to_join, victim, how, ranks=others):
        assert outcome.error is None, outcome.error
        text, seconds = outcome.result
        assert f"worker {victim}" in text
        assert seconds < longest_s
