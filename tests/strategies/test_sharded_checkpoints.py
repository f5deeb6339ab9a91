"""What is particular to checkpoints of workers whose ranks shard the model.

Exact resumes are in test_checkpoint.py, damaged shards in test_damaged.py.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco.strategies.checkpoint.shard_folder import check_folder, damage_in, write_folder
from tests.harness.pool import Pool, PoolError, make_trainer, run_each
from tests.harness.small_model import loss_of
from tests.strategies.families import FAMILIES, HybridModule, ShardedModule, loader, whole
from tests.strategies.save_and_resume import SaveEvery
from tests.strategies.test_other_numbers import SAVED_AT, RecordStart, Start, fit

SYNC_EVERY = 3
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The checkpoint was written by"),
]
SAME = SAVED_AT, SYNC_EVERY
"""The last arguments of ``fit``: where it saves or has saved, and steps between rounds."""


# ---------------------------------------------------------------- other divisions of a model


def start_plainly(rank: int, world: int, path: str) -> Tensor:
    """Load a checkpoint with Lightning's own strategy."""
    start = RecordStart(None, 0)
    trainer = make_trainer(
        ModelParallelStrategy(world, 1),
        max_steps=SAVED_AT + 1,
        use_distributed_sampler=False,
        callbacks=[start],
    )
    data = StatefulDataLoader(loader(rank, (2, 1), 20).dataset, batch_size=None)
    trainer.fit(ShardedModule(optimizer="Adam"), data, ckpt_path=path)
    params: Tensor = start.seen["params"]
    return params


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("diloco", "file.ckpt"),
        ("gasloc", "folder.ckpt"),
        ("async_diloco of fragments", "folder.ckpt"),
    ],
)
def test_a_run_goes_on_with_other_ranks(pool: Pool, tmp_path: Path, method: str, name: str) -> None:
    path = str(tmp_path / name)
    of_four: dict[Any, Sequence[Any]] = {"saved": (method, (2, 1), path, None, *SAME)}
    of_four |= {sizes: (method, sizes, None, path, *SAME) for sizes in ((2, 1), (1, 2), (4, 1))}
    found: dict[Any, list[Start]] = run_each(pool, fit, of_four)
    found[1, 1] = pool.run(fit, method, (1, 1), None, path, *SAME, world=2)
    saved, same = found["saved"], found[2, 1]
    for sizes in ((1, 2), (1, 1)):
        for rank, result in enumerate(found[sizes]):
            of_same = same[rank // (sizes[0] * sizes[1]) * 2]
            assert torch.equal(result.params, of_same.params)
            torch.testing.assert_close(result.final, of_same.final, rtol=0, atol=1e-11)
    assert {one.step for starts in (same, found[4, 1], found[1, 1]) for one in starts} == {SAVED_AT}
    plain = pool.run(start_plainly, path, world=2)[0]
    if name == "file.ckpt":
        consensus = torch.load(path, weights_only=True)["state_dict"]
        assert torch.equal(plain, torch.cat([value.reshape(-1) for value in consensus.values()]))
    else:
        mean = (saved[0].saved + saved[2].saved) / 2
        torch.testing.assert_close(plain, mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_workers", "name"),
    [
        (1, "folder.ckpt"),
        pytest.param(2, "folder.ckpt", marks=pytest.mark.soak),
        pytest.param(2, "file.ckpt", marks=pytest.mark.soak),
    ],
)
def test_a_run_goes_on_with_and_without_copies_of_shards(
    pool: Pool, tmp_path: Path, num_workers: int, name: str
) -> None:
    of_copies, of_shards = str(tmp_path / name), str(tmp_path / "shards" / name)

    def rows(copies: bool, *paths: tuple[str | None, str | None]) -> dict[Any, Sequence[Any]]:
        size, make = (4, HybridModule) if copies else (2, ShardedModule)
        return {path: ("gasloc", (size, 1), *path, *SAME, make) for path in paths}

    save, again = (of_copies, None), (None, of_copies)
    save_shards, again_shards = (of_shards, None), (None, of_shards)
    with nullcontext(pool) if num_workers == 1 else closing(Pool(8)) as ranks:
        world = 4 * num_workers
        with_copies = run_each(ranks, fit, rows(True, save, again), world=world)
        without = rows(False, again, save_shards, again_shards)
        found = run_each(ranks, fit, without, world=world // 2)
        with_copies |= run_each(ranks, fit, rows(True, again_shards), world=world)
    for before, after in zip(with_copies[save], with_copies[again], strict=True):
        assert torch.equal(before.final, after.final)
    for path in (again, again_shards):
        for worker in range(num_workers):
            one, other = with_copies[path][4 * worker], found[path][2 * worker]
            assert torch.equal(one.params, other.params)
            assert one.step == other.step == SAVED_AT


@pytest.mark.soak
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_run_goes_on_with_shards_of_another_number(
    tmp_path: Path, before: int, after: int
) -> None:
    """The shards of the two workers have unequal sizes afterwards."""
    path = str(tmp_path / "folder.ckpt")
    with closing(Pool(6)) as ranks:
        ranks.run(fit, "diloco", (before, 1), path, None, *SAME, world=2 * before)
        same, other = (
            ranks.run(fit, "diloco", (size, 1), None, path, *SAME, world=2 * size)
            for size in (before, after)
        )
    for worker in range(2):
        one, another = same[before * worker], other[after * worker]
        assert torch.equal(one.params, another.params)
        assert one.step == another.step == SAVED_AT


# ----------------------------------------------------------------- states of optimizers


def fit_family(rank: int, module: ShardedModule, **settings: Any) -> Any:
    """Train with FSDP2, for one epoch of 12 steps."""
    settings = {"limit_val_batches": 0, **settings}
    return FAMILIES["fsdp"].fit(rank, module, 12, {"timeout_s": 30}, **settings)


def fit_twice(rank: int, world: int, path: str) -> tuple[Tensor, Tensor]:
    """Train, and then resume with a new module, and with the same one, which has gradients."""
    module, found = ShardedModule(optimizer="Adam"), []
    fit_family(rank, module, callbacks=[SaveEvery(7, path)])
    assert any(parameter.grad is not None for parameter in module.parameters())
    for resumed in (ShardedModule(optimizer="Adam"), module):
        fit_family(rank, resumed, ckpt_path=path)
        found.append(whole(resumed))
    return found[0], found[1]


def test_a_module_with_gradients_resumes_as_a_new_one_does(pool: Pool, tmp_path: Path) -> None:
    for new, same in pool.run(fit_twice, str(tmp_path / "folder.ckpt"), world=4):
        assert torch.equal(new, same)


class Evaluated(ShardedModule):
    """Uses SGD without momentum, which has no state."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", loss_of(self.model, batch), sync_dist=True)


def fit_and_test(rank: int, world: int, path: str) -> list[float]:
    module, data = Evaluated(), FAMILIES["fsdp"].loader(rank, 3)
    family = replace(FAMILIES["fsdp"], in_folder="folder" in path)
    callbacks = [SaveEvery(12, path)]
    trainer = family.fit(rank, module, 12, {}, callbacks=callbacks, limit_val_batches=0)
    (after_fit,) = trainer.test(module, data, verbose=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    (of_file,) = trainer.test(module, data, ckpt_path=path, verbose=False)
    assert len(trainer.optimizers) == 1
    return [after_fit["test_loss"], of_file["test_loss"]]


@pytest.mark.parametrize("name", ["file.ckpt", "folder.ckpt"])
def test_a_test_of_a_checkpoint_whose_optimizer_has_no_state(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    for after_fit, of_file in pool.run(fit_and_test, str(tmp_path / name), world=4):
        assert of_file == pytest.approx(after_fit, rel=1e-12)


# ------------------------------------------------------------------------------ folders


def test_files_of_a_folder_are_compared_with_what_was_written(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    folder = tmp_path / "shards"
    files = write_folder({"one": torch.ones(3), "two": [1, "b"]}, str(folder), None)
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert files == {name: (len(whole), zlib.crc32(whole)) for name, whole in found.items()}
    assert damage_in(str(folder), files) is None
    for name in files:
        file, whole = folder / name, found[name]
        for content, text in (
            (whole[:-1], "were written"),
            (whole[:-1] + bytes([whole[-1] ^ 1]), "has changed since it was written"),
            (None, "does not exist, or is not a file"),
        ):
            with subtests.test(text, name=name):
                file.unlink()
                os.mkfifo(file) if content is None else file.write_bytes(content)
                with pytest.raises(ValueError, match=text):
                    check_folder(str(folder), files, None)
                is_shorter = content is None or len(content) < len(whole)
                assert (damage_in(str(folder), files, reads_all=False) is not None) == is_shorter
        file.unlink()
        file.write_bytes(whole)
    with pytest.raises(ValueError, match="unreadable"):
        check_folder(str(folder), files, None, "unreadable")


def save(rank: int, world: int, path: str) -> None:
    fit_family(rank, ShardedModule(optimizer="Adam"), callbacks=[SaveEvery(5, path)])


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "run.ckpt"
    Path(f"{path}.loco").write_text("not a folder")
    with pytest.raises(PoolError) as error:
        pool.run(save, str(path), world=4)
    assert len(error.value.failures) == 4
    for failure in error.value.failures.values():
        assert "cannot be written" in failure.message
    assert not path.exists()


def test_the_names_of_shards_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash after the save is committed loses none of them."""
    synced: list[tuple[str, int]] = []
    sync = os.fsync

    def note_sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path, len(os.listdir(path)) if os.path.isdir(path) else 0))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note_sync)
    folder = tmp_path / "saves" / "shards"
    files = write_folder({"step": torch.tensor(1)}, str(folder), None)
    assert sorted(os.listdir(folder)) == sorted(files)
    assert {(str(tmp_path), 1), (str(folder.parent), 1)} <= {*synced}
    assert synced[-1] == (str(folder), len(files))


def test_a_folder_of_something_else_is_not_replaced(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "folder.ckpt"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(PoolError, match="Is a directory"):
        pool.run(save, str(path), world=4)
    assert [file.name for file in path.iterdir()] == ["notes.txt"]


def fit_with_addresses(rank: int, world: int, kept: str, refused: str) -> None:
    """Save to and resume from an address of a file system; other addresses are refused."""
    save(rank, world, kept)
    trainer = fit_family(rank, ShardedModule(optimizer="Adam"), ckpt_path=kept)
    with pytest.raises(ValueError, match=f"{refused}.* is not on a file system"):
        trainer.save_checkpoint(refused)
    callback = ModelCheckpoint(dirpath=os.path.dirname(refused))
    with pytest.raises(ValueError, match="is not on a file system"):
        fit_family(rank, ShardedModule(), callbacks=[callback], enable_checkpointing=True)


def test_addresses_that_are_not_on_a_file_system_are_refused(pool: Pool, tmp_path: Path) -> None:
    kept = f"file://{tmp_path}/folder.ckpt"
    pool.run(fit_with_addresses, kept, "memory://folder/one.ckpt", world=4)
    assert (tmp_path / "folder.ckpt" / "meta.pt").is_file()
