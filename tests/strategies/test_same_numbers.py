"""Every algorithm gives the same numbers in simulation, on raw groups and in Trainer.fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, GASLoC, LocalSGD, LocoStrategy, Simulation, StepEngine
from tests.pool import Pool, make_trainer
from tests.tiny import TinyModule, flat, loss_of, make_loader, make_model, worker_batch

LR = 0.05
SYNC_EVERY = 3
STEPS = 12

CASES: dict[str, dict[str, Any]] = {
    "local_sgd": {"algorithm": LocalSGD()},
    "diloco": {"algorithm": DiLoCo()},
    "diloco_heavy_ball": {"algorithm": DiLoCo(nesterov=False)},
    "diloco_adamw": {"algorithm": DiLoCo(outer_optimizer=torch.optim.AdamW)},
    "async_diloco": {"algorithm": DiLoCo(outer_momentum=0.3), "overlap": True},
    "async_diloco_cold": {
        "algorithm": DiLoCo(outer_momentum=0.0),
        "overlap": True,
        "warm_start": False,
    },
    "gasloc_ring": {"algorithm": GASLoC(), "topology": "ring"},
    "gasloc_gossiped": {"algorithm": GASLoC(momentum_on="gossiped"), "topology": "ring"},
    "gasloc_matching": {"algorithm": GASLoC(), "topology": "random_matching"},
    "gasloc_one_peer": {"algorithm": GASLoC(), "topology": "one_peer_exponential"},
}


def simulate(world: int, case: str) -> Tensor:
    models = [make_model() for _ in range(world)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    steps = [0] * world
    simulation = Simulation(models, sync_every=SYNC_EVERY, **CASES[case])

    def local_step(worker: int) -> None:
        optimizers[worker].zero_grad()
        loss_of(models[worker], worker_batch(worker, steps[worker])).backward()
        optimizers[worker].step()
        steps[worker] += 1

    simulation.run(local_step, STEPS // SYNC_EVERY)
    simulation.drain()
    return simulation.consensus()


def run_engine(rank: int, world: int, case: str) -> Tensor:
    model = make_model(seed=rank)  # the engine gives all workers the model of worker 0
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine = StepEngine(model, sync_every=SYNC_EVERY, bucket_bytes=4096, **CASES[case])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, worker_batch(rank, step)).backward()
        optimizer.step()
        engine.step()
    engine.finish()
    engine.close()
    return flat(model)


def run_trainer(rank: int, world: int, case: str) -> Tensor:
    strategy = LocoStrategy(sync_every=SYNC_EVERY, **CASES[case])
    trainer = make_trainer(strategy, devices=world, max_steps=STEPS, use_distributed_sampler=False)
    module = TinyModule(lr=LR)
    trainer.fit(module, make_loader(rank, STEPS))
    return flat(module)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_same_numbers(pool: Pool, case: str, world: int) -> None:
    expected = simulate(world, case)
    for run in (run_engine, run_trainer):
        for result in pool.run(run, case, world=world):
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
