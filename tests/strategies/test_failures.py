"""A rank that fails, stops or has too little data: the others name it, or stop with it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_loco.distributed import WorkerGroup
from lightning_loco.strategies.replica_group import ReplicaGroup
from tests.harness.failing import KINDS, FailIn
from tests.harness.forked_jobs import Job
from tests.harness.limits import HARNESS_S
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import TinyModule, ValidatedModule
from tests.strategies.families import FAMILIES, Family, HybridModule, ShardedModule, rounds

SIZE = 2  # ranks of a worker
RANKS = {"ranks": FAMILIES["rounds of ranks"], "gossip": FAMILIES["gossip of ranks"]}


class Slow(pl.Callback):
    """Slows steps down, so that fetches and signals can complete."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.002)


# ------------------------------------------------------------------- an error on one worker


class Raises(Slow):
    """Raises an error on worker 1."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_batch_start()
        if (trainer.global_rank, trainer.global_step) == (1, 10):
            raise ArithmeticError("no more numbers")


def fit_raising(rank: int, world: int, family: Family) -> None:
    family.fit(rank, TinyModule(), 2000, {"timeout_s": 20}, callbacks=[Raises()])


@pytest.mark.parametrize(
    "name",
    [
        "by clock",
        "gossip",
        pytest.param("remote", marks=pytest.mark.recovery),
        pytest.param("remote, 3 tiers", marks=pytest.mark.soak),
    ],
)
def test_an_error_on_one_worker_ends_all_with_its_text(pool: Pool, name: str) -> None:
    family = FAMILIES[name]
    with pytest.raises(PoolError) as caught:
        pool.run(fit_raising, family, world=family.world)
    assert set(caught.value.failures) == set(range(family.world)), str(caught.value)
    for rank, failure in caught.value.failures.items():
        assert "no more numbers" in failure.message
        assert rank == 1 or "worker 1 failed" in failure.message.lower()


# ------------------------------------------------------------------ a rank of several


TIMEOUT_S = 5.0
HYBRID = Family(rounds, (2, 1))
FAULTS = [
    ("rounds of ranks", "killed", "backward", 2),
    ("rounds of ranks", "raises", "backward", 3),
    ("rounds of ranks", "frozen", "backward", 1),
    ("fsdp", "killed", "forward", 2),
    ("fsdp", "raises", "forward", 3),
    ("tensor", "killed", "forward", 2),
    ("gossip of ranks", "killed", "backward", 3),
    ("gossip of ranks", "killed", "batch end", 2),
    ("gossip of ranks", "raises", "batch end", 1),
]
MORE_FAULTS = [
    ("rounds of ranks", "killed", "backward", 0),
    ("rounds of ranks", "raises", "backward", 0),
    ("rounds of ranks", "killed", "set-up", 3),
    ("rounds of ranks", "raises", "start", 1),
    ("rounds of ranks", "killed", "validation", 1),
    ("rounds of ranks", "raises", "epoch end", 2),
    ("fsdp", "frozen", "forward", 1),
    ("hybrid", "frozen", "forward", 1),
    ("tensor", "raises", "forward", 0),
    ("fsdp", "killed", "forward", 0),
    ("gossip of ranks", "killed", "batch end", 1),
    ("gossip of ranks", "frozen", "backward", 2),
]


class FailAt(FailIn):
    """Fails in a phase of fit, or in a part of a batch."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.002)
        self._fail_at(trainer, "forward")

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        self._fail_at(trainer, "backward")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._fail_at(trainer, "batch end")

    def _fail_at(self, trainer: pl.Trainer, part: str) -> None:
        if trainer.global_step == 4:
            self._fail_in(part)


