"""What is particular to workers with separate disks: kills between their saves, and lost disks.

Exact resumes are in test_checkpoint.py.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_loco import DiLoCo, LocoStrategy
from lightning_loco._util.fault_points import on_reach
from tests.cases import CASES
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolEnvironment, PoolError, make_trainer
from tests.harness.small_model import TinyModule, make_loader
from tests.strategies.save_and_resume import (
    Outcome,
    Run,
    SaveEvery,
    check_resumed,
    files_in,
    first_steps,
    fit,
    train_save_resume,
)

WORLD = 3
STEPS = 14
PATH = "folder/one.ckpt"  # a different file for each worker
SAVE = SaveEvery(10, PATH)
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def run_on(
    disks: Sequence[str],
    name: str,
    *callbacks: pl.Callback,
    max_steps: int = STEPS,
    io: CheckpointIO | None = None,
    size: int = 1,
) -> Run:
    """Return a run in which each rank has one of several disks."""
    settings = {"checkpoint_folder": "private", "checkpoint_io": io, "timeout_s": 30}
    return Run(name, disks, callbacks, max_steps, strategy=settings, sizes=size)


def disks_in(folder: Path, world: int = WORLD) -> list[str]:
    return [str(folder / f"disk{worker}") for worker in range(world)]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return three disks for each method; each has its worker's save after ten steps."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        pool.run(fit, run_on(disks_in(folder), name, SAVE), world=WORLD)
        return folder

    return folder_of


@pytest.fixture
def disks(saved: Callable[[str], Path], tmp_path: Path) -> list[str]:
    """Return three disks with a save of DiLoCo."""
    shutil.copytree(saved("diloco"), tmp_path, dirs_exist_ok=True)
    return disks_in(tmp_path)


def steps_in(path: Path) -> int:
    return int(torch.load(path, weights_only=False)["global_step"])


# ----------------------------------------------------------------------- kills


class DieAt(pl.Callback):
    """Kills a worker when it reaches a fault point for the n-th time."""

    def __init__(self, worker: int, point: str, count: int) -> None:
        self.worker = worker
        self.point = point
        self.count = count

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank == self.worker:
            self.watch = on_reach(self.on_point)
            self.watch.__enter__()  # until it is killed

    def on_point(self, point: str) -> None:
        self.count -= point == self.point
        if self.count == 0:
            os.kill(os.getpid(), signal.SIGKILL)


WRITING = "writing a checkpoint"
BEFORE_MAIN = "before the main file is in its place"
BEFORE_OLD_GOES = "before the last checkpoint is deleted"
KILLS = {
    "before its side file": (DieAt(1, WRITING, 1), 5),
    "before its main file": (DieAt(2, WRITING, 0), 5),
    "before its main file is replaced": (DieAt(1, BEFORE_MAIN, 2), 10),
    "before it deletes the save before": (DieAt(0, BEFORE_OLD_GOES, 2), 10),
}
KILLS_IF_SHARED = {"before what is shared": (DieAt(1, WRITING, 2), 5)}
"""Who dies in the second save, at which of its files (0: the last), and the resumed step."""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "moment"),
    [
        *cover(["diloco", "gasloc", "local_sgd"], KILLS, strength=1),
        *cover(["diloco"], KILLS_IF_SHARED),  # the other methods share no state
    ],
)
def test_run_killed_while_saving_resumes_from_the_newest_common_save(
    pool: Pool, tmp_path: Path, name: str, moment: str
) -> None:
    die, step = {**KILLS, **KILLS_IF_SHARED}[moment]
    if die.point == WRITING:
        per_save = 2 + CASES[name].algorithm.replicated  # files
        count = per_save + die.count if die.count > 0 else 2 * per_save
        die = DieAt(die.worker, WRITING, count)
    disks, whole_disks = disks_in(tmp_path / "killed"), disks_in(tmp_path / "whole")
    with pytest.raises(PoolError) as error:
        pool.run(fit, run_on(disks, name, SaveEvery(5, PATH), die), world=WORLD)
    assert len(error.value.missing) >= 1
    again = run_on(disks, name, SaveEvery(1, PATH))
    results = pool.run(train_save_resume, run_on(whole_disks, name), [PATH], again, world=WORLD)
    whole, resumed = zip(*results, strict=True)
    assert first_steps(resumed) == [step] * WORLD
    check_resumed(whole, resumed, f"{name}, killed {moment}")
    for worker, disk in enumerate(disks):  # files of the interrupted save are deleted
        files = files_in(Path(disk))
        own = f"{PATH}.loco/S/worker_{worker:05d}.pt"
        assert [file for file in files if "worker" in file] == [own]
        assert [file for file in files if file.endswith((".ckpt", ".part"))] == [PATH]
        assert steps_in(Path(disk, PATH)) == STEPS


# ------------------------------------------------------------- different saves on the disks


def check_no_common_save(pool: Pool, disks: Sequence[str], *texts: str, size: int = 1) -> None:
    """Check that the error of all workers lists the saves on each disk."""
    with pytest.raises(PoolError, match="no checkpoint") as error:
        pool.run(fit, run_on(disks, "diloco", size=size), PATH, world=len(disks))
    assert sorted(error.value.failures) == [*range(len(disks))]
    for failure in error.value.failures.values():
        assert failure.type_name == "ValueError"
        for word in texts:
            assert word in failure.message


def test_without_a_common_save_the_error_lists_all_saves(pool: Pool, disks: list[str]) -> None:
    shutil.rmtree(disks[2])
    check_no_common_save(
        pool,
        disks,
        "worker 0 has step10-",
        "with the side files of worker 1; worker 2 has none",
        "copy the main file and its folder one.ckpt.loco",
    )


def test_a_damaged_file_is_named(pool: Pool, disks: list[str]) -> None:
    path = Path(disks[1], PATH)
    path.write_bytes(path.read_bytes()[:-1])
    check_no_common_save(pool, disks, f"Worker 1's {path} is damaged: it was cut short")


def test_workers_on_swapped_disks_are_refused(pool: Pool, disks: list[str]) -> None:
    changed = [disks[1], disks[0], disks[2]]
    check_no_common_save(pool, changed, "worker 0 has step10-", "side files of worker 1;")


def test_disks_of_different_ages_resume_from_the_common_save(pool: Pool, tmp_path: Path) -> None:
    """One disk was restored from an older copy; another one still has both saves."""
    disks, old = disks_in(tmp_path, 2), disks_in(tmp_path / "old", 2)
    save = SaveEvery(5, PATH)
    run, older = run_on(disks, "diloco", save), run_on(old, "diloco", save, max_steps=5)
    results = pool.run(train_save_resume, run, [None], older, world=2)
    check_no_common_save(pool, [old[0], disks[1]])
    again = pool.run(fit, run_on(old, "diloco"), PATH, world=2)
    check_resumed([whole for whole, _ in results], again, "the older disks")


def test_a_lost_disk_is_replaced_by_a_copy(pool: Pool, disks: list[str]) -> None:
    shutil.rmtree(disks[2])
    shutil.copytree(disks[0], disks[2])
    again = pool.run(fit, run_on(disks, "diloco", SAVE), PATH, world=WORLD)
    assert first_steps(again) == [10] * WORLD
    assert [len(outcome.warned) for outcome in again] == [1, 0, 0]
    assert "the state of worker 2, which is on no disk, is dropped" in again[0].warned[0]
    assert torch.equal(again[0].state, again[2].state)


@pytest.mark.parametrize("name", ["diloco", "gasloc"])
def test_other_numbers_of_workers_resume(
    pool: Pool, saved: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    disks = disks_in(tmp_path, 4)
    shutil.copytree(saved(name), tmp_path, dirs_exist_ok=True)
    shutil.copytree(disks[0], disks[3])
    fewer = pool.run(fit, run_on(disks, name), PATH, world=2)
    assert "the state of worker 2, which is on no disk, is dropped" in fewer[0].warned[0]
    more = pool.run(fit, run_on(disks, name), PATH, world=4)
    assert "which is on no disk" not in more[0].warned[0]
    assert first_steps(more) == [10] * 4
    for outcome in more[1:]:
        assert torch.equal(outcome.state, more[0].state)


# ---------------------------------------------------- Lightning's own ways to name files


def fit_unequal(
    rank: int, world: int, run: Run, paths: Sequence[Sequence[str | None]], again: Run
) -> list[Outcome]:
    """Make the whole run, then another one for each list of the workers' paths."""
    return train_save_resume(rank, world, run, [of_worker[rank] for of_worker in paths], again)


