"""Each save, each validation and the end of training are one sync point of all workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from lightning_loco import LocalSGD, PairwiseEngine, PairwiseGossipStrategy, StepEngine
from lightning_loco.strategies.engine_strategy import EngineStrategy
from lightning_loco.strategies.protocols import AnyEngine
from tests.cases import CASES
from tests.harness.gossip_nodes import peers
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, make_loader

METHODS = ("diloco", "async_diloco", "gasloc", "async_model_average", "pairwise_gossip")
DURING = ["checkpoint", "barrier Trainer.save_checkpoint", "validation", "the end of training"]
"""Lightning calls another barrier after each save."""


def record_sync_points(engine: AnyEngine) -> list[str]:
    """Return a list that collects the purpose of each further sync point."""
    purposes: list[str] = []
    sync_point = engine.sync_point

    def record(purpose: str) -> Any:
        purposes.append(purpose)
        return sync_point(purpose)

    engine.sync_point = record  # type: ignore[method-assign]
    return purposes


class ValidatedModule(TinyModule):
    """Its validation runs no collective."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class RecordsSyncPoints(pl.Callback):
    """Records the purpose of each sync point; saves after two batches, and after training."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.purposes: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, EngineStrategy)
        assert trainer.strategy.engine is not None
        self.purposes = record_sync_points(trainer.strategy.engine)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(f"{self.folder}/during.ckpt")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/after.ckpt")


def fit(
    rank: int, world: int, folder: str, method: str, settings: dict[str, Any]
) -> tuple[list[str], int]:
    strategy: EngineStrategy
    if method == "pairwise_gossip":
        strategy = PairwiseGossipStrategy(1.0, **settings)
    else:
        strategy = CASES[method].strategy(2, **settings)
    recorded = RecordsSyncPoints(folder)
    trainer = make_trainer(
        strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[recorded],
    )
    trainer.fit(ValidatedModule(), make_loader(rank, 5), make_loader(0, 1))
    return recorded.purposes, trainer.global_step


def test_one_sync_point_for_each_purpose(
    pool: Pool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """A save after training needs one with ``finalize="keep"``; otherwise the model is the mean."""
    keep: dict[str, Any] = {"finalize": "keep"}
    rows: list[tuple[str, dict[str, Any], list[str]]] = [
        ("diloco", {}, []),
        ("diloco", {"summary": False}, []),
        *((method, keep, ["checkpoint of the consensus"]) for method in METHODS),
    ]
    for method, settings, after in rows:
        with subtests.test(method, **settings):
            for purposes, steps in pool.run(fit, str(tmp_path), method, settings, world=2):
                assert (purposes, steps) == (DURING + after, 5)


def test_in_plain_loops_the_consensus_and_the_end_make_their_own(
    subtests: pytest.Subtests,
) -> None:
    engines: list[tuple[str, Callable[[nn.Module], AnyEngine]]] = [
        ("rounds", lambda model: StepEngine(model, LocalSGD(), sync_every=2)),
        ("gossip", lambda model: PairwiseEngine(model, nodes=peers(1), name="p0")),
    ]
    for name, make in engines:
        with subtests.test(name), closing(make(nn.Linear(1, 1))) as engine:
            purposes = record_sync_points(engine)
            engine.show_consensus("a validation")
            engine.show_consensus("a validation")  # the model holds the consensus already
            engine.worker.show_local()
            engine.finish()
            assert purposes == ["a validation", "the end of training"]
