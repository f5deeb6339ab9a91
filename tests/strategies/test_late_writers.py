"""A worker that was suspended, or another run, does not damage later saves to its path."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.fault_points import on_reach
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO
from lightning_loco.strategies.checkpoint.side_files import KEY, SideFiles, new_stamp
from lightning_loco.strategies.checkpoint.writer import Save

pytestmark = pytest.mark.recovery
OLDER, NEWER = 10, 20
WAYS = {"shared": Save.to_shared_folder, "private": Save.to_private_folders}


@dataclasses.dataclass
class OnlyWorker(WorkerGroup):
    """Calls a function instead of one of its agreements, and then finds the others gone."""

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
    """Save the state of worker 0; without side files if not ``with_side_files``."""
    io, stamp = WholeFileIO(), new_stamp(step)
    main = {"step": step, **({KEY: {"stamp": stamp}} if with_side_files else {})}
    own, shared = ({"own": step}, {"shared": step}) if with_side_files else (None, None)
    write_main = partial(io.save_checkpoint, main)
    WAYS[way](Save(SideFiles(io, path), stamp, own, shared, write_main), group or WorkerGroup(0, 1))


def saved_step(path: Path) -> int:
    """Return the step of a checkpoint, and check that all its files exist."""
    main = torch.load(path)
    step = int(main["step"])
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
    save(path, 1)
    group = OnlyWorker(0, 1, number=number, then=lambda: save(path, NEWER))
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
    """Make a newer save before each fault point of an older one that was agreed on."""
    reached: list[str] = []
    with on_reach(reached.append):
        save(tmp_path / "count.ckpt", OLDER, way=way, with_side_files=with_side_files)
    assert "before the main file is in its place" in reached
    for chosen in range(1, len(reached)):
        path, left = tmp_path / f"{chosen}.ckpt", [*reached[: chosen + 1]]
        save(path, 1)

        def interfere(point: str, path: Path = path, left: list[str] = left) -> None:
            if left and left.pop(0) == point and not left:
                save(path, NEWER)

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