def fit_with_fault(
    rank: int, world: int, name: str, kind: str, phase: str, victim: int, folder: Path
) -> None:
    def fail() -> None:
        (folder / "failed_at").write_text(str(time.time()))
        KINDS[kind]()

    family = FAMILIES.get(name, HYBRID)
    is_sharded = isinstance(family.sizes, tuple)
    make = HybridModule if name == "hybrid" else ShardedModule if is_sharded else ValidatedModule
    family.fit(
        rank,
        make(),
        20,
        {"timeout_s": TIMEOUT_S},
        num_sanity_val_steps=0,
        callbacks=[FailAt(phase if rank == victim else "", fail)],
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "kind", "phase", "victim"),
    [*FAULTS, *(pytest.param(*fault, marks=pytest.mark.soak) for fault in MORE_FAULTS)],
)
def test_the_others_name_the_rank_that_fails(
    name: str, kind: str, phase: str, victim: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_in_soak = request.node.get_closest_marker("soak") is not None
    longest_s = TIMEOUT_S + 6 if is_in_soak else HARNESS_S
    others = [rank for rank in range(4) if rank != victim]
    arguments = name, kind, phase, victim, tmp_path
    with Job(fit_with_fault, *arguments, world=4, group_timeout_s=TIMEOUT_S) as job:
        outcomes = job.outcomes(others, HARNESS_S)
    text = rf"[Ww]orker {victim // SIZE}, place {victim % SIZE} \(rank {victim}\)"
    text += " failed:(.|\n)*LookupError: trouble" if kind == "raises" else ""
    failed_at = float((tmp_path / "failed_at").read_text())
    for rank, outcome in zip(others, outcomes, strict=True):
        assert outcome.error is not None
        last = outcome.error[outcome.error.rindex("WorkerFailure: ") :]
        assert re.search(text, last), f"rank {rank}: {outcome.error}"
        assert outcome.ended_at - failed_at < longest_s, outcome.error


def hear_an_error(rank: int, world: int) -> list[str]:
    group = WorkerGroup.create(timeout_s=20, replica_size=SIZE)
    replica = ReplicaGroup(group)
    assert group.watchdog is not None
    found = []
    try:
        with pytest.raises(RuntimeError) as caught, replica.errors_named("local step 6"):
            raise RuntimeError("shapes cannot be multiplied")
        found.append(str(caught.value))
        dist.barrier()
        if rank == 1:
            group.watchdog.end()  # sends no heartbeats, like a frozen process
        else:
            with pytest.raises(RuntimeError) as caught, replica.errors_named("local step 6"):
                raise RuntimeError("Application timeout caused pair closure")
            found.append(str(caught.value))
        dist.barrier()
    finally:
        replica.close(DDPStrategy(), has_failed=False)
        group.failed = False
        group.close()
    return found


def test_an_error_is_that_of_a_frozen_sibling_whatever_its_text(pool: Pool) -> None:
    """Some of gloo's error messages do not show that they come from gloo."""
    own, of_sibling = pool.run(hear_an_error, world=SIZE)[0]
    assert own == "shapes cannot be multiplied"
    assert "from worker 0, place 1 (rank 1) (no sign of life)" in of_sibling


# ------------------------------------------------- ranks of one worker that differ


class WaitsElsewhere(TinyModule):
    """Ranks at different places of a worker wait at different barriers."""

    def on_train_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        strategy.barrier(f"of place {strategy.place}")


def fit_lengths(
    rank: int,
    world: int,
    family: Family,
    module: TinyModule,
    lengths: list[int],
    arguments: dict[str, Any],
    epochs: int,
) -> None:
    family.fit(rank, module, lengths[rank], arguments, max_epochs=epochs)


def errors_of(pool: Pool, *run: Any) -> list[str]:
    """Check that all ranks end with an error; return the messages."""
    with pytest.raises(PoolError) as error:
        pool.run(fit_lengths, *run, world=4, grace_s=15)
    assert sorted(error.value.failures) == [0, 1, 2, 3]
    return [failure.message for _, failure in sorted(error.value.failures.items())]


def name_of(rank: int) -> str:
    return f"orker {rank // SIZE}, place {rank % SIZE} (rank {rank})"


def test_ranks_of_one_worker_at_different_sync_points(pool: Pool) -> None:
    texts = errors_of(pool, RANKS["ranks"], WaitsElsewhere(), [4] * 4, {"timeout_s": 20}, 1)
    first = "The ranks of worker 0 wait for each other at different sync points: "
    where = (
        "worker 0, place 0 (rank 0) at barrier of place 0 after 4 local steps; "
        "worker 0, place 1 (rank 1) at barrier of place 1 after 4 local steps."
    )
    assert any(first + where in text for text in texts)
    for text in texts:
        assert re.search(r"orker \d(, place \d \(rank \d\))? (failed|wait)", text), text


def test_a_rank_that_starts_the_next_epoch_alone_is_named(pool: Pool) -> None:
    """It has fewer batches, and the other rank of its worker runs a round meanwhile."""
    texts = errors_of(pool, RANKS["ranks"], TinyModule(), [8, 8, 6, 8], {"timeout_s": 4}, 2)
    for rank, text in enumerate(texts):
        assert all(rank == other or name_of(other) in text for other in (2, 3)), text


@pytest.mark.parametrize(
    ("name", "lengths", "arguments"),
    [
        ("ranks", [8, 8, 5, 8], {}),
        ("ranks", [8, 8, 6, 8], {}),
        ("ranks", [4, 5, 5, 5], {"sync_every": 100}),
        ("gossip", [8, 8, 5, 8], {}),
        ("gossip", [8, 5, 8, 8], {}),
    ],
    ids=str,
)
def test_ranks_of_one_worker_with_different_numbers_of_batches(
    pool: Pool, name: str, lengths: list[int], arguments: dict[str, Any]
) -> None:
    module = ValidatedModule()
    # On a busy machine a rank may give no sign of life for 2 s, which is another error.
    texts = errors_of(pool, RANKS[name], module, lengths, {"timeout_s": 6, **arguments}, 1)
    worker = lengths.index(min(lengths)) // SIZE
    named = all if name == "ranks" else any
    for rank, text in enumerate(texts):
        others = {SIZE * worker, SIZE * worker + 1} - {rank}
        assert named(name_of(other) in text for other in others), text
    assert name != "ranks" or any("the same number of batches" in text for text in texts)


# ----------------------------------------------------------------------------- stops


class StopLater(Slow):
    """Asks one rank to stop, not the first of its worker."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_batch_start()
        if (trainer.global_rank, trainer.global_step) == (3, 5):
            os.kill(os.getpid(), signal.SIGTERM)


def fit_until_stopped(rank: int, world: int, name: str) -> tuple[int, bool]:
    module, family = TinyModule(), FAMILIES[name]

    class WithoutSave(StopLater):
        def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
            strategy = trainer.strategy
            # Instead of a save, which waits for the others as well.
            strategy.checkpoints.save_interrupted = lambda *_: strategy.sync_point("a stop")

    try:
        family.fit(rank, module, 5000, {"timeout_s": 20}, callbacks=[WithoutSave()])
    except SIGTERMException:
        return module.trainer.global_step, True
    return module.trainer.global_step, False


@pytest.mark.recovery
@pytest.mark.parametrize("name", ["rounds of ranks", "by clock of ranks", "gossip of ranks"])
def test_the_ranks_of_a_worker_stop_at_the_same_step(pool: Pool, name: str) -> None:
    ((step, is_stopped),) = {*pool.run(fit_until_stopped, name, world=4)}
    assert is_stopped
    assert step < 5000
