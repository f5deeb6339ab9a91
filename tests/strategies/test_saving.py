"""If processes are killed during a save, the previous checkpoint remains intact; other writers."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_loco import LocalSGD, LocoStrategy
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO
from tests.harness.pool import Pool, PoolError
from tests.strategies.kill_before_write import Death
from tests.strategies.save_and_resume import Outcome, Run, SaveEvery, check_resumed, fit

WORLD = 2
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def run_of(path: Path, steps: int, *callbacks: pl.Callback, **settings: Any) -> Run:
    """Return a run that overwrites one checkpoint after each step, unless a callback saves."""
    return Run(
        "diloco",
        str(path.parent),
        callbacks or [SaveEvery(1, str(path))],
        steps,
        strategy={"timeout_s": 30, **settings},
    )


def check_goes_on(pool: Pool, path: Path, step: int, steps: int, **settings: Any) -> None:
    """Check that two workers resume at a step, and overwrite the checkpoint."""
    found = pool.run(fit, run_of(path, steps, **settings), str(path), world=WORLD)
    assert [sorted(outcome.losses) for outcome in found] == [[*range(step, steps)]] * WORLD


# --------------------------------------------------------------------------------- kills


class Dies(pl.Callback):
    """Saves after each step; the second time it may be killed."""

    death: Death

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        with self.death.armed() if trainer.global_step == 2 else nullcontext():
            super().on_train_batch_end(trainer, *args)


class SaveAndDie(Dies, SaveEvery):
    """Overwrites one checkpoint."""


class KeepNewestAndDie(Dies, ModelCheckpoint):
    """Saves to a new path, then removes the previous checkpoint."""


class TemporaryFiles(pl.Callback):
    """Lets temporary files be in a given folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def setup(self, *_: Any, **__: Any) -> None:
        tempfile.tempdir = self.folder

    def teardown(self, *_: Any, **__: Any) -> None:
        tempfile.tempdir = None


WRITTEN, SHARED = ["write", "sync"], ["write", "sync", "replace shared.pt", "write", "sync"]
FILES = ["shared.pt", "worker_00000.pt", "worker_00001.pt"]
REMOVED_FILES = [f"remove {name}" for name in FILES]
REMOVED = ["remove main.ckpt", "replace removed_S", "remove removed_S", "remove deleted"]
REMOVED += REMOVED_FILES
OWN = [[*WRITTEN, f"replace worker_{worker:05d}.pt"] for worker in range(WORLD)]
CHANGES = {  # changes of a save, and, in any order, of removing the previous one
    ("shared", 0): ([*OWN[0], *SHARED, "replace main.ckpt", "replace same.ckpt"], REMOVED),
    ("shared", 1): (OWN[1], []),
    ("private", 0): ([*OWN[0], *SHARED, "replace main.ckpt", "replace same.ckpt"], REMOVED),
    ("private", 1): (OWN[1], []),
    ("newest", 0): (
        [*OWN[0], *SHARED, "replace main.ckpt", "replace step=2.ckpt", "remove step=1.ckpt"],
        ["remove S", *REMOVED_FILES, "remove step=1.ckpt.loco"],
    ),
}


@pytest.mark.parametrize(
    ("way", "worker", "kills_all", "chosen"),
    [
        ("shared", 0, True, ("write", "replace same.ckpt", "remove worker_00001.pt")),
        ("shared", 1, True, ("replace worker_00001.pt",)),
        *(
            pytest.param(*kill, marks=pytest.mark.soak)
            for kill in [
                ("shared", 0, True, None),
                ("shared", 0, False, ("replace same.ckpt", "remove worker_00001.pt")),
                ("shared", 1, False, None),
                ("private", 0, True, ("replace", "remove")),
                ("private", 1, True, None),
                ("newest", 0, True, ("replace step=2.ckpt", "remove")),
            ]
        ),
    ],
)
def test_kill_before_any_change_of_a_file_leaves_a_checkpoint(
    pool: Pool,
    tmp_path: Path,
    other_disk: Path,
    way: str,
    worker: int,
    kills_all: bool,
    chosen: tuple[str, ...] | None,
) -> None:
    """At half of a file, before a sync or a rename, and while old files are deleted."""
    temporary, log = tmp_path / "temporary", tmp_path / "changes"
    temporary.mkdir()
    settings = {"checkpoint_folder": "private"} if way == "private" else {}
    newest = {"every_n_train_steps": 1, "save_top_k": 1}

    def train(number: int, folder: Path, resume: Path | None = None) -> tuple[Path, list[Outcome]]:
        """Return the checkpoint after three steps, unless the workers are killed."""
        folder.mkdir(exist_ok=True)
        path, is_newest = folder / "same.ckpt", way == "newest"
        save: Dies = SaveAndDie(1, str(path))
        if is_newest:
            save = KeepNewestAndDie(folder, "{step}", **newest)
        save.death = Death(worker, number, str(folder), str(log), kills_all)
        run = run_of(path, 3, save, TemporaryFiles(temporary), **settings)
        run = replace(run, trainer={"enable_checkpointing": is_newest})
        outcomes = pool.run(fit, run, resume and str(resume), world=WORLD)
        return folder / "step=3.ckpt" if is_newest else path, outcomes

    def changes() -> list[str]:
        return re.sub(r"step\d-\w{8}", "S", log.read_text()).split("\n")

    _, whole = train(0, other_disk / "uninterrupted")
    all_changes, (ordered, others) = changes(), CHANGES[way, worker]
    for number, change in enumerate(all_changes, 1):
        if chosen is not None and not change.startswith(chosen):
            continue
        folder = other_disk / str(number)
        with pytest.raises(PoolError) as error:
            train(number, folder)
        assert error.value.missing == ([0, 1] if kills_all else [worker]), error.value
        assert len(changes()) == number
        assert os.listdir(temporary) == []
        saves = sorted(path for path in folder.iterdir() if path.suffix == ".ckpt")
        for path in saves:
            stamp = torch.load(path)["lightning_loco"]["stamp"]
            assert set(FILES) <= {*os.listdir(f"{path}.loco/{stamp}")}, change
        if way == "newest":
            assert saves[-1].name == f"step={1 + (change != 'replace step=2.ckpt')}.ckpt"
        else:
            assert torch.load(saves[0])["global_step"] == 1 + (number > len(ordered))
        last, resumed = train(0, folder, saves[-1])
        check_resumed(whole, resumed, change)
        assert os.listdir(temporary) == []
        assert len(os.listdir(f"{last}.loco")) == 1
        if way != "newest":  # side files without a main file may remain
            assert sorted(os.listdir(folder)) == ["same.ckpt", "same.ckpt.loco"]
    assert all_changes[: len(ordered)] == ordered
    assert sorted(all_changes[len(ordered) :]) == sorted(others)