def test_a_worker_without_a_file_resumes_from_the_path_of_others(
    pool: Pool, tmp_path: Path
) -> None:
    again = run_on([str(tmp_path)] * 2, "diloco")
    run, paths = replace(again, callbacks=[SAVE]), [[None, PATH], [None, None]]
    results = pool.run(fit_unequal, run, paths, again, world=2)
    whole, resumed, restarted = zip(*results, strict=True)
    assert first_steps(resumed) == [10, 10]
    check_resumed(whole, resumed, "a path on worker 1 only")
    assert first_steps(restarted) == [0, 0]


@pytest.mark.soak
def test_a_numbered_name_may_differ_between_workers(pool: Pool, tmp_path: Path) -> None:
    """After a kill during SLURM's second requeue, one worker finds only the first file."""
    disks, whole_disks = disks_in(tmp_path / "killed", 2), disks_in(tmp_path / "whole", 2)
    callbacks = [SaveEvery(5, "folder/hpc_ckpt_{}.ckpt"), DieAt(1, BEFORE_MAIN, 2)]
    with pytest.raises(PoolError):
        pool.run(fit, run_on(disks, "diloco", *callbacks), world=2)
    paths = ["folder/hpc_ckpt_2.ckpt", "folder/hpc_ckpt_1.ckpt"]
    assert not Path(disks[1], paths[0]).exists()
    run, again = run_on(whole_disks, "diloco"), run_on(disks, "diloco")
    whole, resumed = zip(*pool.run(fit_unequal, run, [paths], again, world=2), strict=True)
    assert first_steps(resumed) == [10, 10]
    check_resumed(whole, resumed, "hpc")


