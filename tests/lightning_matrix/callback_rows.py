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

from tests.lightning_matrix.optimization_rows import StepSchedule
from tests.lightning_matrix.row_run import Facts, Model, RowRun, are_all, fill, loader, weights
from tests.lightning_matrix.trainer_rows import fit


def early_stopping(run: RowRun) -> Facts:
    stopping = ready.EarlyStopping("val_loss", patience=0, min_delta=100.0)
    return fit(run, callbacks=[stopping], max_epochs=5)


def saving(run: RowRun, **settings: Any) -> Facts:
    """Return the names of the checkpoints after fit, and record the saved weights."""
    folder = run.folder / "saved"
    saved = ModelCheckpoint(folder, **settings)
    facts = fit(run, callbacks=[saved], enable_checkpointing=True)
    content = torch.load(folder / "last.ckpt", weights_only=False)
    final = torch.cat([value.reshape(-1).double() for value in content["state_dict"].values()])
    run.models.append(final)
    return {**facts, "files": run.files("saved/*.ckpt")}


def checkpoint_by_metric(run: RowRun) -> Facts:
    return saving(run, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)


def checkpoint_by_steps(run: RowRun) -> Facts:
    return saving(run, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True)


def checkpoint_of_weights(run: RowRun) -> Facts:
    return saving(run, filename="{epoch}", save_weights_only=True, save_last=True)


def checkpoint_at_epoch_end(run: RowRun) -> Facts:
    return saving(run, filename="{epoch}", save_on_train_epoch_end=True, save_last="link")


def checkpoint_by_time(run: RowRun) -> Facts:
    often = timedelta(milliseconds=1)
    return saving(run, filename="one", train_time_interval=often, save_last=True)


def two_checkpoints(run: RowRun) -> Facts:
    second = ModelCheckpoint(run.folder / "second", filename="{step}", every_n_train_steps=4)
    first = ModelCheckpoint(run.folder / "first", filename="{epoch}", monitor="epoch", mode="max")
    facts = fit(run, callbacks=[first, second], enable_checkpointing=True)
    return {**facts, "files": run.files("*/*.ckpt")}


def accumulation_schedule(run: RowRun) -> Facts:
    return fit(run, callbacks=[ready.GradientAccumulationScheduler({0: 1, 1: 2})])


class RecordingLogger(CSVLogger):
    """Writes logged values, and records their names."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder, name="log")
        self.names: set[str] = set()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.names |= set(metrics)
        super().log_metrics(metrics, step)


def rate_monitor(run: RowRun) -> Facts:
    logger = RecordingLogger(run.folder)
    facts = fit(run, StepSchedule(), callbacks=[ready.LearningRateMonitor()], logger=logger)
    return {**facts, "logged": sorted(logger.names)}


class Logging(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"a": 1.0, "b": loss.detach()}, sync_dist=True, on_epoch=True, on_step=False)
        return loss


def logger(run: RowRun) -> Facts:
    recorder = RecordingLogger(run.folder)
    facts = fit(run, Logging(), logger=recorder)
    return {**facts, "logged": sorted(recorder.names)}


def simple_profiler(run: RowRun) -> Facts:
    return fit(run, profiler=SimpleProfiler(run.folder, f"profile{run.rank}"))


def advanced_profiler(run: RowRun) -> Facts:
    return fit(run, profiler=AdvancedProfiler(run.folder, f"profile{run.rank}"))


def pytorch_profiler(run: RowRun) -> Facts:
    profiler = PyTorchProfiler(run.folder, f"profile{run.rank}", export_to_chrome=False)
    return fit(run, profiler=profiler)


# -------------------------------------------------------------- callbacks that write weights


class EMA(Callback):
    """A custom average, computed with torch's tools and written into the model at the end.

    Attributes:
        written: The weights that it wrote.
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


def writing(run: RowRun, callback: Any, **settings: Any) -> Facts:
    """Train; the final model must be the mean of the weights that each worker's callback wrote."""
    module = Model()
    facts = fit(run, module, callbacks=[callback], **settings)
    run.must_be_the_mean(module, callback.written)
    return facts


def ema_by_hand(run: RowRun) -> Facts:
    return writing(run, EMA())


