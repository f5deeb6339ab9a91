"""Checkpoints where each worker has a disk of its own: no file is seen by two workers."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_loco import DiLoCo, GASLoC, LocalSGD
from lightning_loco.strategies import side_files
from lightning_loco.strategies.whole_files import WholeFileIO
from tests.cases import CASES, Case
from tests.conftest import cover
from tests.pool import Pool, PoolError, make_trainer
from tests.small_model import flat
from tests.strategies.test_resume import DrawingModule, Outcome, check_resumed, loader

WORLD = 3
SYNC_EVERY = 4
STEPS = 14
pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class SaveEvery(pl.Callback):
    """Saves every so many steps, to a path that is another file for each worker."""

    def __init__(self, every: int, weights_only: bool = False, name: str = "one.ckpt") -> None:
        self.every = every
        self.weights_only = weights_only
        self.name = name

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            name = self.name.format(trainer.global_step // self.every)
            trainer.save_checkpoint(f"folder/{name}", weights_only=self.weights_only)


def fit(
    rank: int,
    world: int,
    case: Case,
    disks: Sequence[str],
    resume: str | None = None,
    callbacks: Sequence[pl.Callback] = (SaveEvery(5),),
    max_steps: int = STEPS,
    io: CheckpointIO | None = None,
    **settings: Any,
) -> tuple[Outcome, list[str], list[str]]:
    """What this worker's steps gave, what it was warned of, and what is on its disk then."""
    os.makedirs(disks[rank], exist_ok=True)
    os.chdir(disks[rank])
    strategy = case.strategy(
        SYNC_EVERY, checkpoint_folder="private", checkpoint_io=io, timeout_s=30
    )
    trainer = make_trainer(
        strategy, max_steps=max_steps, callbacks=list(callbacks), default_root_dir=".", **settings
    )
    module = DrawingModule(0.3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(module, loader(world), ckpt_path=resume)
    told = [str(warning.message) for warning in found if "go on from it" in str(warning.message)]
    state = torch.cat([flat(module), *(b.flatten() for b in module.buffers())])
    return (module.losses, module.validated, state), told, files_in(Path("."))


def fit_last(rank: int, world: int, *args: Any) -> tuple[Outcome, list[str], list[str]]:
    return fit(rank, world, *args, enable_checkpointing=True)


def files_in(folder: Path) -> list[str]:
    """All files below a folder, with ``S`` for the stamp of a save."""
    found = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
    return sorted(
        "/".join("S" if part.startswith("step") and "-" in part else part for part in file.parts)
        for file in found
    )


def disks_in(folder: Path, world: int = WORLD) -> list[str]:
    return [str(folder / f"disk{worker}") for worker in range(world)]


def outcomes(results: Sequence[tuple[Outcome, list[str], list[str]]]) -> list[Outcome]:
    return [outcome for outcome, _, _ in results]


def steps_in(path: Path) -> int:
    return int(torch.load(path, weights_only=False)["global_step"])


@pytest.mark.parametrize(
    "name",
    [
        "diloco",
        "gasloc",
        pytest.param("local_sgd", marks=pytest.mark.soak),
        pytest.param("async_diloco_momentum", marks=pytest.mark.soak),
    ],
)
def test_resumed_run_equals_unbroken_run(pool: Pool, tmp_path: Path, name: str) -> None:
    disks = disks_in(tmp_path)
    whole = pool.run(fit, CASES[name], disks, world=WORLD)
    shared = ["folder/one.ckpt.loco/S/shared.pt"] if CASES[name].algorithm.replicated else []
    for worker, (_, _, files) in enumerate(whole):
        own = f"folder/one.ckpt.loco/S/worker_{worker:05d}.pt"
        assert files == ["folder/one.ckpt", *shared, own]
    again = pool.run(fit, CASES[name], disks, "folder/one.ckpt", [], world=WORLD)
    assert [min(losses) for (losses, _, _), _, _ in again] == [10] * WORLD
    check_resumed(outcomes(whole), outcomes(again), name)


def test_averaging_by_the_clock_goes_on_from_each_disk(pool: Pool, tmp_path: Path) -> None:
    case, disks = CASES["async_model_average"], disks_in(tmp_path)
    pool.run(fit, case, disks, world=WORLD)
    again = pool.run(fit, case, disks, "folder/one.ckpt", [], world=WORLD)
    assert [sorted(losses) for (losses, _, _), _, _ in again] == [[10, 11, 12, 13]] * WORLD


@pytest.mark.parametrize("places", [(0, 0, 1), (0, 0, 0)])
def test_workers_may_share_disks(pool: Pool, tmp_path: Path, places: tuple[int, ...]) -> None:
    disks = [str(tmp_path / f"disk{place}") for place in places]
    whole = pool.run(fit, CASES["diloco"], disks, world=WORLD)
    for place in set(places):
        workers = [worker for worker, at in enumerate(places) if at == place]
        side = [f"folder/one.ckpt.loco/S/worker_{worker:05d}.pt" for worker in workers]
        expected = ["folder/one.ckpt", "folder/one.ckpt.loco/S/shared.pt", *side]
        assert files_in(tmp_path / f"disk{place}") == expected
    again = pool.run(fit, CASES["diloco"], disks, "folder/one.ckpt", [], world=WORLD)
    check_resumed(outcomes(whole), outcomes(again), str(places))


# ----------------------------------------------------------------------- kills


class KillingIO(WholeFileIO):
    """Ends the process of one worker when it is to write a file of this name for the n-th time."""

    def __init__(self, worker: int, name: str, count: int) -> None:
        super().__init__()
        self.worker = worker
        self.name = name
        self.count = count

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if Path(path).name == self.name.format(self.worker):
            die_in_turn(self, self.worker)
        super().save_checkpoint(checkpoint, path, storage_options)


def die_in_turn(counter: Any, worker: int) -> None:
    """Count down, and end this process at zero if it is this worker's."""
    counter.count -= 1
    if counter.count == 0 and torch.distributed.get_rank() == worker:
        os.kill(os.getpid(), signal.SIGKILL)


class DieBefore(pl.Callback):
    """Ends the process of one worker before it calls a function of side files, the n-th time."""

    def __init__(self, worker: int, place: str, count: int) -> None:
        self.worker = worker
        self.place = place
        self.count = count

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank == self.worker:
            owner = side_files.SideFiles
            original: Callable[..., Any] = getattr(owner, self.place)

            def surrounded(*args: Any) -> Any:
                die_in_turn(self, self.worker)
                return original(*args)

            setattr(owner, self.place, surrounded)


KILLS = {
    "before its side file": (KillingIO(1, "worker_{:05d}.pt", 2), None, 5),
    "before its main file": (KillingIO(2, "main.ckpt", 2), None, 5),
    "before its main file takes its place": (None, DieBefore(1, "put_main", 2), 10),
    "before it deletes the save before": (None, DieBefore(0, "settle", 2), 10),
}
KILLS_IF_SHARED = {"before what is shared": (KillingIO(1, "shared.pt", 2), None, 5)}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "place"),
    [
        *cover(["diloco", "gasloc", "local_sgd"], KILLS, strength=1),
        *cover(["diloco"], KILLS_IF_SHARED),  # of the others nothing is shared
    ],
)
def test_run_killed_while_saving_goes_on_from_the_newest_save_of_all(
    pool: Pool, tmp_path: Path, name: str, place: str
) -> None:
    io, die, step = {**KILLS, **KILLS_IF_SHARED}[place]
    disks, whole_disks = disks_in(tmp_path / "killed"), disks_in(tmp_path / "whole")
    whole = pool.run(fit, CASES[name], whole_disks, world=WORLD)
    callbacks = [SaveEvery(5), *([] if die is None else [die])]
    with pytest.raises(PoolError) as error:
        pool.run(fit, CASES[name], disks, None, callbacks, STEPS, io, world=WORLD)
    assert len(error.value.missing) >= 1
    again = pool.run(fit, CASES[name], disks, "folder/one.ckpt", [SaveEvery(1)], world=WORLD)
    assert [min(losses) for (losses, _, _), _, _ in again] == [step] * WORLD
    check_resumed(outcomes(whole), outcomes(again), f"{name}, killed {place}")
    for worker, (_, _, files) in enumerate(again):  # what the kill has left is gone
        assert [file for file in files if "worker" in file] == [
            f"folder/one.ckpt.loco/S/worker_{worker:05d}.pt"
        ]
        assert [file for file in files if file.endswith((".ckpt", ".part"))] == ["folder/one.ckpt"]
        assert steps_in(Path(disks[worker], "folder/one.ckpt")) == STEPS


