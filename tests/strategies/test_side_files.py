"""Files of checkpoints in one process: written whole, checked when read; random states."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO, damage_of
from lightning_loco.strategies.checkpoint.position import random_states, set_random_states
from lightning_loco.strategies.checkpoint.side_files import (
    KEY,
    SideFiles,
    checksum,
    is_stamp,
    new_stamp,
)

pytestmark = pytest.mark.recovery


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


def test_files_without_checksums_are_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    set_options = getattr(torch.serialization, "set_crc32_options", None)
    if set_options is None:
        pytest.skip("this version of PyTorch always writes checksums")
    set_options(False)
    try:
        torch.save({KEY: torch.ones(10)}, path)
    finally:
        set_options(True)
    assert damage_of(path) is None
    torch.save({KEY: torch.ones(10)}, path, _use_new_zipfile_serialization=False)
    assert damage_of(path) is None
    assert damage_of("memory://one.ckpt") is None


# ---------------------------------------------------------------------------- side files


def test_format_of_stamps() -> None:
    assert all(is_stamp(new_stamp(steps)) for steps in (0, 7, 10**9))
    assert not is_stamp("step4-01234567\n")


@pytest.fixture
def files(tmp_path: Path) -> SideFiles:
    """Return the side files of a checkpoint, with two workers in one save."""
    found, stamp = SideFiles(WholeFileIO(), tmp_path / "one.ckpt"), new_stamp(4)
    for worker in (0, 1, None):
        found.save(stamp, worker, {"params": torch.randn(40), "steps": 4, "random": [1.0, None]})
    return found


def load(files: SideFiles, stamp: str) -> tuple[list[Any] | None, str]:
    """Return the state that worker 1 reads, or the error."""
    try:
        return [*files.load(stamp, 1, True)], ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.soak
@pytest.mark.parametrize("worker", [1, None], ids=["worker_00001.pt", "shared.pt"])
def test_flipped_bits_are_found(files: SideFiles, worker: int | None) -> None:
    """None of 200 flipped bits changes the values that are read; bits in padding have no effect."""
    (stamp,) = files.stamps()
    name = Path(files.path_of(stamp, worker))
    whole, (found, _) = name.read_bytes(), load(files, stamp)
    expected, draw, refused = checksum(found), random.Random(7), 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        name.write_bytes(damaged)
        found, message = load(files, stamp)
        refused += found is None
        assert str(name) in message if found is None else checksum(found) == expected
    assert refused > 20


def test_removal_does_not_follow_a_link(files: SideFiles, tmp_path: Path) -> None:
    linked, elsewhere = Path(f"{files.path}.loco"), tmp_path / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    files.remove()
    assert not linked.is_symlink()
    assert len(os.listdir(elsewhere)) == 1


def test_a_pipe_is_not_a_save(files: SideFiles) -> None:
    (stamp,) = files.stamps()
    torch.save({KEY: {"stamp": stamp}}, files.path)
    assert files.saves() == {stamp}
    os.remove(files.path)
    os.mkfifo(files.path)
    assert files.saves() == set()


# ---------------------------------------------------------------------------- checksums


def test_checksum_differs_between_contents(subtests: pytest.Subtests) -> None:
    rows: list[tuple[Any, Any]] = [
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1.0}),
        ([1, 2], [2, 1]),
        ([[1], 2], [[1, 2]]),
        ([0.1], [0.1 + 2e-17]),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(3, dtype=torch.bfloat16), torch.tensor([0, 0, 1e-40]).bfloat16()),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
        ({"a", "b"}, {"a", "c"}),
        ("1", 1),
        (None, False),
    ]
    for one, other in rows:
        with subtests.test(one=one, other=other):
            assert checksum(one) != checksum(other)


def test_checksum_survives_writing_and_reading(tmp_path: Path) -> None:
    tensors: list[Tensor] = [
        torch.randn(4, 3).T,
        torch.tensor(True),
        torch.zeros(0),
        torch.randn(3, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor(float("nan")),
    ]
    content = {"tensors": tensors, "random": random_states(), 3: ("x", {"y": None}), "s": {1, 2}}
    torch.save(content, tmp_path / "one.pt")
    assert checksum(torch.load(tmp_path / "one.pt")) == checksum(content)


# ------------------------------------------------------------------------- random states


def draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), float(np.random.rand())


def test_all_generators_are_restored() -> None:
    states = random_states()
    first = draw()
    assert draw() != first
    set_random_states(states)
    assert draw() == first


def test_an_unused_gpu_is_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU context takes hundreds of megabytes, even for a run on CPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("woke the GPU"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: pytest.fail("woke the GPU"))
    states = random_states()
    assert "cuda" not in states
    set_random_states({**states, "cuda": states["torch"]})
