"""Rows: callbacks, loggers and profilers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as ready
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.lightning_matrix.kit import Facts, Kit, Model, are_all, fill, loader, weights
from tests.lightning_matrix.optimizing import StepSchedule
from tests.lightning_matrix.running import fit


def early_stopping(kit: Kit) -> Facts:
    stopping = ready.EarlyStopping("val_loss", patience=0, min_delta=100.0)
    return fit(kit, callbacks=[stopping], max_epochs=5)


def saving(kit: Kit, **settings: Any) -> Facts:
    """Names of the checkpoints that are there after fit, and what they hold."""
    folder = kit.folder / "saved"
    saved = ModelCheckpoint(folder, **settings)
    facts = fit(kit, callbacks=[saved], enable_checkpointing=True)
    content = torch.load(folder / "last.ckpt", weights_only=False)
    final = torch.cat([value.reshape(-1).double() for value in content["state_dict"].values()])
    kit.models.append(final)
    return {**facts, "files": kit.files("saved/*.ckpt")}


def checkpoint_by_metric(kit: Kit) -> Facts:
    return saving(kit, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)


def checkpoint_by_steps(kit: Kit) -> Facts:
    return saving(kit, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True)


def checkpoint_of_weights(kit: Kit) -> Facts:
    return saving(kit, filename="{epoch}", save_weights_only=True, save_last=True)


def checkpoint_at_epoch_end(kit: Kit) -> Facts:
    return saving(kit, filename="{epoch}", save_on_train_epoch_end=True, save_last="link")


def checkpoint_by_time(kit: Kit) -> Facts:
    often = timedelta(milliseconds=1)
    return saving(kit, filename="one", train_time_interval=often, save_last=True)


def two_checkpoints(kit: Kit) -> Facts:
    second = ModelCheckpoint(kit.folder / "second", filename="{step}", every_n_train_steps=4)
    first = ModelCheckpoint(kit.folder / "first", filename="{epoch}", monitor="epoch", mode="max")
    facts = fit(kit, callbacks=[first, second], enable_checkpointing=True)
    return {**facts, "files": kit.files("*/*.ckpt")}


def accumulation_schedule(kit: Kit) -> Facts:
    return fit(kit, callbacks=[ready.GradientAccumulationScheduler({0: 1, 1: 2})])


class Keeping(CSVLogger):
    """Writes what is logged, and keeps the names."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder, name="log")
        self.names: set[str] = set()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.names |= set(metrics)
        super().log_metrics(metrics, step)


def rate_monitor(kit: Kit) -> Facts:
    logger = Keeping(kit.folder)
    facts = fit(kit, StepSchedule(), callbacks=[ready.LearningRateMonitor()], logger=logger)
    return {**facts, "logged": sorted(logger.names)}


class Logging(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"a": 1.0, "b": loss.detach()}, sync_dist=True, on_epoch=True, on_step=False)
        return loss


def logger(kit: Kit) -> Facts:
    keeping = Keeping(kit.folder)
    facts = fit(kit, Logging(), logger=keeping)
    return {**facts, "logged": sorted(keeping.names)}


def simple_profiler(kit: Kit) -> Facts:
    return fit(kit, profiler=SimpleProfiler(kit.folder, f"profile{kit.rank}"))


def advanced_profiler(kit: Kit) -> Facts:
    return fit(kit, profiler=AdvancedProfiler(kit.folder, f"profile{kit.rank}"))


def pytorch_profiler(kit: Kit) -> Facts:
    profiler = PyTorchProfiler(kit.folder, f"profile{kit.rank}", export_to_chrome=False)
    return fit(kit, profiler=profiler)


# ---------------------------------------------------------------- what writes the weights


