"""A resumed run continues in its data, even if loaders are made before the checkpoint is read."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import DiLoCoStrategy
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, make_loader
from tests.strategies.families import FAMILIES, Family, ShardedModule, Sizes, as_pair, fit_with
from tests.strategies.save_and_resume import SaveAt, recorded_warnings

pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
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
        FAMILIES[name].strategy(timeout_s=30),
        module,
        loader,
        ckpt_path=ckpt_path,
        max_epochs=3,
        callbacks=[save],
        enable_checkpointing=True,
        use_distributed_sampler=True,
    )
    return module.seen


@pytest.mark.parametrize("name", ["rounds", "remote"])
@pytest.mark.parametrize("asks", [False, True])
def test_the_position_in_the_data(pool: Pool, tmp_path: Path, name: str, asks: bool) -> None:
    world, path = FAMILIES[name].world, str(tmp_path)
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
            DiLoCoStrategy(sync_every=3, timeout_s=30),
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
            DiLoCoStrategy(sync_every=3, timeout_s=30),
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
                DiLoCoStrategy(sync_every=3, timeout_s=30),
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


# ------------------------------------------------------- other numbers of workers or ranks

SAMPLES = 24
Division = tuple[int, Sizes]
"""The number of workers, and the ranks of each."""
Read = list[list[tuple[int, int]]]


class Reading(ShardedModule):
    """Records the epoch and the number of each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (samples,) = batch
        self.seen += [(self.current_epoch, int(sample)) for sample in samples]
        inputs = samples.view(-1, 1).expand(-1, 3) / SAMPLES
        return super().training_step((inputs, inputs[:, 0]), batch_idx)


class SaveAndStop(SaveAt):
    """Saves at a point, and ends the run."""

    def save(self, trainer: pl.Trainer, hook: str) -> None:
        super().save(trainer, hook)
        trainer.should_stop |= f"{hook} {trainer.global_step}" in self.points


def read_part(
    rank: int, world: int, sizes: Sizes, folder: str, point: str, resume: str | None
) -> list[tuple[int, int]]:
    """Return the epochs and samples that this rank trains on, up to a point."""
    os.chdir(folder)
    module = Reading()
    data = TensorDataset(torch.arange(float(SAMPLES), dtype=torch.float64))
    with recorded_warnings():
        fit_with(
            Family(functools.partial(DiLoCoStrategy, sync_every=2), sizes).strategy(timeout_s=30),
            module,
            StatefulDataLoader(data, batch_size=1),
            ckpt_path=resume,
            max_epochs=2,
            callbacks=[SaveAndStop(point)],
            use_distributed_sampler=True,
        )
    return module.seen


def readers_of(division: Division) -> tuple[int, int]:
    """Return the number of ranks that read different data, and how many read the same."""
    workers, (data, tensor) = division[0], as_pair(division[1])
    return workers * data, tensor


@pytest.fixture(scope="module")
def half(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Division], tuple[Path, Read]]:
    """Return the checkpoint after half of an epoch, and the samples that each rank has read."""

    @functools.cache
    def read_half(division: Division) -> tuple[Path, Read]:
        readers, same = readers_of(division)
        folder, steps = tmp_path_factory.mktemp("half"), SAMPLES // 2 // readers
        point, world = f"batch {steps}", readers * same
        seen = pool.run(read_part, division[1], str(folder), point, None, world=world)
        assert [len(one) for one in seen] == [steps] * world
        return folder / f"{point}.ckpt", seen[::same]

    return read_half


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((2, 2), (2, 1)),
        ((2, 2), (1, 4)),
        ((2, 2), (3, 1)),
        ((1, 1), (2, 2)),
        ((1, 3), (1, 1)),
        ((2, (2, 1)), (2, (2, 1))),
        ((2, (2, 1)), (2, (1, 2))),
        ((2, (2, 1)), (1, (4, 1))),
        ((2, (2, 1)), (1, (2, 2))),
    ],
    ids=str,
)
def test_no_sample_is_skipped_or_repeated(
    pool: Pool,
    half: Callable[[Division], tuple[Path, Read]],
    tmp_path: Path,
    before: Division,
    now: Division,
) -> None:
    """Half of an epoch is read before the number of ranks changes, half after it."""
    path, first = half(before)
    readers, same = readers_of(now)
    arguments = now[1], str(tmp_path), "", str(path)
    ranks = pool.run(read_part, *arguments, world=readers * same)
    for rank, seen in enumerate(ranks):
        assert seen == ranks[rank - rank % same]
    then = ranks[::same]
    for epoch, runs in ((0, [*first, *then]), (1, then)):
        samples = sorted(sample for seen in runs for at, sample in seen if at == epoch)
        assert len(samples) == SAMPLES
        if epoch == 1 or 1 not in (len(first), readers):  # a single rank draws another order
            assert samples == list(range(SAMPLES))
