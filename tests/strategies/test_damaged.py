"""Damaged checkpoints are refused on all ranks; the error names an intact one."""

from __future__ import annotations

import os
import shutil
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy

from lightning_loco import DiLoCoStrategy, PairwiseGossipStrategy, RemoteOptimizerStrategy
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO, damage_of
from lightning_loco.strategies.checkpoint.side_files import KEY, SHARDS, SideFiles
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import TinyModule, make_loader
from tests.strategies.families import fit_with

WORLD = 3
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def strategy_of(kind: str) -> Strategy:
    if kind == "remote_optimizer":
        return RemoteOptimizerStrategy(WORLD - 1, timeout_s=20)
    if kind == "pairwise_gossip":
        return PairwiseGossipStrategy(1.0, timeout_s=30, fetch_timeout_s=0.2)
    return DiLoCoStrategy(sync_every=2, timeout_s=30)


def save(module: TinyModule, path: str, *_: Any) -> None:
    """Save after the second and the last step."""
    if module.global_step in (2, 4):
        module.trainer.save_checkpoint(path.format(module.global_step))


def fit(rank: int, world: int, kind: str, path: str | dict[int, str], resume: bool = False) -> int:
    """Train, and save to ``path`` or ``resume`` from it; only some ranks may have it."""
    if isinstance(path, dict):
        path = path.get(rank, "")
    module = TinyModule(optimizer="Adam")
    if not resume:
        module.on_train_batch_end = partial(save, module, path)  # type: ignore[method-assign]
    trainer = fit_with(
        strategy_of(kind),
        module,
        make_loader(rank, 20),
        ckpt_path=(path or None) if resume else None,
        max_steps=6 if resume else 4,
        default_root_dir=os.path.dirname(path),
    )
    return trainer.global_step


KINDS = ["diloco", "pairwise_gossip", "remote_optimizer"]


