"""Rows: calls of the Trainer, and its limits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning_matrix.row_run import (
    EPOCHS,
    Facts,
    Model,
    RowRun,
    loader,
    weights,
)


def fit(run: RowRun, module: Model | None = None, validates: bool = True, **settings: Any) -> Facts:
    """Train and validate; used by most rows.

    Args:
        run: The run.
        module: Default: the model of all rows.
        validates: Whether there are data for validation.
        settings: Arguments of the Trainer.
    """
    module = module or Model()
    before = weights(module)
    trainer = run.trainer(**settings)
    trainer.fit(module, loader(), loader(8, 1) if validates else None)
    trained = weights(module).shape == before.shape and not torch.equal(weights(module), before)
    return run.facts(trainer, module, trained=trained, metrics=sorted(trainer.callback_metrics))


def fit_with_sanity_check(run: RowRun) -> Facts:
    return fit(run, num_sanity_val_steps=2)


def validate(run: RowRun) -> Facts:
    module, trainer = Model(), run.trainer()
    found = trainer.validate(module, loader(8, 1), verbose=False)
    return run.facts(trainer, module, found=rounded(found))


def test(run: RowRun) -> Facts:
    module, trainer = Model(), run.trainer()
    found = trainer.test(module, loader(8, 1), verbose=False)
    return run.facts(trainer, module, found=rounded(found))


def predict(run: RowRun) -> Facts:
    module, trainer = Model(), run.trainer()
    found = trainer.predict(module, loader(8, 1)) or []
    return run.facts(trainer, module, found=[len(batch) for batch in found])


def rounded(found: Any) -> Any:
    return [{name: round(value, 4) for name, value in one.items()} for one in found]


def fit_and_everything(run: RowRun) -> Facts:
    module, trainer = Model(), run.trainer()
    trainer.fit(module, loader(), loader(8, 1))
    trainer.validate(module, loader(8, 1), verbose=False)
    trainer.test(module, loader(8, 1), verbose=False)
    trainer.predict(module, loader(8, 1))
    return run.facts(trainer, module)


def fit_twice(run: RowRun) -> Facts:
    module, trainer = Model(), run.trainer()
    trainer.fit(module, loader(), loader(8, 1))
    run.must_be_equal(module)
    trainer.fit_loop.max_epochs = 2 * EPOCHS
    trainer.fit(module, loader(), loader(8, 1))
    return run.facts(trainer, module)


def another_trainer(run: RowRun) -> Facts:
    module = Model()
    run.trainer(max_epochs=1).fit(module, loader())
    trainer = run.trainer()
    trainer.fit(module, loader())
    return run.facts(trainer, module)


def fast_dev_run(run: RowRun) -> Facts:
    return fit(run, fast_dev_run=True)


def overfit_batches(run: RowRun) -> Facts:
    return fit(run, overfit_batches=2)


def limits(run: RowRun) -> Facts:
    return fit(run, limit_train_batches=3, limit_val_batches=1)


def max_steps(run: RowRun) -> Facts:
    return fit(run, max_epochs=-1, max_steps=6)


def max_time(run: RowRun) -> Facts:
    module = Model()
    trainer = run.trainer(max_epochs=-1, max_time=timedelta(milliseconds=150))
    trainer.fit(module, loader())
    run.must_be_equal(module)
    return {"stopped": trainer.should_stop or run.serves}


class StopAt(Callback):
    """Ends the training after some steps, on some ranks; None for all."""

    def __init__(self, step: int, ranks: tuple[int, ...] | None = None) -> None:
        self.step = step
        self.ranks = ranks

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        stops = self.ranks is None or trainer.global_rank in self.ranks
        if trainer.global_step == self.step and stops:
            trainer.should_stop = True


def should_stop(run: RowRun) -> Facts:
    return fit(run, callbacks=[StopAt(5)])


def min_epochs(run: RowRun) -> Facts:
    return fit(run, callbacks=[StopAt(1)], min_epochs=2, max_epochs=5)


def should_stop_on_one(run: RowRun) -> Facts:
    module, trainer = Model(), run.trainer(callbacks=[StopAt(5, ranks=(1,))])
    trainer.fit(module, loader())
    run.must_be_equal(module)
    return {}


def val_check_interval(run: RowRun) -> Facts:
    return fit(run, val_check_interval=2)


def check_val_every_n_epoch(run: RowRun) -> Facts:
    return fit(run, check_val_every_n_epoch=2)


def val_steps_across_epochs(run: RowRun) -> Facts:
    return fit(run, val_check_interval=3, check_val_every_n_epoch=None)


def no_sanity_check(run: RowRun) -> Facts:
    return fit(run, num_sanity_val_steps=0)


def no_validation(run: RowRun) -> Facts:
    return fit(run, validates=False)


def barebones(run: RowRun) -> Facts:
    module = Model()
    trainer = run.trainer(barebones=True, log_every_n_steps=None)
    trainer.fit(module, loader())
    return run.facts(trainer, module)


def detect_anomaly(run: RowRun) -> Facts:
    return fit(run, detect_anomaly=True)


class Reloading(LightningDataModule):
    """Counts how often its loaders are created."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def setup(self, stage: str) -> None:
        self.asked.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.asked.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.asked.append("train_dataloader")
        return loader()

    def val_dataloader(self) -> Any:
        return loader(8, 1)