# ------------------------------------------------------------- what is on which disk


def test_no_common_save_is_an_error_that_lists_what_there_is(pool: Pool, tmp_path: Path) -> None:
    disks = disks_in(tmp_path)
    pool.run(fit, CASES["diloco"], disks, world=WORLD)
    shutil.rmtree(disks[2])
    with pytest.raises(PoolError, match="no checkpoint") as error:
        pool.run(fit, CASES["diloco"], disks, "folder/one.ckpt", [], world=WORLD)
    assert sorted(error.value.failures) == [0, 1, 2]
    for failure in error.value.failures.values():
        assert failure.type_name == "ValueError"
        assert "worker 0 has step10-" in failure.message
        assert "with the side files of worker 1; worker 2 has none" in failure.message
        assert "copy the main file and its folder one.ckpt.loco" in failure.message


def test_workers_that_have_changed_places_are_told_so(pool: Pool, tmp_path: Path) -> None:
    disks = disks_in(tmp_path)
    pool.run(fit, CASES["diloco"], disks, world=WORLD)
    changed = [disks[1], disks[0], disks[2]]
    with pytest.raises(PoolError, match="worker 0 has step10-.* side files of worker 1;"):
        pool.run(fit, CASES["diloco"], changed, "folder/one.ckpt", [], world=WORLD)


