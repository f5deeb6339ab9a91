"""Ranks connect, agree on errors, and name a rank that freezes before training."""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch
import torch.distributed as dist

from lightning_loco.distributed import job as jobs
from lightning_loco.distributed.worker_group import WorkerGroup
from tests.harness.failing import failing_at, freeze
from tests.harness.forked_jobs import Job
from tests.harness.limits import HARNESS_S
from tests.harness.pool import Pool, PoolError
from tests.harness.programs import free_ports

TIMEOUT_S = 3.0
LONGEST_S = TIMEOUT_S + 6
CPU = torch.device("cpu")
NAMES = ("worker 0", "worker 1", "the aggregator-optimizer (rank 2)")


@contextmanager
def job_of_all(rank: int, port: int, timeout_s: float) -> Iterator[jobs.Job]:
    """Join a job of all ranks, after destroying the default process group."""
    dist.barrier()
    dist.destroy_process_group()
    with closing(jobs.Job("127.0.0.1", port, rank, NAMES, timeout_s)) as job:
        yield job


def agree_and_fail(rank: int, world: int, port: int) -> str:
    with job_of_all(rank, port, 20.0) as job, closing(WorkerGroup.of_job(job)) as group:
        if rank < 2:
            job.init_default_group(2, "gloo", CPU)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == 2
        group.connect()
        assert group.data is not None
        assert group.data.size() == 3
        group.raise_together(None)
        states = group.gather_states(torch.tensor([float(rank), math.nan]), "the test")
        assert [float(state[0]) for state in states] == [0.0, 1.0, 2.0]
        group.wait_for_all("the test")
        try:
            group.raise_together(ValueError("two many") if rank == 1 else None)
        except ValueError as error:
            return str(error)
    return "nothing"


@pytest.mark.process
def test_ranks_connect_and_agree_on_errors() -> None:
    (port,) = free_ports()
    with Job(agree_and_fail, port, world=3) as job:
        outcomes = job.outcomes([0, 1, 2], 60)
    assert [outcome.result for outcome in outcomes] == [
        "Worker 1: two many",
        "two many",
        "Worker 1: two many",
    ]


def agree_or_end(rank: int, world: int, port: int, ends: bool) -> str:
    with job_of_all(rank, port, 20.0) as job, closing(WorkerGroup.of_job(job)) as group:
        group.connect()
        if ends and rank == 0:
            os._exit(1)
        if not ends:
            group.raise_together(None)  # gloo fails on ranks that still connect if one closes
        return "together"


def test_a_job_at_the_port_of_an_earlier_one_whose_rank_0_has_ended(pool: Pool) -> None:
    """The other ranks are the same processes and still know the earlier store."""
    (port,) = free_ports()
    with pytest.raises(PoolError, match="rank 0 of 3"):
        pool.run(agree_or_end, port, True, world=3)
    assert pool.run(agree_or_end, port, False, world=3) == ["together"] * 3


def freeze_in(rank: int, world: int, port: int, phase: str, victim: int) -> tuple[str, float]:
    """Return the error of a rank when another one freezes, and the seconds until it was raised."""
    is_victim = rank == victim
    began = time.monotonic()
    try:
        with job_of_all(rank, port, TIMEOUT_S) as job:
            began = time.monotonic()
            if phase == "default group":
                freeze() if is_victim else job.init_default_group(3, "gloo", CPU)
            if phase == "joining" and is_victim:
                freeze()
            fails_now = phase == "connection" and is_victim
            with closing(WorkerGroup.of_job(job)) as group:
                with failing_at("connecting the ranks", lambda: fails_now, freeze):
                    group.connect()
                began = time.monotonic()
                freeze() if is_victim else group.raise_together(None)
    except RuntimeError as error:  # on a busy machine, already while it connects
        return str(error), time.monotonic() - began
    return "nothing", 0.0


@pytest.mark.process
@pytest.mark.parametrize(
    ("phase", "longest_s"),
    [
        ("joining", HARNESS_S),
        *(
            pytest.param(phase, LONGEST_S, marks=pytest.mark.soak)
            for phase in ("default group", "joining", "connection", "agreement")
        ),
    ],
)
def test_a_frozen_rank_is_named_in_time(
    phase: str, longest_s: float, subtests: pytest.Subtests
) -> None:
    for victim in range(3):
        with subtests.test(victim=NAMES[victim]):
            (port,) = free_ports()
            others = [rank for rank in range(3) if rank != victim]
            with Job(freeze_in, port, phase, victim, world=3) as job:
                for outcome in job.outcomes(others, 60):
                    assert outcome.error is None, outcome.error
                    text, seconds = outcome.result
                    assert NAMES[victim] in text
                    assert seconds < longest_s


def wait_for_missing_worker(rank: int, world: int, port: int) -> str:
    """Return the error of a rank if worker 1 never joins and the others wait without a timeout."""
    try:
        with job_of_all(rank, port, TIMEOUT_S) as job:
            if rank == 1:
                time.sleep(HARNESS_S)
            with closing(WorkerGroup.of_job(job, waits_indefinitely=True)) as group:
                try:
                    if rank == 0:
                        job.init_default_group(2, "gloo", CPU)
                    group.connect()
                except RuntimeError as error:
                    group.report_error(error)
                    raise
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.process
def test_an_unlimited_wait_ends_if_a_worker_never_joins() -> None:
    (port,) = free_ports()
    with Job(wait_for_missing_worker, port, world=3) as job:
        for outcome in job.outcomes([0, 2], HARNESS_S):
            assert outcome.error is None, outcome.error
            assert "from worker 1. Check that" in outcome.result


def end_without_saving(rank: int, world: int, port: int) -> str:
    """Return the error of a service rank if rank 0 ends without saving and the store lives on."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.barrier()
    dist.destroy_process_group()
    with closing(jobs.Job("127.0.0.1", port, rank, NAMES[:2], HARNESS_S)) as job:
        job.publish_end()
        if rank == 0:
            atexit._run_exitfuncs()  # a forked process does not run these
            return "nothing"
        try:
            job.wait_until_written()
        except RuntimeError as error:
            return str(error)
    return "nothing"


@pytest.mark.process
def test_waiting_for_a_checkpoint_ends_if_rank_0_ends_without_one() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Job(end_without_saving, store.port, world=2) as job:
        (outcome,) = job.outcomes([1], HARNESS_S)
    assert outcome.error is None, outcome.error
    assert outcome.result.startswith("worker 0 has ended without a checkpoint that this rank waits")
