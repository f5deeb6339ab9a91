"""After a crash at any moment of a save there is a whole checkpoint: on a model of a disk.

The ranks of a save are decisions, which run in one process, in a random order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_loco._util.decisions import Decision
from lightning_loco._util.fault_points import on_reach
from lightning_loco.strategies.checkpoint.atomic_io import META, WholeFileIO, make_folder
from lightning_loco.strategies.checkpoint.main_file import ShardedMainFile
from lightning_loco.strategies.checkpoint.side_files import (
    KEY,
    SHARDS,
    SideFiles,
    new_stamp,
    steps_of,
    without_header,
)
from lightning_loco.strategies.checkpoint.writer import Do, Save
from tests.harness.model_disk import ModelDisk

pytestmark = pytest.mark.recovery
PATH, WORLD = Path("/run/last.ckpt"), 2
FORMS = ["file", "folder"]
WAYS = [("shared", "file"), ("shared", "folder"), ("private", "file")]
BEFORE_MAIN = "before the main file is in its place"
BEFORE_OLD_GOES = "before the last checkpoint is deleted"


def new_disk() -> ModelDisk:
    disk = ModelDisk()
    disk.make_folder(PATH.parent)
    disk.sync("/")
    return disk


def files_on(disk: ModelDisk) -> SideFiles:
    io = WholeFileIO()
    io.disk = disk
    return SideFiles(io, PATH)


def write_shard(disk: ModelDisk, folder: Path, name: str, step: int) -> None:
    """Write one file to a folder, as ``write_folder`` does."""
    make_folder(disk, folder)
    with disk.create(folder / name) as file:
        torch.save(step, file)
        disk.sync_file(file)
    disk.sync(folder)


def decisions(disks: Sequence[ModelDisk], step: int, form: str) -> list[Decision[Do, bool]]:
    """Return the decisions of the ranks, which write to the same disk or each to its own."""
    stamp, found = new_stamp(step), []
    for worker in range(WORLD):
        disk = disks[worker % len(disks)]
        files = files_on(disk)
        main: dict[str, Any] = {"step": step, KEY: {"stamp": stamp}}
        write = partial(WholeFileIO.save_checkpoint, files._io, main)
        if form == "folder":
            if worker == 0:
                # A file of this save alone, too, as a model with another number of ranks has.
                for name in ("shard", f"shard{step}"):
                    write_shard(disk, Path(files.staged_main(stamp)), name, step)
            strategy: Any = SimpleNamespace(checkpoint_io=files._io)
            main[SHARDS] = {"shard": (0, 0), f"shard{step}": (0, 0)}
            write = ShardedMainFile(strategy, saves_folders=True).writer(main, None)
        save = Save(files, stamp, {"own": step}, {"shared": step}, write)
        shared = partial(save.to_shared_folder, num_workers=WORLD)
        decide = shared if len(disks) == 1 else save.to_private_folders
        found.append(decide(worker, 0))
    return found


def run(ranks: Sequence[Decision[Do, bool]], draw: random.Random) -> None:
    """Carry out the decisions of all ranks together, each step in a random order of the ranks."""
    actions = [next(rank) for rank in ranks]
    with suppress(StopIteration):  # all of them return after the same agreement
        while True:
            assert len({what for what, _ in actions}) == 1
            outcomes: dict[int, Any] = {}
            error = None
            for number in draw.sample(range(len(ranks)), len(ranks)):
                part = actions[number][1]
                try:
                    outcomes[number] = part and part()
                except OSError as raised:
                    error = raised
            if error is not None:
                for rank in ranks:
                    with suppress(OSError):
                        rank.throw(error)
                raise error
            actions = [rank.send(outcomes[n]) for n, rank in enumerate(ranks)]


def save(disks: Sequence[ModelDisk], step: int, form: str, seed: int = 0) -> None:
    run(decisions(disks, step, form), random.Random(seed))


def read(disk: ModelDisk, path: str | Path) -> Any:
    with disk.open(path) as file:
        return torch.load(file)


def saved_step(disks: Sequence[ModelDisk]) -> int:
    """Return the step of the checkpoint, 0 if there is none; fail if it is not whole."""
    if len(disks) > 1:  # as a run that resumes does: the newest save that is on all disks
        saves = [files_on(disk).saves() for disk in disks]
        if not (common := set.intersection(*saves)):
            assert not any(disk.exists(PATH) for disk in disks), saves
            return 0
        stamp = max(common, key=steps_of)
        for disk in disks:
            files_on(disk).commit_main(stamp)
    steps = set()
    for worker in range(WORLD):
        disk = disks[worker % len(disks)]
        if not disk.exists(PATH):
            return 0
        main = read(disk, PATH / META if disk.is_dir(PATH) else PATH)
        step, stamp, files = main["step"], main[KEY]["stamp"], files_on(disk)
        steps.add(step)
        for owner, name in ((worker, "own"), (None, "shared")):
            content = read(disk, files.path_of(stamp, owner))
            assert without_header(content, stamp, owner) == {name: step}
        if disk.is_dir(PATH):
            assert {read(disk, PATH / name) for name in ("shard", f"shard{step}")} == {step}
    assert len(steps) == 1
    return int(steps.pop())


class CrashEverywhere:
    """Crashes copies of all disks before each change of one of them, and checks what is left."""

    def __init__(self, disks: Sequence[ModelDisk], old: int, new: int, form: str) -> None:
        self.disks = disks
        # On private disks a save counts when it is on all of them, and is then committed.
        self.allowed = {old} if len(disks) == 1 else {old, new}
        self.is_checking = False
        self.old, self.new, self.form = old, new, form
        self.found: list[int] = []
        self.draw = random.Random(1)
        for disk in disks:
            disk.before = self.crash

    def on_point(self, point: str) -> None:
        if not self.is_checking and len(self.disks) == 1:
            if point == BEFORE_MAIN:
                self.allowed = {self.old, self.new}
            elif point == BEFORE_OLD_GOES:
                self.allowed = {self.new}

    def crash(self, change: str) -> None:
        self.is_checking = True
        outcomes = [[*disk.crashes()] for disk in self.disks]
        # All outcomes of one disk, each with one of the other's.
        for number, own in enumerate(outcomes):
            for left in own:
                chosen = [self.draw.choice(found) for found in outcomes]
                chosen[number] = left
                disks = [next(one.crashes()) for one in chosen]  # copies, which are written to
                step = saved_step(disks)
                assert step in self.allowed, f"{step} after a crash before: {change}"
                self.found.append(step)
                if self.draw.random() < 0.2:
                    save(disks, self.new + 1, self.form)
                    assert saved_step(disks) == self.new + 1
                    assert {len(files_on(disk).stamps()) for disk in disks} == {1}
        self.is_checking = False


@pytest.mark.parametrize(("way", "form"), WAYS)
@pytest.mark.parametrize("seed", range(2))
def test_a_crash_leaves_a_whole_checkpoint(way: str, form: str, seed: int) -> None:
    disks = [new_disk() for _ in range(WORLD if way == "private" else 1)]
    for step in (1, 2, 3):
        crashes = CrashEverywhere(disks, step - 1, step, form)
        with on_reach(crashes.on_point):
            save(disks, step, form, seed)
        crashes.allowed = {step}  # a save that has returned is never lost
        crashes.crash("the end")
        assert {*crashes.found} == {step - 1, step}
    for disk in disks:
        disk.before = bool


@pytest.mark.parametrize("form", FORMS)
def test_a_later_save_between_any_two_changes_is_kept(form: str) -> None:
    """Worker 0 is suspended after the last agreement, while another run makes a later save."""
    for chosen in itertools.count(1):
        disk, left = new_disk(), [*range(chosen)]
        save([disk], 1, form)

        def interfere(change: str, disk: ModelDisk = disk, left: list[int] = left) -> None:
            if left and left.pop() == 0:
                save([disk], 3, form)

        def start(point: str, disk: ModelDisk = disk, call: Any = interfere) -> None:
            if point == BEFORE_MAIN:
                disk.before = call

        with on_reach(start), suppress(OSError):
            save([disk], 2, form)
        if left:  # it has made fewer changes
            assert saved_step([disk]) == 2
            break
        for after in disk.crashes():
            assert saved_step([after]) == saved_step([disk]) == 3, chosen
    assert chosen > (20 if form == "folder" else 5)


@pytest.mark.parametrize("form", FORMS)
def test_a_suspended_writer_that_goes_on_damages_nothing(form: str) -> None:
    """It goes on before each change in turn of a later save; one of both is kept whole."""
    for chosen in itertools.count(1):
        disk, left = new_disk(), [*range(chosen)]
        save([disk], 1, form)
        ranks = decisions([disk], 2, form)
        actions = [next(rank) for rank in ranks]
        while actions[0][0] != Do.COMMIT:
            outcomes = [part and part() for _, part in actions]
            actions = [rank.send(found) for rank, found in zip(ranks, outcomes, strict=True)]

        def go_on(change: str, left: list[int] = left, commit: Any = actions[0][1]) -> None:
            if left and left.pop() == 0:
                with suppress(OSError):
                    commit()

        disk.before = go_on
        has_returned = False
        with suppress(OSError):
            save([disk], 3, form)
            has_returned = True
        if left:
            break
        for after in disk.crashes():
            assert saved_step([after]) == saved_step([disk]), chosen
        assert saved_step([disk]) == 3 or not has_returned, chosen
    assert chosen > (30 if form == "folder" else 20)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", range(WORLD))
def test_a_save_that_another_run_has_deleted_in_part_is_not_committed(
    form: str, number: int
) -> None:
    """A worker has written its file, another run saves, and then the other worker writes its."""
    disk = new_disk()
    ranks = decisions([disk], 1, form)
    parts = [next(rank)[1] for rank in ranks]
    parts[number]()
    save([disk], 2, form)
    outcomes: list[Any] = [[], []]
    outcomes[1 - number] = parts[1 - number]()
    _, write_shared = ranks[0].send(outcomes[0])

    def finish() -> None:
        write_shared()
        _, commit = ranks[0].send(None)
        commit()

    with pytest.raises(OSError, match="been deleted"):
        finish()
    assert saved_step([disk]) == 2


@pytest.mark.parametrize("form", FORMS)
def test_a_change_that_fails_leaves_a_whole_checkpoint(form: str) -> None:
    """All ranks get the error, and nothing is left of a save that was not committed."""
    for chosen in itertools.count(1):
        disk, left = new_disk(), [*range(chosen)]
        save([disk], 1, form)
        ranks = decisions([disk], 2, form)

        def fail(change: str, left: list[int] = left) -> None:
            if left and left.pop() == 0:
                raise OSError(28, "No space left on device")

        disk.before = fail
        with suppress(OSError):
            run(ranks, random.Random(0))
        disk.before = bool
        if left:
            break
        if saved_step([disk]) == 1:
            assert len(files_on(disk).stamps()) == 1
        save([disk], 3, form)
        assert saved_step([disk]) == 3
        assert len(files_on(disk).stamps()) == 1
    assert chosen > (30 if form == "folder" else 20)