def test_disks_of_different_ages_go_on_from_the_save_that_all_have(
    pool: Pool, tmp_path: Path
) -> None:
    """One disk was put back to an older copy, and another one still has both saves."""
    disks, old = disks_in(tmp_path), disks_in(tmp_path / "old")
    whole = pool.run(fit, CASES["gasloc"], disks, world=WORLD)
    pool.run(fit, CASES["gasloc"], old, None, [SaveEvery(5)], 5, world=WORLD)
    with pytest.raises(PoolError, match="no checkpoint"):
        pool.run(fit, CASES["gasloc"], [old[0], *disks[1:]], "folder/one.ckpt", [], world=WORLD)
    again = pool.run(fit, CASES["gasloc"], old, "folder/one.ckpt", [], world=WORLD)
    check_resumed(outcomes(whole), outcomes(again), "the older disks")


def copied(disk: str, to: str, *patterns: str) -> None:
    """Copy a disk, without files of some names."""
    shutil.copytree(disk, to, ignore=shutil.ignore_patterns(*patterns))


def test_a_lost_disk_is_replaced_by_a_copy(pool: Pool, tmp_path: Path) -> None:
    disks = disks_in(tmp_path)
    pool.run(fit, CASES["diloco"], disks, world=WORLD)
    shutil.rmtree(disks[2])
    copied(disks[0], disks[2])
    again = pool.run(fit, CASES["diloco"], disks, "folder/one.ckpt", world=WORLD)
    assert [min(losses) for (losses, _, _), _, _ in again] == [10] * WORLD
    assert [len(told) for _, told, _ in again] == [1, 0, 0]
    assert "what worker 2 had, which is on no disk, is left out" in again[0][1][0]
    assert torch.equal(again[0][0][2], again[2][0][2])


@pytest.mark.parametrize("name", ["diloco", "gasloc"])
def test_other_numbers_of_workers_go_on(pool: Pool, tmp_path: Path, name: str) -> None:
    disks = disks_in(tmp_path, 4)
    pool.run(fit, CASES[name], disks, world=WORLD)
    fewer = pool.run(fit, CASES[name], disks, "folder/one.ckpt", [], world=2)
    assert "what worker 2 had, which is on no disk, is left out" in fewer[0][1][0]
    copied(disks[0], disks[3])
    more = pool.run(fit, CASES[name], disks, "folder/one.ckpt", [], world=4)
    assert "left out" not in more[0][1][0]
    assert [min(losses) for (losses, _, _), _, _ in more] == [10] * 4
    for outcome, _, _ in more[1:]:
        assert torch.equal(outcome[2], more[0][0][2])


# ---------------------------------------------------- Lightning's own ways to name files


def test_last_is_followed_to_the_file_that_it_leads_to(pool: Pool, tmp_path: Path) -> None:
    disks = disks_in(tmp_path, 2)
    checkpoint = ModelCheckpoint(
        dirpath=tmp_path / "same", every_n_train_steps=5, filename="{step}", save_last="link"
    )
    run = CASES["diloco"], disks
    whole = pool.run(fit_last, *run, None, [checkpoint], world=2)
    assert sorted(os.listdir(tmp_path / "same")) == [
        "last.ckpt",
        "step=10.ckpt",
        "step=10.ckpt.loco",
    ]
    again = pool.run(fit_last, *run, "last", [checkpoint], world=2)
    assert [min(losses) for (losses, _, _), _, _ in again] == [10, 10]
    check_resumed(outcomes(whole), outcomes(again), "last")