def datamodule(run: RowRun) -> Facts:
    module, data, trainer = Model(), Reloading(), run.trainer()
    trainer.fit(module, data)
    return run.facts(trainer, module, asked=data.asked)


def reload_dataloaders(run: RowRun) -> Facts:
    module, data = Model(), Reloading()
    trainer = run.trainer(reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, data)
    return run.facts(trainer, module, asked=data.asked)


def resume(run: RowRun, **loading: Any) -> Facts:
    """Train for one epoch, and resume its checkpoint with a new Trainer and module."""
    first = ModelCheckpoint(run.folder, filename="first")
    run.trainer(max_epochs=1, callbacks=[first], enable_checkpointing=True).fit(
        Remembering(), loader()
    )
    module, trainer = Remembering(), run.trainer()
    trainer.fit(module, loader(), ckpt_path=str(run.folder / "first.ckpt"), **loading)
    return run.facts(trainer, module)


class NumberSGD(torch.optim.SGD):
    """Has a NumPy number in its state."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["norm"] = np.float64(parameter.detach().norm().item())
        return loss


class Remembering(Model):
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.lr)


class RememberingNumbers(Remembering):
    optimizer = NumberSGD


def resume_with_numpy(run: RowRun) -> Facts:
    first = ModelCheckpoint(run.folder, filename="first")
    run.trainer(max_epochs=1, callbacks=[first], enable_checkpointing=True).fit(
        RememberingNumbers(), loader()
    )
    module, trainer = RememberingNumbers(), run.trainer()
    path = str(run.folder / "first.ckpt")
    trainer.fit(module, loader(), ckpt_path=path, weights_only=False)
    return run.facts(trainer, module)


def test_the_best(run: RowRun) -> Facts:
    module = Model()
    best = ModelCheckpoint(run.folder, monitor="val_loss")
    trainer = run.trainer(callbacks=[best], enable_checkpointing=True)
    trainer.fit(module, loader(), loader(8, 1))
    (found,) = trainer.test(module, loader(8, 1), ckpt_path="best", verbose=False) or [{}]
    same = run.serves or round(found["test_loss"], 4) == round(float(best.best_model_score), 4)
    return run.facts(trainer, module, same=same)


def load_from_checkpoint(run: RowRun) -> Facts:
    module, trainer = Model(), run.trainer()
    trainer.fit(module, loader())
    path = run.folder / "saved.ckpt"
    trainer.save_checkpoint(path)
    if run.serves:
        return {}
    loaded = Model.load_from_checkpoint(path, map_location="cpu")
    return run.facts(trainer, module, same=torch.equal(weights(loaded), weights(module)))


class Recorder(Callback):
    """Records the order in which hooks are called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_", "setup", "teardown")) and name not in ("on_save_checkpoint",):
            return lambda *_, **__: self.called.append(name)
        return super().__getattribute__(name)


def order_of_hooks(run: RowRun) -> Facts:
    recorder = Recorder()
    return {**fit(run, callbacks=[recorder]), "hooks": recorder.called}
