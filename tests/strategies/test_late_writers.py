"""A worker that was suspended, or another run, cannot damage later saves to its path."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_loco._util.fault_points import on_reach
from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.strategies.checkpoint.atomic_io import META, WholeFileIO
from lightning_loco.strategies.checkpoint.reader import choose_save
from lightning_loco.strategies.checkpoint.shard_folder import (
    check_folder,
    read_folder,
    write_folder,
)
from lightning_loco.strategies.checkpoint.side_files import KEY, SHARDS, SideFiles, new_stamp
from lightning_loco.strategies.checkpoint.writer import Save, save_together
from tests.strategies.kill_before_write import before_each_change

pytestmark = pytest.mark.recovery
OLDER, NEWER = 10, 20
WAYS = {
    "shared": Save.to_shared_folder,
    "private": Save.to_private_folders,
    "main folder": Save.to_shared_folder,
}


@dataclasses.dataclass
class OnlyWorker(WorkerGroup):
    """Calls a function instead of one of its agreements, and then raises that worker 1 is gone."""

    number: int = 1
    then: Callable[[], object] = bool

    def gather_objects(self, value: Any, label: str = "an agreement") -> list[Any]:
        self.number -= 1
        if self.number == 0:
            self.then()
            raise WorkerFailure("Worker 1 is gone.")
        return [value]


def save(
    path: Path,
    step: int,
    group: WorkerGroup | None = None,
    way: str = "shared",
    with_side_files: bool = True,
) -> None:
    """Save the state of worker 0, with side files or without."""
    io, stamp = WholeFileIO(), new_stamp(step)
    files = SideFiles(io, path)
    main = {"step": step, **({KEY: {"stamp": stamp}} if with_side_files else {})}
    own, shared = ({"own": step}, {"shared": step}) if with_side_files else (None, None)
    write_main = partial(io.save_checkpoint, main)
    if way == "main folder":
        main[SHARDS] = write_folder({"step": torch.tensor(step)}, files.staged_main(stamp), None)
        write_main = lambda path: io.save_checkpoint(main, f"{path}/{META}")  # noqa: E731
    save = Save(files, stamp, own, shared, write_main)
    save_together(partial(WAYS[way], save), group or WorkerGroup(0, 1))


def saved_step(path: Path) -> int:
    """Return the step of a checkpoint, and check that all its files exist."""
    main = torch.load(path / META if path.is_dir() else path)
    step = int(main["step"])
    if path.is_dir():
        check_folder(str(path), main[SHARDS], None)
        content = {"step": torch.tensor(0)}
        read_folder(content, str(path), None)
        assert content["step"] == step
    if KEY in main:
        own, shared = SideFiles(WholeFileIO(), path).load(main[KEY]["stamp"], 0, True)
        assert (own, shared) == ({"own": step}, {"shared": step})
    return step


@pytest.mark.parametrize("with_side_files", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_suspended_worker_without_the_others_changes_nothing(
    tmp_path: Path, number: int, way: str, with_side_files: bool
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1, way=way)
    group = OnlyWorker(0, 1, number=number, then=lambda: save(path, NEWER, way=way))
    with pytest.raises(WorkerFailure):
        save(path, OLDER, group, way, with_side_files)
    assert saved_step(path) == NEWER


@pytest.mark.parametrize("number", [2, 3])
def test_main_file_is_replaced_only_after_another_agreement(tmp_path: Path, number: int) -> None:
    path, found = tmp_path / "last.ckpt", []
    save(path, 1)
    group = OnlyWorker(0, 1, number=number, then=lambda: found.append(saved_step(path)))
    with pytest.raises(WorkerFailure):
        save(path, OLDER, group)
    assert found == [1 if number == 2 else OLDER] == [saved_step(path)]
    assert os.listdir(f"{path}.loco") == [torch.load(path)[KEY]["stamp"]]


@pytest.mark.parametrize("with_side_files", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_save_between_any_two_changes_remains_complete(
    tmp_path: Path, way: str, with_side_files: bool, subtests: pytest.Subtests
) -> None:
    """Make a newer save before each fault point of an older save that was agreed on."""
    reached: list[str] = []
    save(tmp_path / "count.ckpt", 1, way=way)
    with on_reach(reached.append):
        save(tmp_path / "count.ckpt", OLDER, way=way, with_side_files=with_side_files)
    assert "before the main file is in its place" in reached
    for chosen in range(1, len(reached)):
        path, left = tmp_path / f"{chosen}.ckpt", [*reached[: chosen + 1]]
        save(path, 1, way=way)

        def interfere(point: str, path: Path = path, left: list[str] = left) -> None:
            if left and left.pop(0) == point and not left:
                save(path, NEWER, way=way)

        with subtests.test(reached[chosen], number=chosen):
            with on_reach(interfere), suppress(OSError):
                save(path, OLDER, way=way, with_side_files=with_side_files)
            assert not left
            assert saved_step(path) == NEWER


def test_files_of_a_later_save_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    files, later = SideFiles(WholeFileIO(), path), new_stamp(NEWER)
    save(path, 1)

    def start(point: str) -> None:
        if point == "before the last checkpoint is deleted":
            files.save(later, 1, {"own": NEWER})

    with on_reach(start):
        save(path, OLDER)
    assert saved_step(path) == OLDER
    assert sorted(files.stamps()) == sorted([later, torch.load(path)[KEY]["stamp"]])
    save(path, NEWER)
    assert files.stamps() == [torch.load(path)[KEY]["stamp"]]


def test_main_file_alone_leaves_no_folder(tmp_path: Path) -> None:
    for way in WAYS:
        save(tmp_path / way, OLDER, way=way, with_side_files=False)
    assert sorted(os.listdir(tmp_path)) == sorted(WAYS)


@pytest.mark.parametrize("with_side_files", [True, False])
def test_a_folder_is_complete_before_each_change(tmp_path: Path, with_side_files: bool) -> None:
    """Wherever the process that replaces a folder is killed, the old or the new one exists."""
    folder, states = tmp_path / "run", tmp_path / "states"
    folder.mkdir()
    path = folder / "last.ckpt"
    save(path, 1, None, "main folder", with_side_files)
    for step in (2, 3):
        changes: list[str] = []

        def keep_state(change: str, changes: list[str] = changes) -> None:
            changes.append(change)
            kept = states / f"{len(changes)}"
            kept.mkdir(parents=True)
            for name in ("last.ckpt", "last.ckpt.loco"):
                if (folder / name).exists():
                    shutil.copytree(folder / name, kept / name, symlinks=True)

        with before_each_change(str(folder), keep_state):
            save(path, step, None, "main folder", with_side_files)
        assert changes.count("replace current") == 1
        found = [saved_step(states / str(n) / "last.ckpt") for n in range(1, len(changes) + 1)]
        assert found == sorted(found)
        assert {*found} == {step - 1, step}
        for state in states.iterdir():
            save(state / "last.ckpt", NEWER, None, "main folder", with_side_files)
            assert saved_step(state / "last.ckpt") == NEWER
            assert len([part for part in (state / "last.ckpt").iterdir() if part.is_dir()]) == 2
        shutil.rmtree(states)


def test_a_folder_of_lightning_can_be_replaced(tmp_path: Path) -> None:
    """Also a copy with folders instead of links, and one that is itself a link."""
    path = tmp_path / "last.ckpt"
    for step in (1, 2):
        save(path, step, way="main folder")
    shutil.copytree(path, tmp_path / "copy.ckpt")
    (tmp_path / "link.ckpt").symlink_to("copy.ckpt")
    for name in ("link.ckpt", "copy.ckpt"):
        save(tmp_path / name, 3, way="main folder")
        assert saved_step(tmp_path / name) == 3
    shutil.rmtree(path)
    assert not path.exists()


@pytest.mark.parametrize("way", WAYS)
def test_the_side_folder_may_be_on_another_disk(tmp_path: Path, other_disk: Path, way: str) -> None:
    path = tmp_path / "last.ckpt"
    Path(f"{path}.loco").symlink_to(other_disk)
    (other_disk / "mine").mkdir()
    for step in (1, 2, 3):
        save(path, step, way=way)
        assert saved_step(path) == step
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "last.ckpt.loco"]
    main = torch.load(path / META if path.is_dir() else path)
    assert sorted(os.listdir(other_disk)) == ["mine", main[KEY]["stamp"]]


@dataclasses.dataclass
class WithOneElsewhere(WorkerGroup):
    """Worker 1; worker 0 has the same saves on its disk, and uses another file name."""

    def gather_objects(self, value: Any, label: str = "an agreement") -> list[Any]:
        return ["/elsewhere/other.ckpt" if isinstance(value, str) else value, value]


def test_a_save_is_found_under_the_own_name_first(tmp_path: Path) -> None:
    own, other = tmp_path / "own.ckpt", tmp_path / "other.ckpt"
    save(own, OLDER, way="private")
    shutil.copy(own, other)
    shutil.copytree(f"{own}.loco", f"{other}.loco")
    group = WithOneElsewhere(1, 2)
    assert choose_save(group, WholeFileIO(), own) == (str(own), {0})
    own.unlink()
    shutil.rmtree(f"{own}.loco")
    assert choose_save(group, WholeFileIO(), own) == (str(other), {0})
