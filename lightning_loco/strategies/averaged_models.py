"""Averaged copies of the model that callbacks keep: weight averaging, EMA, SWA."""

from __future__ import annotations

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_loco.comm import WorkerGroup
from lightning_loco.comm.fingerprint import fingerprints
from lightning_loco.strategies import lightning_private
from lightning_loco.strategies.driven import Engine


def averaged_models(trainer: pl.Trainer) -> list[nn.Module]:
    """Every ``AveragedModel`` that is an attribute of a callback, and the average of SWA."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found: list[nn.Module] = []
    for callback in callbacks:
        found += [value for value in vars(callback).values() if isinstance(value, AveragedModel)]
        if isinstance(callback, StochasticWeightAveraging):
            found += lightning_private.average_of(callback)
    return found


def share_complete_averages(trainer: pl.Trainer, group: WorkerGroup) -> None:
    """Give all workers the averages of the one that has updated them most often, if they differ.

    For workers whose parameters are the same: who has had fewer batches has missed some of them.
    """
    models = averaged_models(trainer)
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    updates = [int(getattr(model, "n_averaged", 0)) for model in models]
    everyone = group.gather_objects([updates, fingerprints(tensors)], "the averaged models")
    if all(one == everyone[0] for one in everyone):
        return
    source = max(range(group.num_workers), key=lambda worker: everyone[worker][0])
    for tensor in tensors:
        sent = tensor.detach().to(trainer.strategy.root_device).contiguous()
        dist.broadcast(sent, source, group.data)
        tensor.detach().copy_(sent)


def finish_with_averages(engine: Engine, trainer: pl.Trainer, *, keeps_local: bool) -> None:
    """End the training of an engine, before callbacks write their final weights into the model.

    An average that is in the model already stays there, as that of all workers: SWA puts it there
    one epoch early, to renew the statistics of BatchNorm with it.

    Args:
        engine: Of this worker.
        trainer: With the callbacks and the module.
        keeps_local: Whether to leave this worker's own parameters in the model.
    """
    in_place = _averages_in_place(trainer)
    if in_place:
        engine.worker.show_consensus("the averaged model")
        engine.worker.show_local()
        _put_in_place(in_place, trainer)
    engine.finish()
    if keeps_local:
        engine.worker.show_local()
    _put_in_place(in_place, trainer)


def _averages_in_place(trainer: pl.Trainer) -> list[pl.LightningModule]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        average
        for callback in callbacks
        if isinstance(callback, StochasticWeightAveraging) and callback.momenta
        for average in lightning_private.average_of(callback)
    ]


def _put_in_place(averages: list[pl.LightningModule], trainer: pl.Trainer) -> None:
    for average in averages:
        StochasticWeightAveraging.transfer_weights(average, trainer.lightning_module)
