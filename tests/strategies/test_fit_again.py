"""After an error of one worker at any point, the same processes can train again."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_loco import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    GASLoCStrategy,
    PairwiseGossipStrategy,
)
from tests.harness.cover import cover
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, loss_of, make_loader

LONG_S = 120.0
"""Longer than the test may take, so that no worker waits for it."""

STRATEGIES: dict[str, Any] = {
    "diloco": lambda: DiLoCoStrategy(sync_every=2, timeout_s=LONG_S),
    "async_diloco": lambda: AsyncDiLoCoStrategy(sync_every=3, timeout_s=LONG_S),
    "gasloc": lambda: GASLoCStrategy("ring", sync_every=3, timeout_s=LONG_S),
    "async_model_average": lambda: AsyncModelAverageStrategy(interval_s=0.01, timeout_s=LONG_S),
    "pairwise_gossip": lambda: PairwiseGossipStrategy(1.0, timeout_s=LONG_S),
}
HOOKS = [
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "training_step",
    "validation_step",
    "on_save_checkpoint",
]


class Validated(TinyModule):
    def validation_step(self, batch: Any) -> None:
        self.log("val", loss_of(self.model, batch), batch_size=4, sync_dist=True)


def raise_in(module: LightningModule, hook: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError(f"a bad {hook}")

    setattr(module, hook, fail)


def fit_twice(rank: int, world: int, name: str, hook: str, folder: str) -> int:
    module = Validated()
    if rank == 1:
        raise_in(module, hook)
    saving = ModelCheckpoint(folder, every_n_train_steps=3)
    trainer = make_trainer(
        STRATEGIES[name](), max_steps=6, callbacks=[saving], enable_checkpointing=True
    )
    with pytest.raises(ArithmeticError if rank == 1 else RuntimeError, match=f"a bad {hook}"):
        trainer.fit(module, make_loader(rank, 6), make_loader(rank, 2))
    trainer = make_trainer(STRATEGIES[name](), max_steps=6)
    trainer.fit(Validated(), make_loader(rank, 6), make_loader(rank, 2))
    return trainer.global_step


@pytest.mark.parametrize(("name", "hook"), cover(STRATEGIES, HOOKS, strength=1))
def test_a_later_fit_trains(pool: Pool, tmp_path: Any, name: str, hook: str) -> None:
    assert pool.run(fit_twice, name, hook, str(tmp_path), world=3, timeout_s=60) == [6, 6, 6]
