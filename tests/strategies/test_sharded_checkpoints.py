"""Checkpoints of workers whose ranks shard the model: exact resume, also with other ranks."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import DiLoCoStrategy, LocoModelParallelStrategy
from lightning_loco.compression import ErrorFeedback, Int8
from lightning_loco.strategies.checkpoint.shard_folder import check_folder, damage_in, write_folder
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import loss_of
from tests.strategies.families import (
    Batches,
    HybridModule,
    Run,
    ShardedModule,
    loaders,
    whole,
)

STEPS = 12
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The checkpoint was written by"),
]


class SaveAfter(pl.Callback):
    """Saves a checkpoint after a given number of batches."""

    def __init__(self, path: str, batches: int) -> None:
        self.path, self.batches = path, batches
        self.params: Tensor | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == self.batches:
            trainer.save_checkpoint(self.path)
            trainer.save_checkpoint(self.path)  # replaces the previous one
            self.params = whole(module)


class StateAtStart(pl.Callback):
    """Records the worker's parameters at the start of training."""

    params: Tensor | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if self.params is None:
            self.params = whole(module)


def fit(
    rank: int,
    world: int,
    method: str,
    sizes: tuple[int, int],
    path: str,
    save_after: int | None,
    arguments: dict[str, Any],
    make_module: Callable[..., ShardedModule] = ShardedModule,
) -> dict[str, Any]:
    data, tensor = sizes
    recipe = Run(method, {"timeout_s": 30, **arguments}).strategy(None)
    strategy = LocoModelParallelStrategy(
        recipe, data, tensor, save_distributed_checkpoint=path.endswith("folder.ckpt")
    )
    worker, place = divmod(rank, data * tensor)
    parts = [0, 1] if data == 1 else [place // tensor]
    start, save = StateAtStart(), SaveAfter(path, save_after or -1)
    callbacks, resumes = [start, save], save_after is None
    trainer = make_trainer(
        strategy, max_epochs=1, use_distributed_sampler=False, callbacks=callbacks
    )
    torch.manual_seed(rank)
    module = make_module(optimizer="Adam")
    loader = StatefulDataLoader(Batches(worker, parts, STEPS), batch_size=None)
    trainer.fit(module, loader, ckpt_path=path if resumes else None)
    return {
        "params": whole(module),
        "start": start.params,
        "saved": save.params,
        "steps": trainer.global_step,
        "without_state": sum(
            not trainer.optimizers[0].state.get(parameter) for parameter in module.parameters()
        ),
    }


FEEDBACK = {"compression": ErrorFeedback(Int8(8))}


@pytest.mark.parametrize(
    ("method", "sizes", "save_after", "arguments"),
    [
        ("local_sgd", (2, 1), 5, {}),
        ("diloco", (2, 1), 7, FEEDBACK),
        ("diloco", (1, 2), 7, {}),
        ("async_diloco", (2, 1), 7, {}),
        ("async_diloco of fragments", (1, 2), 7, {}),
        ("streaming_diloco", (2, 1), 6, {}),
        ("gasloc", (2, 1), 7, {}),
        ("noloco", (1, 2), 7, {}),
    ],
)
def test_a_resumed_run_equals_an_unbroken_one(
    pool: Pool,
    tmp_path: Path,
    method: str,
    sizes: tuple[int, int],
    save_after: int,
    arguments: dict[str, Any],
) -> None:
    path = str(tmp_path / ("folder.ckpt" if sizes == (2, 1) else "file.ckpt"))
    unbroken = pool.run(fit, method, sizes, path, save_after, arguments, world=4)
    resumed = pool.run(fit, method, sizes, path, None, arguments, world=4)
    for before, after in zip(unbroken, resumed, strict=True):
        assert torch.equal(before["params"], after["params"])
        assert before["steps"] == after["steps"] == STEPS


class PartlyUsed(nn.Sequential):
    """Does not use the layer ``unused``."""

    def forward(self, inputs: Tensor) -> Tensor:
        for name, layer in self.named_children():
            inputs = inputs if name == "unused" else layer(inputs)
        return inputs


class WithUnused(ShardedModule):
    """Has a layer without gradients, so that Adam has no state for it."""

    def build(self) -> nn.Module:
        model = PartlyUsed(*super().build())
        model.register_module("unused", nn.Linear(4, 4))
        return model

    def shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model[0], mesh=mesh)
        fully_shard(self.model.unused, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


@pytest.mark.parametrize("name", ["folder.ckpt", "file.ckpt"])
def test_a_parameter_without_a_gradient_does_not_prevent_a_resume(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    path = str(tmp_path / name)
    unbroken = pool.run(fit, "diloco", (2, 1), path, 7, {}, WithUnused, world=4)
    resumed = pool.run(fit, "diloco", (2, 1), path, None, {}, WithUnused, world=4)
    for before, after in zip(unbroken, resumed, strict=True):
        assert torch.equal(before["params"], after["params"])
        assert before["without_state"] == after["without_state"] == 2


def fit_twice(rank: int, world: int, path: str, new_module: bool) -> Tensor:
    """Train, and then resume with the same module, which still has gradients."""
    module = ShardedModule(optimizer="Adam")
    for ckpt_path in (None, path):
        callback = SaveAfter(path, -1 if ckpt_path else 7)
        trainer = make_trainer(
            LocoModelParallelStrategy(DiLoCoStrategy(sync_every=3, timeout_s=30), 2, 1),
            max_epochs=1,
            use_distributed_sampler=False,
            callbacks=[callback],
        )
        loader = StatefulDataLoader(Batches(rank // 2, [rank % 2], STEPS), batch_size=None)
        if ckpt_path:
            assert any(parameter.grad is not None for parameter in module.parameters())
            module = ShardedModule(optimizer="Adam") if new_module else module
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return whole(module)


def test_a_module_with_gradients_resumes_as_a_new_one_does(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "folder.ckpt")
    new, same = (pool.run(fit_twice, path, one, world=4) for one in (True, False))
    assert all(map(torch.equal, new, same))


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
    path = str(tmp_path / name)
    with nullcontext(pool) if num_workers == 1 else closing(Pool(8)) as ranks:

        def run(copies: bool, save_after: int | None) -> list[dict[str, Any]]:
            module = HybridModule if copies else ShardedModule
            size = 4 if copies else 2
            arguments = "gasloc", (size, 1), path, save_after, {}, module
            return ranks.run(fit, *arguments, world=num_workers * size)

        saved, resumed, without = run(True, 7), run(True, None), run(False, None)
        for before, after in zip(saved, resumed, strict=True):
            assert torch.equal(before["params"], after["params"])
        run(False, 7)
        others = [(resumed, without), (run(True, None), run(False, None))]
    for with_copies, of_two in others:
        for worker in range(num_workers):
            one, other = with_copies[4 * worker], of_two[2 * worker]
            assert torch.equal(one["start"], other["start"])
            assert one["steps"] == other["steps"] == STEPS


def start_plainly(rank: int, world: int, path: str) -> Tensor:
    """Load a checkpoint with Lightning's own strategy."""
    strategy = ModelParallelStrategy(world, 1)
    start = StateAtStart()
    trainer = make_trainer(strategy, max_steps=9, use_distributed_sampler=False, callbacks=[start])
    module = ShardedModule(optimizer="Adam")
    loader = StatefulDataLoader(Batches(0, [rank % 2], STEPS), batch_size=None)
    trainer.fit(module, loader, ckpt_path=path)
    assert start.params is not None
    return start.params


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
    saved = pool.run(fit, method, (2, 1), path, 7, {}, world=4)
    same = pool.run(fit, method, (2, 1), path, None, {}, world=4)
    for sizes, world in (((1, 2), 4), ((1, 1), 2)):
        found = pool.run(fit, method, sizes, path, None, {}, world=world)
        ranks_per_worker = sizes[0] * sizes[1]
        for rank, result in enumerate(found):
            of_same = same[rank // ranks_per_worker * 2]
            assert torch.equal(result["start"], of_same["start"])
            torch.testing.assert_close(result["params"], of_same["params"], rtol=0, atol=1e-11)
    one, *_ = pool.run(fit, method, (4, 1), path, None, {}, world=4)
    assert one["steps"] == saved[0]["steps"]
    plain = pool.run(start_plainly, path, world=2)[0]
    if name == "file.ckpt":
        consensus = torch.load(path, weights_only=True)["state_dict"]
        assert torch.equal(plain, torch.cat([value.reshape(-1) for value in consensus.values()]))
    else:
        mean = (saved[0]["saved"] + saved[2]["saved"]) / 2
        torch.testing.assert_close(plain, mean, rtol=0, atol=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_run_goes_on_with_shards_of_another_number(
    tmp_path: Path, before: int, after: int
) -> None:
    """The shards of the two workers have unequal sizes afterwards."""
    path = str(tmp_path / "folder.ckpt")
    with closing(Pool(6)) as ranks:
        saved = ranks.run(fit, "diloco", (before, 1), path, 7, {}, world=2 * before)
        same, other = (
            ranks.run(fit, "diloco", (size, 1), path, None, {}, world=2 * size)
            for size in (before, after)
        )
    for worker in range(2):
        one, another = same[before * worker], other[after * worker]
        assert torch.equal(one["start"], another["start"])
        assert one["steps"] == another["steps"] == saved[0]["steps"]


class Evaluated(ShardedModule):
    """Uses SGD without momentum, which has no state."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", loss_of(self.model, batch), sync_dist=True)


def fit_and_test(rank: int, world: int, path: str) -> list[float]:
    strategy = LocoModelParallelStrategy(
        DiLoCoStrategy(sync_every=3), 2, 1, save_distributed_checkpoint="folder" in path
    )
    trainer = make_trainer(
        strategy, max_epochs=1, use_distributed_sampler=False, callbacks=[SaveAfter(path, STEPS)]
    )
    module, (train, data) = Evaluated(), loaders(rank, Run(), (2, 1))
    trainer.fit(module, train)
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


def flip(file: Path) -> Path:
    """Flip one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def fit_where_one_has_no_folder(rank: int, world: int, path: str) -> None:
    place = Path(path)
    own = place.parent / "elsewhere" / place.name if rank == 3 else place
    fit(rank, world, "diloco", (2, 1), str(own), None, {})


def test_damaged_shards_are_refused_and_an_intact_checkpoint_is_named(
    pool: Pool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    path, other = tmp_path / "folder.ckpt", tmp_path / "older_folder.ckpt"
    pool.run(fit, "diloco", (2, 1), str(path), 5, {}, world=4)
    (save,) = Path(f"{path}.loco").iterdir()

    def exchange_workers() -> Path:
        first, second = (save / f"shards_worker_0000{n}" for n in range(2))
        first.rename(save / "first")
        second.rename(first)
        (save / "first").rename(second)
        return first / ".metadata"

    def delete(file: Path) -> Path:
        file.unlink()
        return file

    def of_another_save() -> Path:
        pool.run(fit, "diloco", (2, 1), str(path), 6, {}, world=4)
        (present,) = Path(f"{path}.loco").iterdir()
        shutil.rmtree(present / "shards_worker_00001")
        shutil.copytree(
            f"{other}.loco/{save.name}/shards_worker_00001", present / "shards_worker_00001"
        )
        return present / "shards_worker_00001" / ".metadata"

    for place in path, Path(f"{path}.loco"):
        shutil.copytree(place, str(place).replace("folder", "older_folder"), symlinks=True)
    for name, damage in {
        "a bit of the main folder": lambda: flip(path / "__1_0.distcp"),
        "a bit of a worker": lambda: flip(save / "shards_worker_00001" / "__0_0.distcp"),
        "a bit of what all share": lambda: flip(save / "shards_shared" / "__0_0.distcp"),
        "exchanged workers": exchange_workers,
        "another save": of_another_save,
        "a missing description": lambda: delete(path / ".metadata"),
        "a missing file of the rest": lambda: delete(path / "meta.pt"),
    }.items():
        with subtests.test(name):
            file = damage()
            with pytest.raises(PoolError) as error:
                pool.run(fit, "diloco", (2, 1), str(path), None, {}, world=4)
            assert len(error.value.failures) == 4
            for failure in error.value.failures.values():
                assert failure.type_name == "ValueError"
                assert str(file.parent.parent) in failure.message
                assert f"Go on from {other}, the newest" in failure.message
            assert any(str(file) in failure.message for failure in error.value.failures.values())
            for place in path, Path(f"{path}.loco"):
                shutil.rmtree(place)
                kept = str(place).replace("folder", "older_folder")
                shutil.copytree(kept, place, symlinks=True)
    with subtests.test("one rank does not see the folder"):
        with pytest.raises(PoolError) as error:
            pool.run(fit_where_one_has_no_folder, str(path), world=4)
        messages = [failure.message for failure in error.value.failures.values()]
        assert len(messages) == 4
        for message in messages:
            assert f"There is no checkpoint {tmp_path / 'elsewhere'}" in message
    with subtests.test("the other one is damaged, too"):
        (other / "meta.pt").resolve().write_bytes(b"")
        flip(path / "__1_0.distcp")
        with pytest.raises(PoolError, match="No other checkpoint in .* is intact"):
            pool.run(fit, "diloco", (2, 1), str(path), None, {}, world=4)


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


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "run.ckpt"
    Path(f"{path}.loco").write_text("not a folder")
    with pytest.raises(PoolError) as error:
        pool.run(fit, "diloco", (2, 1), str(path), 5, {}, world=4)
    assert len(error.value.failures) == 4
    for failure in error.value.failures.values():
        assert "cannot be written" in failure.message
    assert not path.exists()


def test_a_folder_of_something_else_is_not_replaced(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "folder.ckpt"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(PoolError, match="Is a directory"):
        pool.run(fit, "diloco", (2, 1), str(path), 5, {}, world=4)
    assert [file.name for file in path.iterdir()] == ["notes.txt"]


def fit_with_addresses(rank: int, world: int, kept: str, refused: str) -> None:
    """Save to and resume from an address of a file system; other addresses are refused."""
    for ckpt_path in (None, kept):
        trainer = make_trainer(
            LocoModelParallelStrategy(DiLoCoStrategy(sync_every=3, timeout_s=30), 2, 1),
            max_epochs=1,
            use_distributed_sampler=False,
            callbacks=[SaveAfter(kept, -1 if ckpt_path else 5)],
        )
        loader = StatefulDataLoader(Batches(rank // 2, [rank % 2], STEPS), batch_size=None)
        trainer.fit(ShardedModule(optimizer="Adam"), loader, ckpt_path=ckpt_path)
    with pytest.raises(ValueError, match=f"{refused}.* is not on a file system"):
        trainer.save_checkpoint(refused)
    callback = ModelCheckpoint(dirpath=os.path.dirname(refused))
    trainer = make_trainer(
        LocoModelParallelStrategy(DiLoCoStrategy(sync_every=3, timeout_s=30), 2, 1),
        max_epochs=1,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        callbacks=[callback],
    )
    with pytest.raises(ValueError, match="is not on a file system"):
        trainer.fit(ShardedModule(optimizer="Adam"), loader)


def test_addresses_that_are_not_on_a_file_system_are_refused(pool: Pool, tmp_path: Path) -> None:
    kept = f"file://{tmp_path}/folder.ckpt"
    pool.run(fit_with_addresses, kept, "memory://folder/one.ckpt", world=4)
    assert (tmp_path / "folder.ckpt" / "meta.pt").is_file()


def fit_whole(rank: int, world: int, path: str, save_after: int | None) -> int:
    """Train with the same method, with ranks that hold the whole model."""
    strategy = DiLoCoStrategy(sync_every=3, replica_size=2, timeout_s=30)
    callbacks = [SaveAfter(path, save_after)] if save_after is not None else []
    trainer = make_trainer(
        strategy, max_epochs=1, use_distributed_sampler=False, callbacks=callbacks
    )
    loader = StatefulDataLoader(Batches(rank // 2, [rank % 2], STEPS), batch_size=None)
    ckpt_path = path if save_after is None else None
    trainer.fit(ShardedModule(optimizer="Adam"), loader, ckpt_path=ckpt_path)
    return int(trainer.global_step)


def test_states_of_shards_and_of_whole_models_are_not_mixed(pool: Pool, tmp_path: Path) -> None:
    sharded, of_whole = str(tmp_path / "shards.ckpt"), str(tmp_path / "whole.ckpt")
    pool.run(fit, "diloco", (2, 1), sharded, 5, {}, world=4)
    with pytest.raises(PoolError, match="was written by LocoModelParallelStrategy"):
        pool.run(fit_whole, sharded, None, world=4)
    pool.run(fit_whole, of_whole, 5, world=4)
    with pytest.raises(PoolError, match="written by workers whose ranks hold the whole model"):
        pool.run(fit, "diloco", (2, 1), of_whole, None, {}, world=4)
    Path(f"{sharded}.loco").rename(tmp_path / "elsewhere")
    with pytest.raises(PoolError, match="does not exist"):
        pool.run(fit, "diloco", (2, 1), sharded, None, {}, world=4)


NUM_SAMPLES = 48


class Reading(ShardedModule):
    """Records the samples that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        self.read += inputs[:, 0].int().tolist()
        return super().training_step((inputs / NUM_SAMPLES, targets / NUM_SAMPLES), batch_idx)


def read_samples(
    rank: int, world: int, sizes: tuple[int, int], path: str, save_after: int | None
) -> list[int]:
    strategy = LocoModelParallelStrategy(DiLoCoStrategy(sync_every=2, timeout_s=30), *sizes)
    numbers = torch.arange(NUM_SAMPLES, dtype=torch.float64)
    dataset = TensorDataset(numbers[:, None].expand(-1, 3), numbers)
    trainer = make_trainer(
        strategy,
        max_epochs=1,
        max_steps=save_after or -1,
        callbacks=[SaveAfter(path, save_after or -1)],
    )
    module = Reading()
    ckpt_path = path if save_after is None else None
    loader = StatefulDataLoader(dataset, batch_size=2)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module.read


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (4, 1), (2, 2)])
def test_no_sample_is_read_twice_if_the_number_of_readers_changes(
    pool: Pool, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    path = str(tmp_path / "folder.ckpt")
    first = pool.run(read_samples, (2, 1), path, 3, world=4)
    then = pool.run(read_samples, sizes, path, None, world=4)
    read = [samples for rank, samples in enumerate(then) if rank % sizes[1] == 0]
    for rank, samples in enumerate(then):
        assert samples == then[rank - rank % sizes[1]]
    assert sorted(sum(first + read, [])) == list(range(NUM_SAMPLES))
