"""The folder of a syncer: a save is there completely, or not at all."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
import torch

from lightning_loco.syncer.snapshot import Snapshot, save_tensors
from tests.harness.model_disk import ModelDisk

FOLDER = Path("/runs/one")
SAVES = 4


class Crash(Exception):
    """The machine fails here."""


def save_until(operations: int) -> tuple[ModelDisk, int]:
    """Save two fragments, of which each save changes one; return how many saves were complete."""
    disk, left = ModelDisk(), itertools.count(operations, -1)

    def before(_: str) -> None:
        if next(left) == 0:
            raise Crash

    disk.make_folder(FOLDER.parent)
    disk.sync("/")
    disk.before = before
    snapshot, fragments = Snapshot(FOLDER, disk), [{"outer": torch.zeros(1)} for _ in range(2)]
    merged = {0: "start", 1: "start"}
    for number in range(SAVES):
        try:
            snapshot.save({}, {"committed": number}, fragments, merged)
        except Crash:
            return disk, number
        fragments[number % 2] = {"outer": torch.full((1,), number + 1.0)}
        merged = {number % 2: str(number + 1)}
    return disk, SAVES


def test_a_crash_at_any_moment_leaves_this_save_or_the_one_before() -> None:
    complete = 0
    for operations in itertools.count():
        if complete == SAVES:
            break
        disk, complete = save_until(operations)
        disk.before = bool
        for after in disk.crashes():
            saved = Snapshot(FOLDER, after).load()
            number = -1 if saved is None else saved.rounds["committed"]
            assert number in (complete - 1, complete), operations
            if saved is not None:
                changed = [(number + 1) // 2 * 2 - 1, number // 2 * 2]  # as 1, 3, 5 and 2, 4, 6
                values = [float(max(one, 0)) for one in changed]
                assert [one["outer"].item() for one in saved.fragments] == values


class FullFile(io.BytesIO):
    """A file on a disk that is full after some bytes."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > 1000:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_an_os_error() -> None:
    """PyTorch makes a RuntimeError of it, which the syncer would not expect."""
    with pytest.raises(OSError, match="No space left"):
        save_tensors({"outer": torch.zeros(10_000)}, FullFile())
