"""A resumed run continues in its data, even if loaders are made before the checkpoint is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.strategies.registry import METHODS
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, make_loader
from tests.strategies.families import fit_with
from tests.strategies.save_and_resume import SaveAt, recorded_warnings

pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),
]
SAVED_AT = 10
"""In the middle of the second epoch."""


class RecordingModule(TinyModule):
    """Records the batches that it reads; needs the number of steps, like OneCycle schedules."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(float(batch[0].sum()))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.asks:
            assert self.trainer.estimated_stepping_batches == 21
        return super().configure_optimizers()


def read(
    rank: int, world: int, name: str, asks: bool, folder: str, ckpt_path: str | None = None
) -> list[float]:
    """Return the batches that a worker reads in three epochs, optionally from a checkpoint."""
    module = RecordingModule(asks)
    generator = torch.Generator().manual_seed(0)
    inputs, target = (
        torch.randn(28, *shape, generator=generator, dtype=torch.float64) for shape in ((3,), ())
    )
    loader = StatefulDataLoader(TensorDataset(inputs, target), batch_size=2)
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    fit_with(
        RemoteOptimizerStrategy(2, timeout_s=30)
        if name == "remote_optimizer"
        else METHODS[name](sync_every=4, timeout_s=30),
        module,
        loader,
        ckpt_path=ckpt_path,
        max_epochs=3,
        callbacks=[save],
        enable_checkpointing=True,
        use_distributed_sampler=True,
    )
    return module.seen


@pytest.mark.parametrize("name", ["diloco", "remote_optimizer"])
@pytest.mark.parametrize("asks", [False, True])
def test_the_position_in_the_data(pool: Pool, tmp_path: Path, name: str, asks: bool) -> None:
    world, path = 3 if name == "remote_optimizer" else 2, str(tmp_path)
    saved = f"{path}/step={SAVED_AT}.ckpt"
    first = pool.run(read, name, asks, path, world=world)[:2]
    second = pool.run(read, name, asks, path, saved, world=world)[:2]
    for uninterrupted, resumed in zip(first, second, strict=True):
        assert len(uninterrupted) == 21
        assert resumed == uninterrupted[SAVED_AT:]


class Numbers(IterableDataset[Tensor]):
    """Every second number from ``first`` on, without a length; has a state with its position."""

    def __init__(self, first: int) -> None:
        self.first, self.position = first, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 14:
            self.position += 1
            yield torch.tensor(float(self.first + 2 * (self.position - 1)))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class NumberModule(TinyModule):
    """Records the numbers that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.read += batch.tolist()
        return self.model(torch.zeros(1, 3, dtype=torch.float64)).square().sum()


SAVES = ["start 0", "batch 1", "batch 3", "batch 7", "epoch 7", "start 7", "batch 8", "batch 13"]


def read_numbers(rank: int, world: int, folder: str) -> list[list[float]]:
    """Read two epochs of seven batches; then again from each checkpoint."""
    os.chdir(folder)
    found = []
    for point in ("", *SAVES):
        module = NumberModule()
        fit_with(
            METHODS["diloco"](sync_every=3, timeout_s=30),
            module,
            StatefulDataLoader(Numbers(rank), batch_size=2),
            ckpt_path=f"{point}.ckpt" if point else None,
            max_epochs=2,
            callbacks=[] if point else [SaveAt(*SAVES)],
        )
        found.append(module.read)
    return found


def test_data_without_length_resume_at_the_next_batch(
    pool: Pool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Lightning prefetches one batch, which has not been trained on when the state is saved."""
    for rank, (whole, *resumed) in enumerate(pool.run(read_numbers, str(tmp_path), world=2)):
        assert whole == [rank + 2.0 * n for n in range(14)] * 2
        for point, again in zip(SAVES, resumed, strict=True):
            with subtests.test(f"worker {rank} from {point}"):
                assert again == whole[2 * int(point.split()[1]) :]


class ChangingData(pl.LightningDataModule):
    """Creates different data whenever the loaders are created."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def _loader(self, kind: str) -> DataLoader[Any]:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        self.made.append((kind, epoch))
        return make_loader(epoch, 2 + epoch % 2)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val")


def reload_data(
    rank: int, world: int, folder: str, every: int
) -> list[tuple[list[float], list[float]]]:
    """Return the data of six epochs for training and validation, and again from the end of each."""
    os.chdir(folder)
    found = []
    for point in ("", *(f"epoch={epoch}.ckpt" for epoch in range(5))):
        module = RecordingValidation()
        save = ModelCheckpoint(
            folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True, every_n_epochs=1
        )
        trainer = make_trainer(
            METHODS["diloco"](sync_every=3, timeout_s=30),
            max_epochs=6,
            reload_dataloaders_every_n_epochs=every,
            check_val_every_n_epoch=3,
            enable_checkpointing=not point,
            callbacks=[] if point else [save],
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=ChangingData(), ckpt_path=point or None)
        found.append((module.seen, module.validated))
    return found


class RecordingValidation(RecordingModule):
    """Also records the data of validations."""

    def __init__(self) -> None:
        super().__init__(asks=False)
        self.validated: list[float] = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(float(batch[0].sum()))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_data_are_made_again_in_the_same_epochs(
    pool: Pool, tmp_path: Path, every: int, subtests: pytest.Subtests
) -> None:
    ((whole, *resumed),) = pool.run(reload_data, str(tmp_path), every, world=1)
    for epoch, again in enumerate(resumed):
        with subtests.test(f"after epoch {epoch}"):
            for uninterrupted, rest in zip(whole, again, strict=True):
                assert rest == uninterrupted[len(uninterrupted) - len(rest) :]
            length = sum(2 + (e - e % every) % 2 for e in range(epoch + 1, 6))
            assert len(again[0]) == length


def change_data(rank: int, world: int, folder: str) -> list[list[str]]:
    """Resume with the same data, with another seed, and with fewer samples."""
    os.chdir(folder)
    warned = []
    for seed, size, path in ((1, 24, None), *((s, n, "batch 3.ckpt") for s, n in AGAIN)):
        os.environ["PL_GLOBAL_SEED"] = str(seed)
        inputs = torch.randn(size, 3, dtype=torch.float64)
        data = TensorDataset(inputs, inputs.sum(1))
        with recorded_warnings() as found:
            fit_with(
                METHODS["diloco"](sync_every=3, timeout_s=30),
                TinyModule(),
                StatefulDataLoader(data, batch_size=2),
                ckpt_path=path,
                max_epochs=1,
                callbacks=[] if path else [SaveAt("batch 3")],
                use_distributed_sampler=True,
            )
        warned.append(found)
    return warned[1:]


AGAIN = [(1, 24), (2, 24), (1, 20)]


def test_other_data_are_warned_of(pool: Pool, tmp_path: Path) -> None:
    (same, seed, size), _ = pool.run(change_data, str(tmp_path), world=2)
    assert same == []
    assert len(size) == 1
    assert "the training data have 20 samples and had 24" in size[0]
    assert len(seed) == 1
    assert "the order of seed 2 and were in the order of seed 1: call seed_everything(1)" in seed[0]