class Zeroing(Callback):
    """Sets all weights to zero at the end."""

    written = torch.zeros(0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fill(pl_module, 0.0)
        self.written = weights(pl_module)


def zeroing_at_the_end(run: RowRun) -> Facts:
    return writing(run, Zeroing())


def recording(kind: type[Callback], *args: Any, **settings: Any) -> Any:
    """Make a callback of Lightning's that records the weights that it writes at the end."""

    class Recording(kind):  # type: ignore[misc, valid-type]
        written = torch.zeros(0)

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            super().on_train_end(trainer, pl_module)
            self.written = weights(pl_module)

    return Recording(*args, **settings)


def weight_averaging(run: RowRun) -> Facts:
    return writing(run, recording(ready.EMAWeightAveraging, decay=0.5))


def saved_average(run: RowRun) -> Facts:
    """The last checkpoint and the final model are the average, equal on all workers."""
    module = Model()
    averaging = ready.EMAWeightAveraging(decay=0.5)
    saved = ModelCheckpoint(run.folder, filename="saved", save_last=True)
    trainer = run.trainer(callbacks=[averaging, saved], enable_checkpointing=True)
    trainer.fit(module, loader(), loader(8, 1))
    if run.serves:
        return {}
    content = torch.load(run.folder / "last.ckpt", weights_only=False)["state_dict"]
    found = torch.cat([value.reshape(-1).double() for value in content.values()])
    return run.facts(trainer, module, saved=torch.allclose(found, weights(module)))


def stochastic_weight_averaging(run: RowRun) -> Facts:
    averaging = recording(ready.StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1)
    return writing(run, averaging, max_epochs=3)


def pruning(run: RowRun) -> Facts:
    module = Model()
    pruned = ready.ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
    trainer = run.trainer(callbacks=[pruned])
    trainer.fit(module, loader())
    run.must_be_equal(module)
    return {"zeros": int((weights(module) == 0).sum())}


class FiveAt(Callback):
    """Sets the weights to 5.0 in a hook, like a loaded backbone."""

    def __init__(self, hook: str, fills: bool = True) -> None:
        setattr(self, hook, self.fill)
        self.fills = fills

    def fill(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.fills:
            fill(pl_module, 5.0)


class CountsFives(Model):
    """Counts validations in which all weights are 5."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.calls["validated with 5"] += int(are_all(self, 5.0))


def filled_in(run: RowRun, hook: str) -> Facts:
    """Weights that are set to 5 and are not trained stay 5."""
    module = CountsFives(lr=0.0)
    facts = fit(run, module, callbacks=[FiveAt(hook)], num_sanity_val_steps=2)
    return {**facts, "fives": are_all(module, 5.0)}


def filled_on_fit_start(run: RowRun) -> Facts:
    return filled_in(run, "on_fit_start")


def filled_on_sanity_check_start(run: RowRun) -> Facts:
    return filled_in(run, "on_sanity_check_start")


def filled_on_train_start(run: RowRun) -> Facts:
    return filled_in(run, "on_train_start")


def filled_on_train_epoch_start(run: RowRun) -> Facts:
    return filled_in(run, "on_train_epoch_start")


def filled_on_one_worker(run: RowRun) -> Facts:
    fives = FiveAt("on_train_epoch_start", fills=run.worker == 1)
    return fit(run, Model(lr=0.0), callbacks=[fives])


# --------------------------------------------------------------------------- tuning


def rate_finder(run: RowRun) -> Facts:
    module = Model()
    finder = ready.LearningRateFinder(num_training_steps=6, early_stop_threshold=None)
    saved = ModelCheckpoint(run.folder / "saved", filename="{epoch}", save_last=True)
    trainer = run.trainer(
        callbacks=[finder, saved], enable_checkpointing=True, num_sanity_val_steps=2
    )
    trainer.fit(module, loader(), loader(8, 1))
    run.must_be_equal(module)
    return {"steps": trainer.global_step, "epochs": trainer.current_epoch}


def tuner(run: RowRun) -> Facts:
    module, trainer = Model(), run.trainer()
    tuned = Tuner(trainer).lr_find(module, loader(), num_training=6, early_stop_threshold=None)
    run.must_be_equal(module)
    trainer.fit(module, loader())
    tried = 0 if tuned is None else len(tuned.results["lr"])
    return {"tried": tried, "steps": trainer.global_step}


def batch_size_finder(run: RowRun) -> Facts:
    return fit(run, callbacks=[ready.BatchSizeFinder()])


class Unfreezing(ready.BackboneFinetuning):
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


def backbone_finetuning(run: RowRun) -> Facts:
    return fit(run, WithBackbone(), callbacks=[Unfreezing()])
