"""Saves, validations and the end are one sync point each; rounds stay between local steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_loco import (
    AsyncModelAverageStrategy,
    DiLoCo,
    LocalSGD,
    LocoStrategy,
    ModelAverage,
    PairwiseEngine,
    StepEngine,
)
from lightning_loco.model.participant import LocalParticipant, Participant
from lightning_loco.strategies.engine_strategy import EngineStrategy
from tests.harness.cover import cover
from tests.harness.gossip_nodes import peers
from tests.harness.pool import Pool
from tests.harness.small_model import TinyModule, flat, loss_of, make_loader
from tests.strategies.families import fit_with, strategy_of

METHODS = ("diloco", "async_diloco", "gasloc", "async_model_average", "pairwise_gossip")
DURING = ["checkpoint", "barrier Trainer.save_checkpoint", "validation", "the end of training"]
"""Lightning calls another barrier after each save."""


def record_sync_points(engine: Participant) -> list[str]:
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
    recorded, data = RecordsSyncPoints(folder), (make_loader(rank, 5), make_loader(0, 1))
    trainer = fit_with(
        strategy_of(method, 2, **settings),
        ValidatedModule(),
        *data,
        num_sanity_val_steps=0,
        callbacks=[recorded],
    )
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
    engines: list[tuple[str, Callable[[nn.Module], LocalParticipant]]] = [
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


# ------------------------------------------------------- collectives in a training step


class CollectiveInStep(TinyModule):
    """Calls a collective between the forward and the backward pass."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        start = flat(self)
        loss = loss_of(self.model, batch)
        everyone = self.all_gather(loss.detach())
        self.log("loss", loss, sync_dist=True, on_step=True)
        assert everyone.shape == (self.trainer.world_size,)
        assert torch.equal(flat(self), start)
        self.start = start
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert torch.equal(flat(self), self.start)


STRATEGIES = {
    "async": (AsyncModelAverageStrategy, (0.0,), {}),
    "async with neighbours": (AsyncModelAverageStrategy, (0.0,), {"topology": "ring"}),
    "different paces": (LocoStrategy, (LocalSGD(),), {"sync_every": [4, 2]}),
    "different paces of DiLoCo": (LocoStrategy, (DiLoCo(),), {"sync_every": [4, 2]}),
    "different paces, late": (
        LocoStrategy,
        (ModelAverage(),),
        {"sync_every": [4, 2], "overlap": True},
    ),
}


def fit_with_collectives(
    rank: int, world: int, name: str, manual: bool, accumulate: int
) -> tuple[Any, ...]:
    kind, args, settings = STRATEGIES[name]
    strategy, module = kind(*args, **settings, timeout_s=20), CollectiveInStep(manual)
    data = make_loader(rank, 24)
    fit_with(strategy, module, data, max_epochs=2, accumulate_grad_batches=accumulate)
    return flat(module), strategy.statistics.rounds, module.losses


@pytest.mark.filterwarnings("ignore:.*all_gather is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "manual", "accumulate"),
    cover(
        STRATEGIES,
        [
            pytest.param(False, 1, id="each step"),
            pytest.param(False, 3, id="accumulated"),
            pytest.param(True, 1, id="by hand"),
        ],
        strength=1,
    ),
)
def test_a_collective_in_a_training_step(
    pool: Pool, name: str, manual: bool, accumulate: int
) -> None:
    results = pool.run(fit_with_collectives, name, manual, accumulate, world=2)
    for final, rounds, losses in results:
        assert torch.equal(final, results[0][0])
        assert rounds >= 3
        assert losses[-1] < losses[0]
