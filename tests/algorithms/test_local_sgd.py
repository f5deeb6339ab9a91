"""Local SGD against synchronous training and against plain loops."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCo, LocalSGD, LocoStrategy, Simulation, StepEngine
from lightning_loco.engine import RoundSettings
from lightning_loco.schedules import EverySteps
from lightning_loco.topology import Ring
from tests.harness.cover import cover
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, flat, make_loader, make_model, worker_batch
from tests.harness.toys import (
    ADAMW,
    SGD,
    assert_close,
    flat_rounds,
    move_to,
    plain_step,
    randn,
    run_engine,
    simulate,
    train_ddp,
    train_step,
)

LINEAR_IN_THE_GRADIENTS = {
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "weight_decay": partial(SGD, momentum=0.5, weight_decay=0.1),
}


def test_the_round_is_the_mean() -> None:
    targets = randn(3, 4)
    after = flat_rounds(LocalSGD(), torch.zeros_like(targets), move_to(targets, 1.0), 1)[1]
    assert_close(after, targets.mean(0).expand(3, 4))


ALGORITHMS = [LocalSGD(), DiLoCo(1.0, 0.0)]


@pytest.mark.parametrize(
    ("algorithm", "name", "world"), cover(ALGORITHMS, LINEAR_IN_THE_GRADIENTS, range(1, 5))
)
def test_a_round_after_every_step_is_data_parallel_training(
    algorithm: LocalSGD | DiLoCo, name: str, world: int
) -> None:
    """Also with inner momentum if workers keep it: its mean is the momentum of the mean."""
    inner = LINEAR_IN_THE_GRADIENTS[name]
    history = simulate(algorithm, world, 8, inner=inner)
    assert_close(history[:8], train_ddp(world, 8, inner)[:, None].expand(-1, world, -1))


@pytest.mark.parametrize(("algorithm", "world"), cover(ALGORITHMS, (2, 3, 4), strength=1))
def test_a_round_after_every_step_is_data_parallel_training_on_gloo(
    pool: Pool, algorithm: LocalSGD | DiLoCo, world: int
) -> None:
    inner = LINEAR_IN_THE_GRADIENTS["nesterov"]
    for history in pool.run(run_engine, algorithm, 6, {"sync_every": 1}, inner, world=world):
        assert_close(history[:6], train_ddp(world, 6, inner))


def test_inner_momentum_that_is_reset_is_not_data_parallel_training() -> None:
    inner = LINEAR_IN_THE_GRADIENTS["momentum"]
    models = [make_model() for _ in range(2)]
    simulation = Simulation(models, LocalSGD())
    for step in range(8):

        def local_step(worker: int, step: int = step) -> None:
            model = models[worker]
            train_step(model, inner(model.parameters()), worker_batch(worker, step))

        simulation.run(local_step, 1)
    assert (simulation.consensus() - train_ddp(2, 8, inner)[-1]).abs().max() > 1e-2


def test_inner_adamw_is_not_data_parallel_adamw() -> None:
    """AdamW is not linear in the gradients, so only one worker alone agrees."""
    off = simulate(LocalSGD(), 3, 8, inner=ADAMW)[-1, 0] - train_ddp(3, 8, ADAMW)[-1]
    assert off.abs().max() > 1e-3
    assert_close(simulate(LocalSGD(), 1, 8, inner=ADAMW)[-1, 0], train_ddp(1, 8, ADAMW)[-1])


def test_clipping_on_each_worker_is_not_clipping_of_the_mean() -> None:
    clipped = simulate(LocalSGD(), 3, 8, step=partial(plain_step, clip=0.5))[-1, 0]
    off = clipped - train_ddp(3, 8, SGD, clip=0.5)[-1]
    assert off.abs().max() > 1e-3


def test_several_local_steps_equal_training_alone_and_averaging() -> None:
    """A plain loop of the formula, with AdamW, whose state each worker keeps."""
    world, rounds, steps = 3, 4, 5
    models = [make_model() for _ in range(world)]
    optimizers = [ADAMW(model.parameters()) for model in models]
    for r in range(rounds):
        for worker, model in enumerate(models):
            for step in range(steps):
                train_step(model, optimizers[worker], worker_batch(worker, r * steps + step))
        with torch.no_grad():
            for copies in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(p.clone() for p in copies) / world
                for p in copies:
                    p.copy_(mean)
    history = simulate(LocalSGD(), world, rounds, inner=ADAMW, sync_every=steps)
    assert_close(history[-1, 0], flat(models[0]))


ACCUMULATED = 3


def fit_accumulating(rank: int, world: int) -> Tensor:
    trainer = make_trainer(
        LocoStrategy(LocalSGD(), sync_every=2),
        max_steps=4,
        accumulate_grad_batches=ACCUMULATED,
        use_distributed_sampler=False,
    )
    module = TinyModule(lr=0.05)
    trainer.fit(module, make_loader(rank, 4 * ACCUMULATED))
    return flat(module)


def engine_accumulating(rank: int, world: int) -> Tensor:
    model = make_model(seed=rank)
    optimizer = SGD(model.parameters())
    engine = StepEngine(model, LocalSGD(), sync_every=2)
    made = [_accumulated_step(model, optimizer, rank, step) or engine.step() for step in range(4)]
    assert made == [False, True, False, True]
    engine.close()
    return flat(model)


def _accumulated_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int
) -> None:
    first = ACCUMULATED * step
    batches = [worker_batch(worker, first + k) for k in range(ACCUMULATED)]
    train_step(model, optimizer, *batches)


@pytest.mark.parametrize("run", [fit_accumulating, engine_accumulating])
def test_sync_every_counts_optimizer_steps_not_batches(pool: Pool, run: Any) -> None:
    models = [make_model() for _ in range(2)]
    optimizers = [SGD(model.parameters()) for model in models]
    steps = [0, 0]
    simulation = Simulation(models, LocalSGD(), sync_every=2)

    def local_step(worker: int) -> None:
        _accumulated_step(models[worker], optimizers[worker], worker, steps[worker])
        steps[worker] += 1

    simulation.run(local_step, 2)
    for result in pool.run(run, world=2):
        assert_close(result, simulation.consensus())


def test_topology_and_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="LocalSGD averages over all workers and takes no topo"):
        LocalSGD().prepare(4, Ring())
    with pytest.raises(ValueError, match="overlap=True needs an algorithm with outer parameters"):
        RoundSettings(LocalSGD(), EverySteps(overlap=True))
