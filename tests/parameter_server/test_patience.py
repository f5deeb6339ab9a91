"""Keep-alives: waits for a waiting server do not time out; errors name the late rank."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_loco.parameter_server import (
    RemoteOptimizer,
    Serving,
    Tiers,
    Transport,
    run_role,
)
from tests.harness.failing import failing_at, freeze
from tests.harness.forked_jobs import Job, Outcome
from tests.harness.limits import HARNESS_S

pytestmark = pytest.mark.process

TIMEOUT_S = 2.0
PROMPT_S = TIMEOUT_S + 6
STEPS = 5
EVENT_STEP = 3
"""The step with the events."""


class Run(NamedTuple):
    """Events of the third step.

    Attributes:
        num_workers: Number of workers; the ranks after them serve.
        in_backward: Called by the last worker when half of its gradients are sent.
        between_servers: Called when the first server has all its gradients, the second none.
        frozen_later: Ranks that are frozen when all gradients are received.
        frozen_at: File for the time of the freeze.
        num_servers: Number of shards; gradients are clipped by the norm of all.
        width: Width of the model.
    """

    num_workers: int
    in_backward: Callable[[], None] | None = None
    between_servers: Callable[[], None] | None = None
    frozen_later: tuple[int, ...] = ()
    frozen_at: Path = Path(os.devnull)
    num_servers: int = 1
    width: int = 5


def run_rank(rank: int, world: int, run: Run) -> Any:
    """Train or serve; return the number of steps on workers."""
    torch.manual_seed(0)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid{rank}", str(os.getpid()))
    pids = [int(store.get(f"pid{other}")) for other in range(world)]
    width = run.width
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 1))
    is_troubled = rank == run.num_workers - 1
    served: list[int] = []
    made = [0]

    def in_backward(_: Any) -> None:
        if run.in_backward is not None and is_troubled and made[0] == EVENT_STEP:
            run.in_backward()

    for layer in model[:2]:
        layer.weight.register_hook(in_backward)

    def after_step() -> None:
        served.append(1)
        if len(served) == EVENT_STEP and run.frozen_later:
            run.frozen_at.write_text(str(time.time()))
            for victim in run.frozen_later:
                os.kill(pids[victim], signal.SIGSTOP)

    def train(remote: RemoteOptimizer) -> int:
        for _ in range(STEPS):
            made[0] += 1
            remote.zero_grad()
            if run.between_servers is None:
                remote.expect_backward()
            model(torch.ones(2, 3)).square().mean().backward()
            if run.num_servers > 1:
                remote.clip_grad_norm_(1.0)
            remote.step()
        return made[0]

    failing: AbstractContextManager[None] = nullcontext()
    if run.between_servers is not None and is_troubled:
        asked = itertools.count(1)
        failing = failing_at(
            "requesting a step", lambda: next(asked) == 2 * EVENT_STEP, run.between_servers
        )
    with failing:
        return run_role(
            train,
            model.parameters(),
            lambda params: torch.optim.SGD(params, lr=0.01),
            run.num_workers,
            num_servers=run.num_servers,
            transport=Transport(timeout_s=TIMEOUT_S, bucket_bytes=8 * run.width),
            serving=Serving(after_step=after_step),
        )


def outcomes(run: Run, num_tiers: int, lost: tuple[int, ...]) -> dict[int, Outcome]:
    """Return the outcomes of the ranks that are not lost."""
    world = run.num_workers + (num_tiers - 1) * run.num_servers
    others = [rank for rank in range(world) if rank not in lost]
    with Job(run_rank, run, world=world) as job:
        return dict(zip(others, job.outcomes(others, HARNESS_S), strict=True))


def be_late() -> None:
    """Be late for a bucket; two of these delays exceed the timeout."""
    time.sleep(0.7 * TIMEOUT_S)


@pytest.mark.parametrize("num_tiers", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_worker_waits_for_a_step_longer_than_the_timeout(num_tiers: int) -> None:
    ended = outcomes(Run(2, in_backward=be_late), num_tiers, lost=())
    for rank, outcome in ended.items():
        assert outcome.error is None, outcome.error
        assert outcome.result == (STEPS if rank < 2 else None)


PHASES = {
    "backward": Run(3, freeze),
    "reply": Run(3, frozen_later=(2,), width=2000),  # more than fits into the socket buffers
}


@pytest.mark.parametrize("num_tiers", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("phase", ["backward", pytest.param("reply", marks=pytest.mark.soak)])
def test_a_frozen_worker_ends_all_ranks_and_is_named(phase: str, num_tiers: int) -> None:
    for rank, outcome in outcomes(PHASES[phase], num_tiers, lost=(2,)).items():
        assert outcome.error is not None
        if rank < 4:  # with three tiers the optimizer is connected to the aggregator only
            assert "worker 2" in outcome.error.lower().rpartition("error: ")[2]


@pytest.mark.soak
@pytest.mark.parametrize("num_tiers", [2, 3])
def test_a_worker_that_is_frozen_between_two_servers_is_named(num_tiers: int) -> None:
    """The first server waits for norms of the second one, which waits for the worker."""
    run = Run(3, between_servers=freeze, num_servers=2)
    for rank, outcome in outcomes(run, num_tiers, lost=(2,)).items():
        assert outcome.error is not None
        first_server = Tiers.detect(1 + 2 * num_tiers, 3, 2).optimizers[0]
        if rank != first_server:
            assert "worker 2" in outcome.error.lower().rpartition("error: ")[2]


@pytest.mark.parametrize(
    ("victim", "longest_s"), [(2, HARNESS_S), pytest.param(3, PROMPT_S, marks=pytest.mark.soak)]
)
def test_a_frozen_server_ends_all_ranks_in_time_and_is_named(
    victim: int, longest_s: float, tmp_path: Path
) -> None:
    name = Tiers.detect(4, 2).name(victim)
    run = Run(2, frozen_later=(victim,), frozen_at=tmp_path / "frozen_at")
    ended = outcomes(run, 3, lost=(victim,))
    for outcome in ended.values():
        assert outcome.error is not None
        assert name in outcome.error.lower().rpartition("error: ")[2]
        assert outcome.ended_at - float(run.frozen_at.read_text()) < longest_s
