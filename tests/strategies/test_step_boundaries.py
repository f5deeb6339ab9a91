"""Rounds change parameters only between local steps, also if a training step communicates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import AsyncModelAverageStrategy, DiLoCo, LocalSGD, LocoStrategy, ModelAverage
from tests.harness.cover import cover
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, flat, loss_of, make_loader

pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather is deprecated:FutureWarning")


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


def fit(rank: int, world: int, name: str, manual: bool, accumulate: int) -> tuple[Any, ...]:
    kind, args, settings = STRATEGIES[name]
    strategy = kind(*args, **settings, timeout_s=20)
    trainer = make_trainer(
        strategy, max_epochs=2, use_distributed_sampler=False, accumulate_grad_batches=accumulate
    )
    module = CollectiveInStep(manual)
    trainer.fit(module, make_loader(rank, 24))
    return flat(module), strategy.statistics.rounds, module.losses


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
    results = pool.run(fit, name, manual, accumulate, world=2)
    for final, rounds, losses in results:
        assert torch.equal(final, results[0][0])
        assert rounds >= 3
        assert losses[-1] < losses[0]