def fit_unequal(
    rank: int, world: int, case: Case, disks: list[str], paths: list[str | None]
) -> Any:
    return fit(rank, world, case, disks, paths[rank], [])


def test_a_worker_that_has_found_no_file_goes_on_from_the_others_path(
    pool: Pool, tmp_path: Path
) -> None:
    disks = [str(tmp_path)] * 2
    whole = pool.run(fit, CASES["diloco"], disks, world=2)
    again = pool.run(fit_unequal, CASES["diloco"], disks, [None, "folder/one.ckpt"], world=2)
    check_resumed(outcomes(whole), outcomes(again), "a path on worker 1 only")
    begun = pool.run(fit_unequal, CASES["diloco"], disks, [None, None], world=2)
    assert [min(losses) for (losses, _, _), _, _ in begun] == [0, 0]


@pytest.mark.soak
def test_a_name_with_a_number_need_not_be_the_same_on_all(pool: Pool, tmp_path: Path) -> None:
    """SLURM: killed while the second file took its place, one worker finds only the first one."""
    disks, whole_disks = disks_in(tmp_path / "killed", 2), disks_in(tmp_path / "whole", 2)
    whole = pool.run(fit, CASES["diloco"], whole_disks, world=2)
    callbacks = [SaveEvery(5, name="hpc_ckpt_{}.ckpt"), DieBefore(1, "put_main", 2)]
    with pytest.raises(PoolError):
        pool.run(fit, CASES["diloco"], disks, None, callbacks, world=2)
    paths = ["folder/hpc_ckpt_2.ckpt", "folder/hpc_ckpt_1.ckpt"]
    assert not Path(disks[1], paths[0]).exists()
    again = pool.run(fit_unequal, CASES["diloco"], disks, paths, world=2)
    assert [min(losses) for (losses, _, _), _, _ in again] == [10, 10]
    check_resumed(outcomes(whole), outcomes(again), "hpc")


def test_weights_alone_are_on_every_disk(pool: Pool, tmp_path: Path) -> None:
    disks = disks_in(tmp_path)
    found = pool.run(fit, CASES["diloco"], disks, None, [SaveEvery(5, True)], world=WORLD)
    assert [files for _, _, files in found] == [["folder/one.ckpt"]] * WORLD
    states = [torch.load(f"{disk}/folder/one.ckpt")["state_dict"] for disk in disks]
    for name, value in states[0].items():
        assert all(torch.equal(state[name], value) for state in states)


def test_a_file_without_side_files_is_a_common_start(pool: Pool, tmp_path: Path) -> None:
    disks = disks_in(tmp_path)
    pool.run(fit, CASES["diloco"], disks, world=WORLD)
    for disk in disks:
        content = torch.load(f"{disks[0]}/folder/one.ckpt")
        content.pop("lightning_loco", None)
        shutil.rmtree(f"{disk}/folder/one.ckpt.loco")
        torch.save(content, f"{disk}/folder/one.ckpt")
    again = pool.run(fit, CASES["diloco"], disks, "folder/one.ckpt", [], world=WORLD)
    assert [max(losses) for (losses, _, _), _, _ in again] == [STEPS - 1] * WORLD


# ---------------------------------------------------------------------- refusals


def test_files_that_are_written_later_are_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="needs a CheckpointIO that has written a file") as error:
        pool.run(
            fit, CASES["diloco"], disks_in(tmp_path), None, [], STEPS, AsyncCheckpointIO(), world=2
        )
    assert sorted(error.value.failures) == [0, 1]


class SaveElsewhere(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint("memory://folder/one.ckpt")


def test_addresses_elsewhere_are_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="memory://folder/one.ckpt is somewhere else") as error:
        pool.run(fit, CASES["diloco"], disks_in(tmp_path), None, [SaveElsewhere()], world=2)
    assert sorted(error.value.failures) == [0, 1]


@pytest.mark.parametrize("algorithm", [DiLoCo(), GASLoC(), LocalSGD()], ids=type)
def test_another_word_is_refused(algorithm: Any) -> None:
    with pytest.raises(ValueError, match="checkpoint_folder must be one of shared, private"):
        Case(algorithm).strategy(4, checkpoint_folder="own")
