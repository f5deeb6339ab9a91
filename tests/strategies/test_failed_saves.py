"""Saves that fail: all ranks get the error, and the checkpoint before remains intact."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO
from lightning_loco.strategies.checkpoint.writer import Save
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import TinyModule, flat, make_loader
from tests.strategies import save_and_resume
from tests.strategies.families import FAMILIES, all_ranks, fit_with, remote_trainer
from tests.strategies.save_and_resume import (
    DrawingModule,
    Run,
    SaveEvery,
    check_resumed,
    files_in,
    first_steps,
    train_save_resume,
)
from tests.strategies.test_saving import WORLD, check_goes_on, run_of

ROOT_ID, NOBODY_ID = 0, 65534
REMOTE_STEPS = 3
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

# --------------------------------------------------------- files that cannot be replaced


class LargeModule(DrawingModule):
    """Has an unused parameter of some megabytes; its checkpoints have an additional entry."""

    def __init__(self, dropout: float, megabytes: float, extra: int) -> None:
        super().__init__(dropout)
        self.weight = torch.nn.Parameter(torch.ones(int(megabytes * 2**18)))
        self.extra = extra

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = torch.ones(self.extra)


class Then(pl.Callback):
    """Calls a function after each save."""

    def __init__(self, path: Path, call: Callable[[pl.Trainer, Path], None]) -> None:
        self.path = path
        self.call = call

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.call(trainer, self.path)


def put_a_folder_there(trainer: pl.Trainer, path: Path) -> None:
    if trainer.is_global_zero and not path.is_dir():
        path.rename(path.with_name("before.ckpt"))
        path.mkdir()
    trainer.strategy.barrier()


def lock_the_folder(trainer: pl.Trainer, path: Path) -> None:
    if trainer.is_global_zero:
        Path(f"{path}.loco").chmod(0o777)
        path.parent.chmod(0o555)
    trainer.strategy.barrier()
    if os.geteuid() == ROOT_ID:
        os.seteuid(NOBODY_ID)


def limit_files_to_2_mb(trainer: pl.Trainer, path: Path) -> None:
    if trainer.is_global_zero:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20, resource.RLIM_INFINITY))


def fit_and_fail(rank: int, world: int, run: Run) -> str:
    """Return the error message."""
    try:
        save_and_resume.fit(rank, world, run)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        if os.getuid() == ROOT_ID:
            os.seteuid(ROOT_ID)
    return ""


@pytest.mark.parametrize(
    ("then", "megabytes", "extra", "message"),
    [
        (put_a_folder_there, 0.1, 0, "Is a directory"),
        (lock_the_folder, 0.1, 0, "Permission denied"),
        (limit_files_to_2_mb, 0.1, 2**20, "File too large"),  # the main file
        (limit_files_to_2_mb, 3.0, 0, "File too large"),  # side files
    ],
    ids=["a folder", "read-only", "the main file is too large", "side files are too large"],
)
def test_file_that_cannot_be_replaced_is_an_error(
    pool: Pool,
    other_disk: Path,
    then: Callable[[pl.Trainer, Path], None],
    megabytes: float,
    extra: int,
    message: str,
) -> None:
    path = other_disk / "same.ckpt"
    run = run_of(path, 4, SaveEvery(1, str(path)), Then(path, then))
    run = replace(run, module=partial(LargeModule, megabytes=megabytes, extra=extra))
    messages = pool.run(fit_and_fail, run, world=WORLD)
    assert all(message in found for found in messages), messages
    other_disk.chmod(0o777)
    left = other_disk / "before.ckpt"
    if path.is_dir():
        path.rmdir()
        left.rename(path)
    assert sorted(os.listdir(other_disk)) == ["same.ckpt", "same.ckpt.loco"]
    stamp = torch.load(path)["lightning_loco"]["stamp"]
    assert os.listdir(f"{path}.loco") == [stamp]
    again = replace(run, callbacks=[], max_steps=2)
    resumed = pool.run(save_and_resume.fit, again, str(path), world=WORLD)
    assert [[*outcome.losses] for outcome in resumed] == [[1]] * WORLD


def test_a_first_save_that_fails_leaves_nothing(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "same.ckpt"
    path.mkdir()
    messages = pool.run(fit_and_fail, run_of(path, 2), world=WORLD)
    assert all("Is a directory" in found for found in messages)
    assert os.listdir(tmp_path) == ["same.ckpt"]


class IgnoringIO(TorchCheckpointIO):
    """A CheckpointIO that silently keeps an existing file."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if not Path(path).exists():
            super().save_checkpoint(checkpoint, path, storage_options)


