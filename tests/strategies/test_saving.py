"""If a process or the disk fails during a save, the previous checkpoint remains intact."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import re
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_loco import DiLoCo, LocalSGD, LocoStrategy
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.strategies.kill_before_write import Death

WORLD = 2
MEGABYTES = 4.0  # large enough that writing takes some time
ROOT_ID, NOBODY_ID = 0, 65534
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class LargeModule(pl.LightningModule):
    """Large enough to be killed while it is written; its checkpoints have an additional entry."""

    def __init__(self, megabytes: float, extra: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(int(megabytes * 2**18)))
        self.extra = extra

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight[:8].square().mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = torch.ones(self.extra)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEachStep(pl.Callback):
    """Overwrites one checkpoint after each step; calls a function after the first time."""

    def __init__(self, path: str, then: Callable[[pl.Trainer], None] | None = None) -> None:
        self.path = path
        self.then = then

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
        if self.then is not None:
            self.then(trainer)


def fit(
    rank: int,
    world: int,
    path: str,
    max_steps: int,
    resume: bool = False,
    then: Callable[[pl.Trainer], None] | None = None,
    megabytes: float = 0.1,
    extra: int = 0,
    plugin: type[CheckpointIO] | None = None,
    callback: pl.Callback | None = None,
    checkpoint_folder: str = "shared",
) -> int:
    """Save to one path after each step, or by a callback; return the number of steps."""
    if "FOR_TEMPORARY_FILES" in os.environ:
        tempfile.tempdir = os.environ["FOR_TEMPORARY_FILES"]
    strategy = LocoStrategy(
        DiLoCo(),
        sync_every=2,
        timeout_s=30,
        checkpoint_io=None if plugin is None else plugin(),
        checkpoint_folder=checkpoint_folder,
    )
    trainer = make_trainer(
        strategy,
        max_steps=max_steps,
        callbacks=[callback or SaveEachStep(path, then)],
        max_epochs=-1,
        enable_checkpointing=isinstance(callback, ModelCheckpoint),
    )
    try:
        module = LargeModule(megabytes, extra)
        data = DataLoader(torch.zeros(10, 1))
        trainer.fit(module, data, ckpt_path=path if resume else None)
    finally:
        tempfile.tempdir = None
    return trainer.global_step


# --------------------------------------------------------------------------------- kills


def write_process(trainer: pl.Trainer) -> None:
    """Write the id of the process to kill to a file, after the first checkpoint."""
    path = Path(trainer.callbacks[0].path)  # type: ignore[attr-defined]
    file = path.parent / f"process{trainer.global_rank}"
    if not file.exists():
        file.with_suffix(".new").write_text(str(os.getpid()))
        file.with_suffix(".new").rename(file)


class Killer(threading.Thread):
    """Kills the workers at a given time after the first checkpoint."""

    def __init__(self, path: Path, in_the_copy: bool, draw: random.Random) -> None:
        super().__init__(name="killer")
        self.path = path
        self.in_the_copy = in_the_copy
        self.of_side_files = in_the_copy and draw.random() < 0.5
        self.after_s = draw.uniform(0.0, 0.2)

    def run(self) -> None:
        files = [self.path.parent / f"process{worker}" for worker in range(WORLD)]
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.001)
        size = self.path.stat().st_size
        time.sleep(self.after_s)
        while self.in_the_copy and not self.sees_part(size) and time.monotonic() < deadline:
            pass
        for file in files:
            os.kill(int(file.read_text()), SIGKILL)

    def sees_part(self, size: int) -> bool:
        """Return whether a side file, or the next main file, is being written."""
        with suppress(FileNotFoundError):
            for part in Path(f"{self.path}.loco").glob("*/.*.part"):
                if is_of_main(part) != self.of_side_files and part.stat().st_size > size // 16:
                    return True
        return False


def is_of_main(part: Path) -> bool:
    """Return whether a temporary file belongs to a main file."""
    return part.name.startswith(f".{hashlib.sha256(b'main.ckpt').hexdigest()[:16]}")


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "in_the_copy",
    [
        pytest.param(False, id="at random", marks=pytest.mark.soak),
        pytest.param(True, id="in the copy"),
    ],
)
def test_kill_while_saving_leaves_a_checkpoint(
    pool: Pool,
    tmp_path: Path,
    other_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    in_the_copy: bool,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("FOR_TEMPORARY_FILES", str(temporary))
    draw = random.Random(count)
    cut: list[bool] = []
    for number in range(count):
        folder = other_disk / str(number)
        folder.mkdir()
        path = folder / "same.ckpt"
        killer = Killer(path, in_the_copy, draw)
        killer.start()
        with pytest.raises(PoolError) as error:
            pool.run(fit, str(path), 10_000, False, write_process, MEGABYTES, world=WORLD)
        killer.join()
        assert error.value.missing == [0, 1], error.value
        cut += [is_of_main(part) for part in folder.rglob(".*.part")]
        step = torch.load(path)["global_step"]
        steps = pool.run(fit, str(path), step + 1, True, None, MEGABYTES, world=WORLD)
        assert steps == [step + 1] * WORLD
        assert sorted(os.listdir(folder)) == ["process0", "process1", "same.ckpt", "same.ckpt.loco"]
        assert len(os.listdir(f"{path}.loco")) == 1
        assert os.listdir(temporary) == []
        shutil.rmtree(folder)
    assert not in_the_copy or count < 20 or {True, False} <= {*cut}, "of main and side files"


class SaveAndDie(SaveEachStep):
    """Overwrites one checkpoint after each step; the second time it may be killed."""

    def __init__(self, path: str, death: Death) -> None:
        super().__init__(path)
        self.death = death

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        with self.death.armed() if trainer.global_step == 2 else nullcontext():
            super().on_train_batch_end(trainer, *args)


class KeepNewestAndDie(ModelCheckpoint):
    """Saves to a new path after each step, then removes the previous checkpoint."""

    def __init__(self, path: str, death: Death) -> None:
        folder = os.path.dirname(path)
        super().__init__(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=1)
        self.death = death

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        with self.death.armed() if trainer.global_step == 2 else nullcontext():
            super().on_train_batch_end(trainer, *args)


WAYS = {"shared": SaveAndDie, "private": SaveAndDie, "newest": KeepNewestAndDie}
WRITTEN, SHARED = ["write", "sync"], ["write", "sync", "replace shared.pt", "write", "sync"]
FILES = ["shared.pt", "worker_00000.pt", "worker_00001.pt"]
REMOVED = ["remove main.ckpt", "remove S", *(f"remove {name}" for name in FILES)]
OWN = [[*WRITTEN, f"replace worker_{worker:05d}.pt"] for worker in range(WORLD)]
CHANGES = {  # changes of a save, and, in any order, of removing the previous one
    ("shared", 0): ([*OWN[0], *SHARED, "replace main.ckpt", "replace same.ckpt"], REMOVED),
    ("shared", 1): (OWN[1], []),
    ("private", 0): ([*OWN[0], *SHARED, "replace main.ckpt", "replace same.ckpt"], REMOVED),
    ("private", 1): (OWN[1], []),
    ("newest", 0): (
        [*OWN[0], *SHARED, "replace main.ckpt", "replace step=2.ckpt", "remove step=1.ckpt"],
        [*REMOVED[1:], "remove step=1.ckpt.loco"],
    ),
}


@pytest.mark.parametrize(
    ("way", "worker", "kills_all", "chosen"),
    [
        ("shared", 0, True, ("replace same.ckpt", "remove worker_00001.pt")),
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
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    worker: int,
    kills_all: bool,
    chosen: tuple[str, ...] | None,
) -> None:
    """At half of a file, before a sync or a rename, and while old files are deleted."""
    temporary, log = tmp_path / "temporary", tmp_path / "changes"
    temporary.mkdir()
    monkeypatch.setenv("FOR_TEMPORARY_FILES", str(temporary))
    folder_kind = "private" if way == "private" else "shared"

    def run(number: int, folder: Path, resume: Path | None = None) -> Path:
        """Write the checkpoint after three steps, unless the workers are killed."""
        folder.mkdir(exist_ok=True)
        path = str(resume or folder / "same.ckpt")
        callback = WAYS[way](path, Death(worker, number, str(folder), str(log), kills_all))
        fixed: tuple[Any, ...] = (None, 0.1, 0, None)
        steps = pool.run(
            fit, path, 3, resume is not None, *fixed, callback, folder_kind, world=WORLD
        )
        assert steps == [3] * WORLD
        return folder / ("step=3.ckpt" if way == "newest" else "same.ckpt")

    def changes() -> list[str]:
        return re.sub(r"step\d-\w{8}", "S", log.read_text()).split("\n")

    expected = torch.load(run(0, other_disk / "uninterrupted"))["state_dict"]
    all_changes, (ordered, others) = changes(), CHANGES[way, worker]
    for number, change in enumerate(all_changes, 1):
        if chosen is not None and not change.startswith(chosen):
            continue
        folder = other_disk / str(number)
        with pytest.raises(PoolError) as error:
            run(number, folder)
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
        last = run(0, folder, saves[-1])
        assert torch.equal(torch.load(last)["state_dict"]["weight"], expected["weight"]), change
        assert os.listdir(temporary) == []
        assert len(os.listdir(f"{last}.loco")) == 1
        if way != "newest":  # side files without a main file may remain
            assert sorted(os.listdir(folder)) == ["same.ckpt", "same.ckpt.loco"]
    assert all_changes[: len(ordered)] == ordered
    assert sorted(all_changes[len(ordered) :]) == sorted(others)


def test_killed_requeue_resumes_from_the_previous_one(pool: Pool, tmp_path: Path) -> None:
    """Lightning takes side files without a main file for the newest checkpoint of a requeue."""
    for number, steps in ((2, 1), (10, 2)):
        pool.run(fit, str(tmp_path / f"hpc_ckpt_{number}.ckpt"), steps, world=WORLD)
    lost = tmp_path / "hpc_ckpt_11.ckpt"
    shutil.copytree(tmp_path / "hpc_ckpt_10.ckpt.loco", f"{lost}.loco")
    assert pool.run(fit, str(lost), 3, True, world=WORLD) == [3, 3]
    assert torch.load(lost)["global_step"] == 3


# --------------------------------------------------------- files that cannot be replaced


def put_a_folder_there(trainer: pl.Trainer) -> None:
    path = Path(trainer.callbacks[0].path)  # type: ignore[attr-defined]
    if trainer.is_global_zero and not path.is_dir():
        path.rename(path.with_name("before.ckpt"))
        path.mkdir()
    trainer.strategy.barrier()


def lock_the_folder(trainer: pl.Trainer) -> None:
    path = Path(trainer.callbacks[0].path)  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        Path(f"{path}.loco").chmod(0o777)
        path.parent.chmod(0o555)
    trainer.strategy.barrier()
    if os.geteuid() == ROOT_ID:
        os.seteuid(NOBODY_ID)


def limit_files_to_2_mb(trainer: pl.Trainer) -> None:
    if trainer.is_global_zero:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20, resource.RLIM_INFINITY))


def fit_and_fail(rank: int, world: int, *args: Any) -> str:
    """Return the error message; check that the files are unchanged afterwards."""
    try:
        fit(rank, world, *args)
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
    then: Callable[[pl.Trainer], None],
    megabytes: float,
    extra: int,
    message: str,
) -> None:
    path = other_disk / "same.ckpt"
    messages = pool.run(fit_and_fail, str(path), 4, False, then, megabytes, extra, world=WORLD)
    assert all(message in found for found in messages), messages
    other_disk.chmod(0o777)
    left = other_disk / "before.ckpt"
    if path.is_dir():
        path.rmdir()
        left.rename(path)
    assert sorted(os.listdir(other_disk)) == ["same.ckpt", "same.ckpt.loco"]
    stamp = torch.load(path)["lightning_loco"]["stamp"]
    assert os.listdir(f"{path}.loco") == [stamp]
    steps = pool.run(fit, str(path), 2, True, None, megabytes, extra, world=WORLD)
    assert steps == [2, 2]


def test_a_first_save_that_fails_leaves_nothing(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "same.ckpt"
    path.mkdir()
    messages = pool.run(fit_and_fail, str(path), 2, world=WORLD)
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
    messages = pool.run(fit_and_fail, str(path), 3, False, None, 0.1, 0, IgnoringIO, world=WORLD)
    assert all("could not be replaced" in found for found in messages), messages
    stamp = torch.load(path)["lightning_loco"]["stamp"]
    assert stamp in os.listdir(f"{path}.loco")
    assert pool.run(fit, str(path), 2, True, world=WORLD) == [2, 2]


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
    path = str(tmp_path / "same.ckpt")
    assert pool.run(fit, path, 3, False, None, 0.1, 0, plugin, world=WORLD) == [3, 3]
    assert 1 <= len(os.listdir(f"{path}.loco")) <= 3
    assert pool.run(fit, path, 4, True, None, 0.1, 0, plugin, world=WORLD) == [4, 4]
    file = f"{path}/all" if os.path.isdir(path) else path
    assert torch.load(file, weights_only=False)["global_step"] == 4


def fit_in_memory(rank: int, world: int) -> list[str]:
    import fsspec

    path = "memory://folder/same.ckpt"
    assert fit(rank, world, path, 3) == 3
    assert fit(rank, world, path, 5, True) == 5
    files = fsspec.filesystem("memory")
    names = sorted(files.find("/folder"))
    files.rm("/folder", recursive=True)
    return names


def test_remote_addresses_work(pool: Pool, tmp_path: Path) -> None:
    """In one process, because the memory file system is not shared."""
    (names,) = pool.run(fit_in_memory, world=1)
    assert names[0] == "/folder/same.ckpt"
    assert [os.path.basename(name) for name in names[1:]] == ["shared.pt", "worker_00000.pt"]
    assert os.path.dirname(names[1]).startswith("/folder/same.ckpt.loco/step5-")


# --------------------------------------------------------------------------- single files


def test_files_are_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "one.ckpt"
    io = WholeFileIO()
    io.save_checkpoint({"a": 1}, path)
    io.save_checkpoint({"a": 2}, f"file://{path}")
    assert torch.load(path) == {"a": 2}
    assert os.listdir(path.parent) == ["one.ckpt"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_writers_of_one_path_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Two runs share a folder: the file is always complete and from one of them."""
    path = tmp_path / "last.ckpt"
    found = []

    def write(writer: int) -> None:
        for number in range(20):
            content = {"writer": writer, "x": torch.full((50_000,), float(writer))}
            WholeFileIO().save_checkpoint(content, path)
            if number % 3 == 0:
                found.append(torch.load(path))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    assert all(one["x"].eq(one["writer"]).all() for one in found)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_only_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    path, users = tmp_path / "one.ckpt", tmp_path / "of the user"
    users.write_text("kept")
    name = f".{hashlib.sha256(path.name.encode()).hexdigest()[:16]}"
    left, held, link, other = (
        tmp_path / part
        for part in (f"{name}.0.part", f"{name}.1.part", f"{name}.2.part", ".other.0.part")
    )
    left.write_bytes(b"half a file")
    other.write_bytes(b"half a file")
    link.symlink_to(users)
    with held.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        WholeFileIO().save_checkpoint({"a": 1}, path)
    assert torch.load(path) == {"a": 1}
    assert sorted(tmp_path.iterdir()) == sorted([path, users, held, link, other])
    assert users.read_text() == "kept"