def test_killed_requeue_resumes_from_the_previous_one(pool: Pool, tmp_path: Path) -> None:
    """Lightning takes side files without a main file for the newest checkpoint of a requeue."""
    for number, steps in ((2, 1), (10, 2)):
        pool.run(fit, run_of(tmp_path / f"hpc_ckpt_{number}.ckpt", steps), world=WORLD)
    lost = tmp_path / "hpc_ckpt_11.ckpt"
    shutil.copytree(tmp_path / "hpc_ckpt_10.ckpt.loco", f"{lost}.loco")
    check_goes_on(pool, lost, 2, 3)
    assert torch.load(lost)["global_step"] == 3


# ------------------------------------------------------------------- other ways to write


class OldFormatIO(CheckpointIO):
    """A user's CheckpointIO with torch.save's old format, which is not an archive."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, path, _use_new_zipfile_serialization=False)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return torch.load(path, weights_only=weights_only)  # type: ignore[no-any-return]

    def remove_checkpoint(self, path: Any) -> None:
        (shutil.rmtree if os.path.isdir(path) else os.remove)(path)


class FolderIO(OldFormatIO):
    """A user's CheckpointIO that writes a folder."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, f"{path}/all")

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return super().load_checkpoint(f"{path}/all", map_location, weights_only)


@pytest.mark.parametrize("plugin", [OldFormatIO, FolderIO, AsyncCheckpointIO, WholeFileIO])
def test_custom_checkpoint_io_works(pool: Pool, tmp_path: Path, plugin: type[CheckpointIO]) -> None:
    path, settings = tmp_path / "same.ckpt", {"checkpoint_io": plugin()}
    pool.run(fit, run_of(path, 3, **settings), world=WORLD)
    assert 1 <= len(os.listdir(f"{path}.loco")) <= 3
    check_goes_on(pool, path, 3, 4, **settings)
    file = path / "all" if path.is_dir() else path
    assert torch.load(file, weights_only=False)["global_step"] == 4


def fit_in_memory(rank: int, world: int, folder: str) -> list[str]:
    import fsspec

    path = "memory://folder/same.ckpt"
    for steps, resume in ((3, None), (5, path)):
        run = Run("diloco", folder, [SaveEvery(1, path)], steps)
        assert max(fit(rank, world, run, resume).losses) == steps - 1
    files = fsspec.filesystem("memory")
    names = sorted(files.find("/folder"))
    files.rm("/folder", recursive=True)
    return names


def test_remote_addresses_work(pool: Pool, tmp_path: Path) -> None:
    """In one process, because the memory file system is not shared."""
    (names,) = pool.run(fit_in_memory, str(tmp_path), world=1)
    assert names[0] == "/folder/same.ckpt"
    assert [os.path.basename(name) for name in names[1:]] == ["shared.pt", "worker_00000.pt"]
    assert os.path.dirname(names[1]).startswith("/folder/same.ckpt.loco/step5-")


def test_a_custom_checkpoint_io_is_used() -> None:
    strategy = LocoStrategy(LocalSGD())
    assert type(strategy.checkpoint_io) is WholeFileIO
    mine = OldFormatIO()
    strategy.checkpoint_io = mine
    assert strategy.checkpoint_io is mine
    assert LocoStrategy(LocalSGD(), checkpoint_io=mine).checkpoint_io is mine
    wrapped = LocoStrategy(LocalSGD(), checkpoint_io=AsyncCheckpointIO()).checkpoint_io
    assert type(wrapped.checkpoint_io) is WholeFileIO  # type: ignore[attr-defined]
