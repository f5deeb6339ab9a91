"""Rows: data and loaders."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from tests.lightning_matrix.row_run import (
    BATCHES,
    EPOCHS,
    WORKERS,
    Facts,
    Model,
    RowRun,
    loader,
    samples,
)
from tests.lightning_matrix.trainer_rows import fit


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """Samples of one worker, in a dataset without a length.

    Args:
        number: Number of samples.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        yield from (sample for sample, _ in zip(samples(64), range(self.number), strict=False))


def fit_on(run: RowRun, data: Any, module: Model | None = None, **settings: Any) -> Facts:
    module = module or Model()
    trainer = run.trainer(**settings)
    trainer.fit(module, data)
    return run.facts(trainer, module)


def iterable(run: RowRun) -> Facts:
    return fit_on(run, DataLoader(Stream(2 * BATCHES), batch_size=2))


def iterable_with_max_steps(run: RowRun) -> Facts:
    return fit_on(run, DataLoader(Stream(2 * BATCHES), batch_size=2), max_epochs=-1, max_steps=6)


class OnBoth(Model):
    """Trains on a dictionary of two batches."""

    def loss(self, batch: Any) -> Tensor:
        return sum(super(OnBoth, self).loss(one) for one in batch.values() if one is not None)


def combined_loader(run: RowRun) -> Facts:
    loaders = {"long": loader(), "short": loader(8, 2)}
    return fit_on(run, CombinedLoader(loaders, mode="max_size_cycle"), OnBoth())


def dict_of_loaders(run: RowRun) -> Facts:
    return fit_on(run, {"long": loader(), "short": loader(8, 2)}, OnBoth())


class Sequential(Model):
    """Trains on batches of one loader after the other."""

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.calls[f"from loader {dataloader_idx}"] += 1
        return super().training_step(batch, batch_idx)


def loaders_in_sequence(run: RowRun) -> Facts:
    loaders = CombinedLoader([loader(), loader(8, 2)], mode="sequential")
    return fit_on(run, loaders, Sequential())


class SeveralValidations(Model):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.calls[f"validated loader {dataloader_idx}"] += 1
        super().validation_step(batch, batch_idx)


def validation_loaders(run: RowRun) -> Facts:
    module, trainer = SeveralValidations(), run.trainer()
    trainer.fit(module, loader(), [loader(8, 1), loader(4, 2)])
    return run.facts(trainer, module, metrics=sorted(trainer.callback_metrics))


def own_batch_sampler(run: RowRun) -> Facts:
    data = samples()
    batches = BatchSampler(RandomSampler(data), batch_size=4, drop_last=False)
    own = DataLoader(data, batch_sampler=batches)
    return fit_on(run, own, use_distributed_sampler=False)


def own_distributed_sampler(run: RowRun) -> Facts:
    rank = min(run.rank, WORKERS - 1)
    sampler = DistributedSampler(samples(), WORKERS, rank, shuffle=True, seed=1)
    return fit_on(run, DataLoader(samples(), batch_size=2, sampler=sampler))


def weighted_sampler(run: RowRun) -> Facts:
    sampler = WeightedRandomSampler([1.0] * len(samples()), len(samples()))
    return fit_on(run, DataLoader(samples(), batch_size=2, sampler=sampler))


class RecordsSamples(Model):
    """Records which samples it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].sum(1).tolist()
        return super().training_step(batch, batch_idx)


def shuffled(run: RowRun) -> Facts:
    module, trainer = RecordsSamples(), run.trainer()
    trainer.fit(module, loader(shuffle=True))
    return run.facts(trainer, module, distinct=len({round(one, 4) for one in module.seen}))


def drop_last(run: RowRun) -> Facts:
    return fit_on(run, loader(15, drop_last=True))


def worker_processes(run: RowRun) -> Facts:
    """Train with a forked loader process.

    Before the fork, garbage is collected: the child process lacks the threads of a destroyed
    process group that an earlier run's trainer may still reference.
    """
    gc.collect()
    return fit_on(run, loader(num_workers=1, multiprocessing_context="fork"))


def uneven_loader(run: RowRun) -> Any:
    """Return four batches for the first worker, six for the second."""
    return loader(8 if run.worker == 0 else 12)


def fit_uneven(run: RowRun, module: Model) -> Facts:
    facts = fit_on(run, uneven_loader(run), module, use_distributed_sampler=False)
    return {"all data": facts.get("training_step") == EPOCHS * len(uneven_loader(run))}


def uneven(run: RowRun) -> Facts:
    return fit_uneven(run, Model())


class Metric(Model):
    """Computes a metric over all workers at the end of an epoch with direct collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.error.update(self(batch[0]).detach(), batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.calls["finite metrics"] += int(torch.isfinite(self.error.compute()))
        self.error.reset()


class LoggedMetric(Metric):
    """Logs the same metric with ``self.log``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("error", self.error, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.calls["on_train_epoch_end"] += 1


class Barrier(Model):
    """Calls torch's barrier in a hook."""

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        dist.barrier()


def metric(run: RowRun) -> Facts:
    return fit(run, Metric())


def logged_metric(run: RowRun) -> Facts:
    return fit(run, LoggedMetric())


def uneven_metric(run: RowRun) -> Facts:
    return fit_uneven(run, Metric())


def barrier(run: RowRun) -> Facts:
    return fit(run, Barrier())


def uneven_barrier(run: RowRun) -> Facts:
    return fit_uneven(run, Barrier())