def test_content_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure either the old or the new file is complete."""
    done: list[tuple[str, str]] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        sync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        done.append(("replace", self.name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    WholeFileIO().save_checkpoint({"a": 1}, tmp_path / "some.ckpt")
    (_, part), *others = done
    assert part.endswith(".part")
    assert done == [("sync", part), ("replace", part), ("sync", tmp_path.name)], others


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    io = WholeFileIO()
    io.save_checkpoint({"a": 1}, path)
    with pytest.raises((AttributeError, TypeError), match="pickle|local object"):
        io.save_checkpoint({"a": lambda: 1}, path)
    assert torch.load(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["one.ckpt"]


def test_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        WholeFileIO().save_checkpoint({}, tmp_path / "one.ckpt", storage_options={"a": 1})


def test_a_custom_checkpoint_io_is_used() -> None:
    strategy = LocoStrategy(LocalSGD())
    assert type(strategy.checkpoint_io) is WholeFileIO
    mine = OldFormatIO()
    strategy.checkpoint_io = mine
    assert strategy.checkpoint_io is mine
    assert LocoStrategy(LocalSGD(), checkpoint_io=mine).checkpoint_io is mine
    wrapped = LocoStrategy(LocalSGD(), checkpoint_io=AsyncCheckpointIO()).checkpoint_io
    assert type(wrapped.checkpoint_io) is WholeFileIO  # type: ignore[attr-defined]
