"""Rows: calls of the Trainer, and how long they go on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning_matrix.kit import (
    EPOCHS,
    Facts,
    Kit,
    Model,
    loader,
    weights,
)


def fit(kit: Kit, module: Model | None = None, validates: bool = True, **settings: Any) -> Facts:
    """Train and validate; what most rows are made of.

    Args:
        kit: The run.
        module: Default: the model of all rows.
        validates: Whether there is data for validation.
        settings: Of the Trainer.
    """
    module = module or Model()
    before = weights(module)
    trainer = kit.trainer(**settings)
    trainer.fit(module, loader(), loader(8, 1) if validates else None)
    trained = weights(module).shape == before.shape and not torch.equal(weights(module), before)
    return kit.facts(trainer, module, trained=trained, metrics=sorted(trainer.callback_metrics))


def validate(kit: Kit) -> Facts:
    module, trainer = Model(), kit.trainer()
    found = trainer.validate(module, loader(8, 1), verbose=False)
    return kit.facts(trainer, module, found=rounded(found))


def test(kit: Kit) -> Facts:
    module, trainer = Model(), kit.trainer()
    found = trainer.test(module, loader(8, 1), verbose=False)
    return kit.facts(trainer, module, found=rounded(found))


def predict(kit: Kit) -> Facts:
    module, trainer = Model(), kit.trainer()
    found = trainer.predict(module, loader(8, 1)) or []
    return kit.facts(trainer, module, found=[len(batch) for batch in found])


def rounded(found: Any) -> Any:
    return [{name: round(value, 4) for name, value in one.items()} for one in found]


def fit_and_everything(kit: Kit) -> Facts:
    module, trainer = Model(), kit.trainer()
    trainer.fit(module, loader(), loader(8, 1))
    trainer.validate(module, loader(8, 1), verbose=False)
    trainer.test(module, loader(8, 1), verbose=False)
    trainer.predict(module, loader(8, 1))
    return kit.facts(trainer, module)


def fit_twice(kit: Kit) -> Facts:
    module, trainer = Model(), kit.trainer()
    trainer.fit(module, loader(), loader(8, 1))
    kit.must_agree(module)
    trainer.fit_loop.max_epochs = 2 * EPOCHS
    trainer.fit(module, loader(), loader(8, 1))
    return kit.facts(trainer, module)


def another_trainer(kit: Kit) -> Facts:
    module = Model()
    kit.trainer(max_epochs=1).fit(module, loader())
    trainer = kit.trainer()
    trainer.fit(module, loader())
    return kit.facts(trainer, module)


def fast_dev_run(kit: Kit) -> Facts:
    return fit(kit, fast_dev_run=True)


def overfit_batches(kit: Kit) -> Facts:
    return fit(kit, overfit_batches=2)


def limits(kit: Kit) -> Facts:
    return fit(kit, limit_train_batches=3, limit_val_batches=1)


def max_steps(kit: Kit) -> Facts:
    return fit(kit, max_epochs=-1, max_steps=6)


def max_time(kit: Kit) -> Facts:
    module = Model()
    trainer = kit.trainer(max_epochs=-1, max_time=timedelta(milliseconds=150))
    trainer.fit(module, loader())
    kit.must_agree(module)
    return {"stopped": trainer.should_stop or kit.serves}


class StopAt(Callback):
    """Ends the training after some steps."""

    def __init__(self, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.step = step
        self.ranks = ranks

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            trainer.should_stop = True


def should_stop(kit: Kit) -> Facts:
    return fit(kit, callbacks=[StopAt(5)])


def min_epochs(kit: Kit) -> Facts:
    return fit(kit, callbacks=[StopAt(1)], min_epochs=2, max_epochs=5)


def should_stop_on_one(kit: Kit) -> Facts:
    module, trainer = Model(), kit.trainer(callbacks=[StopAt(5, ranks=(1,))])
    trainer.fit(module, loader())
    kit.must_agree(module)
    return {}


def val_check_interval(kit: Kit) -> Facts:
    return fit(kit, val_check_interval=2)


def check_val_every_n_epoch(kit: Kit) -> Facts:
    return fit(kit, check_val_every_n_epoch=2)


def val_steps_across_epochs(kit: Kit) -> Facts:
    return fit(kit, val_check_interval=3, check_val_every_n_epoch=None)


def no_sanity_check(kit: Kit) -> Facts:
    return fit(kit, num_sanity_val_steps=0)


def no_validation(kit: Kit) -> Facts:
    return fit(kit, validates=False)


def barebones(kit: Kit) -> Facts:
    module = Model()
    trainer = kit.trainer(barebones=True, log_every_n_steps=None)
    trainer.fit(module, loader())
    return kit.facts(trainer, module)


def detect_anomaly(kit: Kit) -> Facts:
    return fit(kit, detect_anomaly=True)


class Reloading(LightningDataModule):
    """Counts how often it is asked for data."""

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


def datamodule(kit: Kit) -> Facts:
    module, data, trainer = Model(), Reloading(), kit.trainer()
    trainer.fit(module, data)
    return kit.facts(trainer, module, asked=data.asked)


def reload_dataloaders(kit: Kit) -> Facts:
    module, data = Model(), Reloading()
    trainer = kit.trainer(reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, data)
    return kit.facts(trainer, module, asked=data.asked)


def resume(kit: Kit, **loading: Any) -> Facts:
    """Train for one epoch, and go on from its checkpoint with all else made anew."""
    first = ModelCheckpoint(kit.folder, filename="first")
    kit.trainer(max_epochs=1, callbacks=[first], enable_checkpointing=True).fit(
        Remembering(), loader()
    )
    module, trainer = Remembering(), kit.trainer()
    trainer.fit(module, loader(), ckpt_path=str(kit.folder / "first.ckpt"), **loading)
    return kit.facts(trainer, module)


class NumberSGD(torch.optim.SGD):
    """Keeps a number of NumPy in its state."""

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


def resume_with_numpy(kit: Kit) -> Facts:
    first = ModelCheckpoint(kit.folder, filename="first")
    kit.trainer(max_epochs=1, callbacks=[first], enable_checkpointing=True).fit(
        RememberingNumbers(), loader()
    )
    module, trainer = RememberingNumbers(), kit.trainer()
    path = str(kit.folder / "first.ckpt")
    trainer.fit(module, loader(), ckpt_path=path, weights_only=False)
    return kit.facts(trainer, module)


def test_the_best(kit: Kit) -> Facts:
    module = Model()
    best = ModelCheckpoint(kit.folder, monitor="val_loss")
    trainer = kit.trainer(callbacks=[best], enable_checkpointing=True)
    trainer.fit(module, loader(), loader(8, 1))
    (found,) = trainer.test(module, loader(8, 1), ckpt_path="best", verbose=False) or [{}]
    same = kit.serves or round(found["test_loss"], 4) == round(float(best.best_model_score), 4)
    return kit.facts(trainer, module, same=same)


def load_from_checkpoint(kit: Kit) -> Facts:
    module, trainer = Model(), kit.trainer()
    trainer.fit(module, loader())
    path = kit.folder / "saved.ckpt"
    trainer.save_checkpoint(path)
    if kit.serves:
        return {}
    loaded = Model.load_from_checkpoint(path, map_location="cpu")
    return kit.facts(trainer, module, same=torch.equal(weights(loaded), weights(module)))


class Recorder(Callback):
    """Writes down which hook is called when."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_", "setup", "teardown")) and name not in ("on_save_checkpoint",):
            return lambda *_, **__: self.called.append(name)
        return super().__getattribute__(name)


def order_of_hooks(kit: Kit) -> Facts:
    recorder = Recorder()
    return {**fit(kit, callbacks=[recorder]), "hooks": recorder.called}