def test_a_file_that_was_not_replaced_keeps_its_side_files(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "same.ckpt"
    messages = pool.run(fit_and_fail, run_of(path, 3, checkpoint_io=IgnoringIO()), world=WORLD)
    assert all("could not be replaced" in found for found in messages), messages
    stamp = torch.load(path)["lightning_loco"]["stamp"]
    assert stamp in os.listdir(f"{path}.loco")
    check_goes_on(pool, path, 1, 2)


# --------------------------------------------------------- workers of several ranks


class Position:
    """A value that is neither a tensor nor a plain value."""


class OwnState(StatefulDataLoader[Any]):
    """A loader with a state that other processes cannot read."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": Position()}


def save_own_state(rank: int, world: int, path: str) -> None:
    family, kind = FAMILIES["rounds of ranks"], StatefulDataLoader if rank < 2 else OwnState
    data = kind(family.loader(rank, 8).dataset, batch_size=None)
    fit_with(family.strategy(timeout_s=30), TinyModule(), data, callbacks=[SaveEvery(2, path)])


def test_loaders_whose_state_is_not_plain_are_named(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="Position") as error:
        pool.run(save_own_state, str(tmp_path / "one.ckpt"), world=4)
    assert sorted(error.value.failures) == [0, 1, 2, 3]
    for failure in error.value.failures.values():
        assert re.search(r"Place \d of worker 1, in a checkpoint: ", failure.message)
    assert files_in(tmp_path) == []


class FullDisk(WholeFileIO):
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        raise OSError(28, "No space left on device", str(path))


def fill_the_disk(strategy: Any) -> None:
    strategy.checkpoint_io = FullDisk()


def tear_a_round(strategy: Any) -> None:
    strategy.engine.fragments[0].is_torn = True


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_gather(_: Any) -> None:
    dist.gather = die


def die_before_writing(_: Any) -> None:
    Save.to_shared_folder = die  # type: ignore[assignment, method-assign]


def die_in_a_file(_: Any) -> None:
    WholeFileIO.save_checkpoint = die  # type: ignore[method-assign]


class FailAt(pl.Callback):
    """Makes one rank fail in the save after ten steps."""

    def __init__(self, rank: int, fail: Callable[[Any], None]) -> None:
        self.rank = rank
        self.fail = fail

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, 10):
            self.fail(trainer.strategy)


@pytest.mark.parametrize(
    ("rank", "fail", "text"),
    [
        (2, fill_the_disk, ": .*No space left"),
        (3, tear_a_round, ": A round has failed"),
        (1, die_in_gather, ""),
        pytest.param(3, die_before_writing, "", marks=pytest.mark.soak),
        pytest.param(2, die_in_a_file, "", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_fails_is_named_and_the_last_save_is_complete(
    pool: Pool, tmp_path: Path, rank: int, fail: Callable[[Any], None], text: str
) -> None:
    callbacks, missing = [FailAt(rank, fail), SaveEvery(5)], [] if text else [rank]
    run = Run("diloco", str(tmp_path), callbacks, 12, strategy={"timeout_s": 30}, sizes=2)
    with pytest.raises(PoolError) as error:
        pool.run(save_and_resume.fit, run, world=4, grace_s=30)
    assert error.value.missing == missing
    assert sorted({*error.value.failures, *missing}) == [0, 1, 2, 3]
    name = rf"[Ww]orker {rank // 2}, place {rank % 2} \(rank {rank}\){text}"
    for other, failure in error.value.failures.items():
        assert other == rank or re.search(name, failure.message), failure.message
    assert files_in(tmp_path)[0] == "often.ckpt"
    run = Run("diloco", str(tmp_path / "whole"), max_steps=12, sizes=2)
    path = str(tmp_path / "often.ckpt")
    whole, resumed = zip(*pool.run(train_save_resume, run, [path], world=4), strict=True)
    assert first_steps(resumed) == [5] * 4
    check_resumed(whole, resumed, fail.__name__)


# --------------------------------------------------------- a remote optimizer


class SlowIO(TorchCheckpointIO):
    """Saves slowly, and may raise an error."""

    def __init__(self, error: OSError | None) -> None:
        self.error = error

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        if self.error is not None:
            raise self.error
        super().save_checkpoint(*args, **kwargs)


def save_after_fit(rank: int, world: int, folder: str, error: OSError | None) -> list[bool]:
    """Fit and save, twice; return whether the files exist."""
    settings: Any = {"max_epochs": 1, "use_distributed_sampler": False}
    exist = []
    with all_ranks() as environment:
        for number in range(2):
            strategy = RemoteOptimizerStrategy(
                2, timeout_s=20, checkpoint_io=SlowIO(error if number else None)
            )
            trainer = remote_trainer(environment, strategy, **settings)
            trainer.fit(TinyModule(), make_loader(rank, REMOTE_STEPS))
            path = Path(folder, f"{number}.ckpt")
            trainer.save_checkpoint(path)
            exist.append(path.exists())
    return exist


def test_service_ranks_wait_until_a_checkpoint_is_written(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(save_after_fit, str(tmp_path), None, world=3) == [[True, True]] * 3


def test_service_ranks_raise_the_error_of_a_failed_save(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(save_after_fit, str(tmp_path), OSError("no space left"), world=3)
    messages = [caught.value.failures[rank].message for rank in (0, 2)]
    assert "no space left" in messages[0]
    assert "Worker 0: no space left" in messages[1]


def continue_without_steps(rank: int, world: int, path: str) -> list[int]:
    steps = []
    with all_ranks() as environment:
        for limits in ({"max_epochs": 0}, {"max_epochs": 1, "max_steps": 2}):
            trainer = remote_trainer(
                environment, RemoteOptimizerStrategy(2, timeout_s=20), **limits
            )
            module = TinyModule(optimizer="AdamW")
            resumed = path if steps else None
            trainer.fit(
                module, make_loader(rank, REMOTE_STEPS), ckpt_path=resumed, weights_only=False
            )
            if not steps:
                trainer.save_checkpoint(path)
            steps.append(trainer.global_step)
    return steps


def test_a_run_without_steps_can_be_continued(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(continue_without_steps, str(tmp_path / "none.ckpt"), world=3)
    assert found[:2] == [[0, 2]] * 2


class Fails(TinyModule):
    """Raises an error after two steps on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(optimizer="AdamW")
        self.failing = rank

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank == self.failing:
            raise ValueError("bad sample")
        return super().training_step(batch, batch_idx)


def save_on_exception(
    rank: int, world: int, folder: str, failing: int
) -> tuple[str, Tensor, list[str]]:
    """Return the error, the last parameters, and the warnings of a fit that fails; fit again."""
    settings: Any = {"max_epochs": 1, "use_distributed_sampler": False}
    with all_ranks() as environment, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        callback = OnExceptionCheckpoint(folder, filename="failed")
        strategy = RemoteOptimizerStrategy(2, timeout_s=3600)
        trainer = remote_trainer(
            environment, strategy, callbacks=[callback], enable_checkpointing=True, **settings
        )
        module = Fails(failing)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            trainer.fit(module, make_loader(rank, REMOTE_STEPS))
        again = remote_trainer(environment, RemoteOptimizerStrategy(2, timeout_s=20), **settings)
        again.fit(TinyModule(), make_loader(rank, REMOTE_STEPS))
    texts = [str(one.message) for one in seen if "was not written" in str(one.message)]
    return str(caught.value), flat(module), texts


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_after_an_exception(pool: Pool, tmp_path: Path, failing: int) -> None:
    """The optimizer's rank answers the save only if worker 0 itself has raised the error."""
    found = pool.run(save_on_exception, str(tmp_path), failing, world=3)
    for error, _, _ in found:
        assert "bad sample" in error
    path, (_, weights, warned) = tmp_path / "failed.ckpt", found[0]
    if failing == 1:
        assert not path.exists()
        assert len(warned) == 1
        assert "bad sample" in warned[0]
        return
    assert not warned
    saved = torch.load(path, weights_only=True)
    assert torch.equal(torch.cat([v.reshape(-1) for v in saved["state_dict"].values()]), weights)
    state = saved["optimizer_states"][0]["state"]
    assert {int(one["step"]) for one in state.values()} == {2}