@pytest.fixture(scope="module", params=KINDS)
def saved(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[str, Path]:
    """Return the kind of the strategy, and a folder with checkpoints after 2 and 4 steps."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(fit, request.param, str(folder / "{}.ckpt"), world=WORLD)
    return request.param, folder


def refusal(pool: Pool, kind: str, path: Path | dict[int, str]) -> str:
    """Return the error with which all ranks refuse to resume."""
    with pytest.raises(PoolError) as error:
        pool.run(fit, kind, path if isinstance(path, dict) else str(path), True, world=WORLD)
    assert sorted(error.value.failures) == [*range(WORLD)], error.value
    assert {failure.type_name for failure in error.value.failures.values()} == {"ValueError"}
    # An error of another worker starts with its name.
    (message,) = {
        f.message.split(": ", f.message.startswith("Worker"))[-1]
        for f in error.value.failures.values()
    }
    return message


def flip_in_tensors(path: Path) -> None:
    """Flip one bit of the largest tensor in a file."""
    with zipfile.ZipFile(path) as archive:
        tensors = [part for part in archive.infolist() if "/data/" in part.filename]
        part = max(tensors, key=lambda part: part.file_size)
        content = archive.read(part)
    whole = bytearray(path.read_bytes())
    whole[whole.index(content) + len(content) // 2] ^= 1
    path.write_bytes(whole)


def test_damaged_file_and_an_intact_one_are_named(
    pool: Pool, saved: tuple[str, Path], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    kind, folder = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path, older = tmp_path / "4.ckpt", tmp_path / "2.ckpt"
    names_older = f"Go on from {older}, the newest other checkpoint in its folder that is intact."
    whole = path.read_bytes()
    for text, content in (
        ("it is empty", b""),
        ("cannot be read", whole[:2]),
        ("it was cut short or has changed", whole[: len(whole) // 2]),
        ("it was cut short or has changed", whole[:-1]),
        ("has changed since it was written", None),
    ):
        with subtests.test(text, bytes=content and len(content)):
            path.write_bytes(whole if content is None else content)
            if content is None:
                flip_in_tensors(path)
                torch.load(path)  # does not detect it
            message = refusal(pool, kind, path)
            assert str(path) in message
            assert text in message
            assert names_older in message
    with subtests.test("the other is damaged, too"):
        flip_in_tensors(older)
        assert f"No other checkpoint in {tmp_path} is intact." in refusal(pool, kind, path)
    path.write_bytes(whole)
    assert pool.run(fit, kind, str(path), True, world=WORLD)[: WORLD - 1] == [6] * (WORLD - 1)


@pytest.mark.parametrize("saved", ["diloco"], indirect=True)
def test_truncated_side_file_is_named(pool: Pool, saved: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    newest, older = (
        next(Path(f"{tmp_path}/{step}.ckpt.loco").glob("*/worker_00001.pt")) for step in (4, 2)
    )
    for file in (newest, older):
        file.write_bytes(file.read_bytes()[:-1])
        message = refusal(pool, kind, tmp_path / "4.ckpt")
        assert f"{newest} is damaged and cannot be read: it was cut short" in message
        is_whole = f"Go on from {tmp_path}/2.ckpt" in message
        assert is_whole == (file == newest)


def test_all_ranks_must_resume_from_one_save(pool: Pool, saved: tuple[str, Path]) -> None:
    kind, folder = saved
    path, other = str(folder / "4.ckpt"), str(folder / "2.ckpt")
    for rank in (0, WORLD - 1):
        message = refusal(pool, kind, {rank: path})
        assert f"Some ranks resume from {path}, and " in message
        other_rank = WORLD - 1 - rank
        assert any(f"{name} {other_rank}" in message for name in ("worker", "rank"))
        assert "Pass the same ckpt_path on all ranks" in message
    message = refusal(pool, kind, {rank: path if rank else other for rank in range(WORLD)})
    assert "The ranks resume from different saves" in message
    assert path in message
    assert other in message


@pytest.mark.parametrize("saved", ["diloco"], indirect=True)
def test_pipe_instead_of_a_file_is_refused(
    pool: Pool, saved: tuple[str, Path], tmp_path: Path
) -> None:
    kind, folder = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (side_file,) = Path(f"{tmp_path}/4.ckpt.loco").glob("*/worker_00001.pt")
    for file in (side_file, tmp_path / "4.ckpt"):
        file.unlink()
        os.mkfifo(file)
        message = refusal(pool, kind, tmp_path / "4.ckpt")
        assert f"{file} is not a file" in message
        assert f"Go on from {tmp_path}/2.ckpt" in message
    assert SideFiles(WholeFileIO(), tmp_path / "4.ckpt").saves() == set()


def test_folder_of_shards_is_refused(pool: Pool, saved: tuple[str, Path], tmp_path: Path) -> None:
    kind, _ = saved
    path = tmp_path / "shards.ckpt"
    path.mkdir()
    for content, writer in (
        ({SHARDS: {}}, "LocoModelParallelStrategy"),
        ({}, "ModelParallelStrategy of Lightning"),
    ):
        torch.save(content, path / "meta.pt")
        message = refusal(pool, kind, path)
        assert f"The checkpoint {path} is a folder" in message
        assert f"the ranks of {writer} have written shards" in message


@pytest.mark.parametrize("saved", ["diloco"], indirect=True)
def test_last_is_refused_too(pool: Pool, saved: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = saved
    shutil.copytree(folder, tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "last.ckpt"
    path.write_bytes((tmp_path / "checkpoints" / "4.ckpt").read_bytes()[:-1])
    with pytest.raises(PoolError) as error:
        pool.run(fit_last, kind, str(tmp_path), world=WORLD)
    for failure in error.value.failures.values():
        assert f"The checkpoint {path} cannot be read" in failure.message
        assert f"Go on from {path.with_name('4.ckpt')}" in failure.message


def fit_last(rank: int, world: int, kind: str, folder: str) -> None:
    fit_with(
        strategy_of(kind),
        TinyModule(),
        make_loader(rank, 20),
        ckpt_path="last",
        enable_checkpointing=True,
        default_root_dir=folder,
    )


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
