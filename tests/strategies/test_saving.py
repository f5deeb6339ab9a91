"""No loss of a process or of the disk costs the checkpoint that was there before."""

from __future__ import annotations

import os
import random
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_loco import DiLoCo, LocalSGD, LocoStrategy
from lightning_loco.strategies.whole_files import WholeFileIO
from tests.pool import Pool, PoolError, make_trainer

WORLD = 2
ROOT_ID, NOBODY_ID = 0, 65534
pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that")


@pytest.fixture
def other_disk() -> Iterator[Path]:
    """A folder on another file system than the one for temporary files."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("there is only one file system")
    folder = Path(tempfile.mkdtemp(dir=memory))
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


class LargeModule(pl.LightningModule):
    """Large enough to be killed while it is written; its checkpoints hold something more."""

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
    """Overwrites one checkpoint after each step; tells that it has done so for the first time."""

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
) -> int:
    """Save to one path after each step; how many steps were made."""
    if "FOR_TEMPORARY_FILES" in os.environ:
        tempfile.tempdir = os.environ["FOR_TEMPORARY_FILES"]
    checkpoint_io = None if plugin is None else plugin()
    strategy = LocoStrategy(DiLoCo(), sync_every=2, timeout_s=30, checkpoint_io=checkpoint_io)
    trainer = make_trainer(
        strategy, max_steps=max_steps, callbacks=[SaveEachStep(path, then)], max_epochs=-1
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
    """Tell the test who is to be killed, once there is a checkpoint."""
    path = Path(trainer.callbacks[0].path)  # type: ignore[attr-defined]
    file = path.parent / f"process{trainer.global_rank}"
    if not file.exists():
        file.with_suffix(".new").write_text(str(os.getpid()))
        file.with_suffix(".new").rename(file)


class Killer(threading.Thread):
    """Kills the workers, at a moment after the first checkpoint."""

    def __init__(self, path: Path, in_the_copy: bool, draw: random.Random) -> None:
        super().__init__(name="killer")
        self.path = path
        self.in_the_copy = in_the_copy
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
        """Whether a file beside the checkpoint, or itself, is being written."""
        with suppress(FileNotFoundError):
            files = [entry for entry in os.scandir(self.path.parent) if entry.is_file()]
            return any(size // 16 < entry.stat().st_size < size for entry in files)
        return False


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("in_the_copy", [False, True], ids=["at random", "in the copy"])
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
    for number in range(count):
        folder = other_disk / str(number)
        folder.mkdir()
        path = folder / "same.ckpt"
        killer = Killer(path, in_the_copy, draw)
        killer.start()
        with pytest.raises(PoolError) as error:
            pool.run(fit, str(path), 10_000, False, write_process, 8.0, world=WORLD)
        killer.join()
        assert error.value.missing == [0, 1], error.value
        step = torch.load(path)["global_step"]
        steps = pool.run(fit, str(path), step + 2, True, None, 8.0, world=WORLD)
        assert steps == [step + 2] * WORLD
        assert sorted(os.listdir(folder)) == ["process0", "process1", "same.ckpt", "same.ckpt.loco"]
        assert len(os.listdir(f"{path}.loco")) == 1
        assert os.listdir(temporary) == []
        shutil.rmtree(folder)


def test_requeue_that_was_killed_goes_on_from_the_one_before(pool: Pool, tmp_path: Path) -> None:
    """Lightning takes side files without a main file for the newest checkpoint of a requeue."""
    for number in (2, 10):
        pool.run(fit, str(tmp_path / f"hpc_ckpt_{number}.ckpt"), number, world=WORLD)
    lost = tmp_path / "hpc_ckpt_11.ckpt"
    shutil.copytree(tmp_path / "hpc_ckpt_10.ckpt.loco", f"{lost}.loco")
    assert pool.run(fit, str(lost), 12, True, world=WORLD) == [12, 12]
    assert torch.load(lost)["global_step"] == 12


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
    """The message of the error; everything is as before when it has been raised."""
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
    ids=["a folder", "read-only", "no room for the main file", "no room for side files"],
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


class DeafIO(TorchCheckpointIO):
    """A storage that says nothing and keeps the file that it has."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if not Path(path).exists():
            super().save_checkpoint(checkpoint, path, storage_options)


def test_a_file_that_was_not_replaced_keeps_what_belongs_to_it(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "same.ckpt"
    messages = pool.run(fit_and_fail, str(path), 3, False, None, 0.1, 0, DeafIO, world=WORLD)
    assert all("could not be replaced" in found for found in messages), messages
    stamp = torch.load(path)["lightning_loco"]["stamp"]
    assert stamp in os.listdir(f"{path}.loco")
    assert pool.run(fit, str(path), 2, True, world=WORLD) == [2, 2]


# ------------------------------------------------------------------- other ways to write


class OldFormatIO(CheckpointIO):
    """A user's own: the old format of torch.save, which is no archive."""

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


@pytest.mark.parametrize("plugin", [OldFormatIO, AsyncCheckpointIO, WholeFileIO])
def test_own_ways_to_write_files_work(
    pool: Pool, tmp_path: Path, plugin: type[CheckpointIO]
) -> None:
    path = str(tmp_path / "same.ckpt")
    assert pool.run(fit, path, 5, False, None, 0.1, 0, plugin, world=WORLD) == [5, 5]
    assert 1 <= len(os.listdir(f"{path}.loco")) <= 3
    assert pool.run(fit, path, 7, True, None, 0.1, 0, plugin, world=WORLD) == [7, 7]
    assert torch.load(path, weights_only=False)["global_step"] == 7


def fit_in_memory(rank: int, world: int) -> list[str]:
    import fsspec

    path = "memory://folder/same.ckpt"
    assert fit(rank, world, path, 3) == 3
    assert fit(rank, world, path, 5, True) == 5
    files = fsspec.filesystem("memory")
    names = sorted(files.find("/folder"))
    files.rm("/folder", recursive=True)
    return names


def test_addresses_elsewhere_work(pool: Pool, tmp_path: Path) -> None:
    """In one process: memory is not shared."""
    (names,) = pool.run(fit_in_memory, world=1)
    assert names[0] == "/folder/same.ckpt"
    assert [os.path.basename(name) for name in names[1:]] == ["shared.pt", "worker_00000.pt"]
    assert os.path.dirname(names[1]).startswith("/folder/same.ckpt.loco/step5-")


# --------------------------------------------------------------------------- single files


def test_file_appears_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "one.ckpt"
    io = WholeFileIO()
    io.save_checkpoint({"a": 1}, path)
    io.save_checkpoint({"a": 2}, f"file://{path}")
    assert torch.load(path) == {"a": 2}
    assert os.listdir(path.parent) == ["one.ckpt"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_content_is_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power has the old file or the new one, and all of it."""
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


def test_content_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
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


def test_what_is_set_by_hand_is_used() -> None:
    strategy = LocoStrategy(LocalSGD())
    assert type(strategy.checkpoint_io) is WholeFileIO
    mine = OldFormatIO()
    strategy.checkpoint_io = mine
    assert strategy.checkpoint_io is mine
    assert LocoStrategy(LocalSGD(), checkpoint_io=mine).checkpoint_io is mine
    wrapped = LocoStrategy(LocalSGD(), checkpoint_io=AsyncCheckpointIO()).checkpoint_io
    assert type(wrapped.checkpoint_io) is WholeFileIO  # type: ignore[attr-defined]