def test_a_file_without_side_files_is_a_common_start(pool: Pool, disks: list[str]) -> None:
    content = torch.load(f"{disks[0]}/{PATH}")
    del content["lightning_loco"]
    for disk in disks:
        shutil.rmtree(f"{disk}/{PATH}.loco")
        torch.save(content, f"{disk}/{PATH}")
    again = pool.run(fit, run_on(disks, "diloco"), PATH, world=WORLD)
    assert [max(outcome.losses) for outcome in again] == [STEPS - 1] * WORLD
    assert first_steps(again) == [10] * WORLD


# ---------------------------------------------------------------------- refusals


class SaveElsewhere(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint("memory://folder/one.ckpt")


@pytest.mark.parametrize(
    ("callbacks", "io", "texts"),
    [
        ([], AsyncCheckpointIO(), "needs a CheckpointIO that has written a file"),
        ([SaveElsewhere()], None, "memory://folder/one.ckpt is not on a disk"),
    ],
    ids=["files that are written later", "addresses elsewhere"],
)
def test_files_that_are_written_late_or_elsewhere_are_refused(
    pool: Pool, tmp_path: Path, callbacks: list[pl.Callback], io: Any, texts: str
) -> None:
    with pytest.raises(PoolError, match=texts) as error:
        pool.run(fit, run_on(disks_in(tmp_path), "diloco", *callbacks, io=io), world=2)
    assert sorted(error.value.failures) == [0, 1]


def test_ranks_of_a_worker_must_see_the_same_disk(pool: Pool, tmp_path: Path) -> None:
    disks = disks_in(tmp_path, 4)
    pool.run(fit, run_on(disks, "diloco", SAVE, max_steps=10, size=2), world=4)
    check_no_common_save(pool, disks, "The ranks of a worker must see the same disk.", size=2)


def fit_on_nodes(rank: int, world: int, num_nodes: int) -> None:
    trainer = make_trainer(
        LocoStrategy(DiLoCo(), replica_size=world, checkpoint_folder="private", timeout_s=30),
        devices=world // num_nodes,
        num_nodes=num_nodes,
        plugins=[PoolEnvironment(num_nodes)],
        max_steps=1,
    )
    trainer.fit(TinyModule(), make_loader(rank, 1))


def test_a_worker_on_several_nodes_needs_a_shared_folder(pool: Pool) -> None:
    with pytest.raises(PoolError, match="workers whose ranks are all on one node") as error:
        pool.run(fit_on_nodes, 2, world=4)
    assert sorted(error.value.failures) == [0, 1, 2, 3]