class EMA(Callback):
    """An average of one's own, made of what torch offers, which becomes the model at the end.

    Attributes:
        written: The weights that it has left.
    """

    def __init__(self) -> None:
        self.average: AveragedModel | None = None
        self.written = torch.zeros(0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average = AveragedModel(pl_module.layers, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert self.average is not None
        self.average.update_parameters(pl_module.layers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.average is not None
        pl_module.layers.load_state_dict(self.average.module.state_dict())
        self.written = weights(pl_module)


def writing(kit: Kit, callback: Any, **settings: Any) -> Facts:
    """The model after fit is the mean of what the callback has written on each worker."""
    module = Model()
    facts = fit(kit, module, callbacks=[callback], **settings)
    kit.must_be_the_mean(module, callback.written)
    return facts


def ema_by_hand(kit: Kit) -> Facts:
    return writing(kit, EMA())


class Zeroing(Callback):
    """Leaves a model that no round would."""

    written = torch.zeros(0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fill(pl_module, 0.0)
        self.written = weights(pl_module)


def zeroing_at_the_end(kit: Kit) -> Facts:
    return writing(kit, Zeroing())


def noting(kind: type[Callback], *args: Any, **settings: Any) -> Any:
    """A callback of Lightning's that keeps what it has left at the end."""

    class Noting(kind):  # type: ignore[misc, valid-type]
        written = torch.zeros(0)

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            super().on_train_end(trainer, pl_module)
            self.written = weights(pl_module)

    return Noting(*args, **settings)


def weight_averaging(kit: Kit) -> Facts:
    return writing(kit, noting(ready.EMAWeightAveraging, decay=0.5))


def saved_average(kit: Kit) -> Facts:
    """What is saved last is the average, and so is the final model, the same on all workers."""
    module = Model()
    averaging = ready.EMAWeightAveraging(decay=0.5)
    saved = ModelCheckpoint(kit.folder, filename="saved", save_last=True)
    trainer = kit.trainer(callbacks=[averaging, saved], enable_checkpointing=True)
    trainer.fit(module, loader(), loader(8, 1))
    if kit.serves:
        return {}
    content = torch.load(kit.folder / "last.ckpt", weights_only=False)["state_dict"]
    found = torch.cat([value.reshape(-1).double() for value in content.values()])
    return kit.facts(trainer, module, saved=torch.allclose(found, weights(module)))


def stochastic_weight_averaging(kit: Kit) -> Facts:
    averaging = noting(ready.StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1)
    return writing(kit, averaging, max_epochs=3)


def pruning(kit: Kit) -> Facts:
    module = Model()
    pruned = ready.ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
    trainer = kit.trainer(callbacks=[pruned])
    trainer.fit(module, loader())
    kit.must_agree(module)
    return {"zeros": int((weights(module) == 0).sum())}


class FiveAt(Callback):
    """Fills the weights with 5.0 in a hook, as loading a backbone does."""

    def __init__(self, hook: str, on_rank: int | None = None) -> None:
        setattr(self, hook, self.fill)
        self.on_rank = on_rank

    def fill(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.on_rank in (None, trainer.global_rank):
            fill(pl_module, 5.0)


class Watched(Model):
    """Notes the weights that a validation shows."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.calls["validated with 5"] += int(are_all(self, 5.0))


def filled_in(kit: Kit, hook: str) -> Facts:
    """Weights that are 5 everywhere and are not trained stay what they are."""
    module = Watched(lr=0.0)
    facts = fit(kit, module, callbacks=[FiveAt(hook)])
    return {**facts, "fives": are_all(module, 5.0)}


def filled_on_fit_start(kit: Kit) -> Facts:
    return filled_in(kit, "on_fit_start")


def filled_on_sanity_check_start(kit: Kit) -> Facts:
    return filled_in(kit, "on_sanity_check_start")


def filled_on_train_start(kit: Kit) -> Facts:
    return filled_in(kit, "on_train_start")


def filled_on_train_epoch_start(kit: Kit) -> Facts:
    return filled_in(kit, "on_train_epoch_start")


def filled_on_one_worker(kit: Kit) -> Facts:
    return fit(kit, Model(lr=0.0), callbacks=[FiveAt("on_train_epoch_start", on_rank=1)])


# --------------------------------------------------------------------------- tuning


def rate_finder(kit: Kit) -> Facts:
    module = Model()
    finder = ready.LearningRateFinder(num_training_steps=6, early_stop_threshold=None)
    saved = ModelCheckpoint(kit.folder / "saved", filename="{epoch}", save_last=True)
    trainer = kit.trainer(callbacks=[finder, saved], enable_checkpointing=True)
    trainer.fit(module, loader(), loader(8, 1))
    kit.must_agree(module)
    return {"steps": trainer.global_step, "epochs": trainer.current_epoch}


def tuner(kit: Kit) -> Facts:
    module, trainer = Model(), kit.trainer()
    tuned = Tuner(trainer).lr_find(module, loader(), num_training=6, early_stop_threshold=None)
    kit.must_agree(module)
    trainer.fit(module, loader())
    tried = 0 if tuned is None else len(tuned.results["lr"])
    return {"tried": tried, "steps": trainer.global_step}


def batch_size_finder(kit: Kit) -> Facts:
    return fit(kit, callbacks=[ready.BatchSizeFinder()])


class Thawing(ready.BackboneFinetuning):
    """Trains the first layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1)


class WithBackbone(Model):
    @property
    def backbone(self) -> Any:
        return self.layers[0]

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=self.lr)


def backbone_finetuning(kit: Kit) -> Facts:
    return fit(kit, WithBackbone(), callbacks=[Thawing()])
