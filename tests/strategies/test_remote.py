"""A remote optimizer in the Trainer: all tiers give the results of DDP."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.compression import BFloat16
from lightning_loco.parameter_server import Tiers
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.small_model import ValidatedModule, flat, make_loader, quiet_trainer
from tests.strategies.families import fit_with, remote_or_ddp

STEPS = 12


class Scheduled(ValidatedModule):
    """AdamW with a cosine schedule."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}


def fit(rank: int, world: int, num_workers: int | None, settings: dict[str, Any]) -> Any:
    serves = num_workers is None or rank >= num_workers
    module = Scheduled(seed=100 if serves else rank)
    data = make_loader(rank, STEPS), make_loader(9, 2)
    trainer = fit_with(remote_or_ddp(num_workers), module, *data, max_epochs=2, **settings)
    return flat(module), trainer.callback_metrics["val_loss"].item(), trainer.global_step


@pytest.mark.parametrize(("kind", "num_tiers"), cover(SETTINGS, [2, 3], strength=1))
def test_fit_gives_the_results_of_ddp(pool: Pool, kind: str, num_tiers: int) -> None:
    *workers, server = pool.run(fit, 2, SETTINGS[kind], world=1 + num_tiers)
    expected, metric, steps = pool.run(fit, None, SETTINGS[kind], world=2)[0]
    for weights, own_metric, own_steps in workers[:2]:
        assert torch.equal(weights, expected)
        assert own_metric == metric
        assert own_steps == steps
    assert torch.equal(server[0], expected)
    assert server[1] == pytest.approx(metric)


@pytest.mark.parametrize("name", ["remote_optimizer", "remote_optimizer_notebook"])
def test_by_name_all_ranks_except_one_train(name: str) -> None:
    trainer = quiet_trainer(strategy=name, devices=4, num_nodes=2)
    strategy = trainer.strategy
    assert isinstance(strategy, RemoteOptimizerStrategy)
    assert strategy.tiers == Tiers(7, 2)
    assert strategy.num_workers == trainer.world_size == 7
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 7, "rank": 0}


def test_the_strategy_can_be_pickled() -> None:
    strategy = RemoteOptimizerStrategy(4, num_servers=2, compression="bf16", overlap=False)
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.counts == strategy.counts == (4, 2, 1)
    assert copy.compression == BFloat16()
    assert (copy.overlap, copy.timeout_s) == (False, 600)


def test_arguments_and_defaults_are_unchanged() -> None:
    parameters = inspect.signature(RemoteOptimizerStrategy).parameters
    expected = {"num_servers": 1, "compression": None}
    assert {name: parameters[name].default for name in expected} == expected
    assert RemoteOptimizerStrategy().timeout_s == 600
    first, *others, _ = parameters.values()
    assert first.name == "num_workers"
    assert {parameter.kind for parameter in others} == {inspect.Parameter.KEYWORD_ONLY}
