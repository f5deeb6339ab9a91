"""The model that is validated, and the model in the module after fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from lightning_loco import DiLoCo, GASLoC, LocalSGD, LocoStrategy
from lightning_loco.algorithms import Algorithm
from tests.cases import CASES, Case, without_variants
from tests.harness.pool import Pool, make_trainer, run_each
from tests.harness.small_model import (
    TinyModule,
    flat,
    loss_of,
    make_loader,
    make_model,
    norm_model,
    worker_batch,
)
from tests.strategies.families import fit_with, strategy_of

LR = 0.05
Picture = tuple[Tensor, Tensor]
"""Flat parameters and flat floating-point buffers."""


def picture(module: nn.Module) -> Picture:
    buffers = [b.reshape(-1) for b in module.buffers() if b.is_floating_point()]
    return flat(module), torch.cat(buffers).clone()


class RecordingModule(LightningModule):
    """Records its parameters and statistics before and after each step, and in validation."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.model = norm_model(seed=rank)  # all start from the model of worker 0
        self.started: list[Picture] = []
        self.trained: list[Picture] = []
        self.validated: list[Picture] = []
        self.restored: list[Picture] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.started.append(picture(self.model))
        return loss_of(self.model, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append(picture(self.model))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(picture(self.model))

    def on_train_epoch_end(self) -> None:
        self.restored.append(picture(self.model))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def fit_recording(rank: int, world: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Take six local steps with a validation in the middle of the second round, then six more."""
    module, data = RecordingModule(rank), (make_loader(rank, 6), make_loader(0, 2))
    strategy = LocoStrategy(sync_every=4, **settings)
    fit_with(strategy, module, *data, max_epochs=2, num_sanity_val_steps=1)
    return {
        "started": module.started,
        "trained": module.trained,
        "validated": module.validated,
        "restored": module.restored,
        "final": picture(module),
        "running": module.model[1].num_batches_tracked.item(),
    }


def mean_of(pictures: list[Picture]) -> Picture:
    parameters, buffers = zip(*pictures, strict=True)
    return torch.stack(parameters).mean(0), torch.stack(buffers).mean(0)


def assert_same(actual: Picture, expected: Picture, atol: float = 1e-12) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("algorithm", [LocalSGD(), DiLoCo()], ids=["local_sgd", "diloco"])
def test_validation_uses_the_mean_of_the_workers(pool: Pool, algorithm: Algorithm) -> None:
    results = pool.run(fit_recording, {"algorithm": algorithm}, world=3)
    for epoch, last_batch in ((1, 5), (2, 11)):
        local = [result["trained"][last_batch] for result in results]
        assert not torch.equal(local[0][1], local[1][1])  # BatchNorm statistics are local
        for result in results:
            assert_same(result["validated"][epoch], mean_of(local))
    assert not torch.equal(results[0]["trained"][5][0], results[1]["trained"][5][0])
    for result in results:
        assert_same(result["restored"][0], result["trained"][5], atol=0)
        assert_same(result["restored"][1], result["trained"][11], atol=0)


def test_sanity_check_uses_the_start_of_worker_0(pool: Pool) -> None:
    start = picture(norm_model(seed=0))
    for result in pool.run(fit_recording, {"algorithm": GASLoC(), "topology": "ring"}, world=3):
        assert len(result["validated"]) == 3
        assert_same(result["validated"][0], start)


def test_validation_of_outer_parameters(pool: Pool) -> None:
    results = pool.run(fit_recording, {"algorithm": DiLoCo(), "evaluate": "outer"}, world=2)
    outer = results[0]["started"][4][0]  # right after the first round
    mean = mean_of([result["trained"][-1] for result in results])
    for result in results:
        assert torch.equal(result["started"][4][0], outer)
        assert torch.equal(result["validated"][1][0], outer)
        assert_same(result["restored"][0], result["trained"][5], atol=0)
        assert_same(result["final"], mean)


def test_rounds_are_made_before_the_next_step_and_not_at_the_end(pool: Pool) -> None:
    results = pool.run(fit_recording, {"algorithm": DiLoCo()}, world=2)
    mean = mean_of([result["trained"][-1] for result in results])
    for result in results:
        pairs = zip(result["started"][1:], result["trained"], strict=False)
        moved = [i for i, (now, then) in enumerate(pairs, 1) if not torch.equal(now[0], then[0])]
        assert moved == [4, 8]
        assert_same(result["final"], mean)


def end_after(rank: int, world: int, case: Case) -> list[bool]:
    """Return whether fits of several lengths end with the model of their last validation."""
    same = []
    for max_steps, validate_every in ((9, 9), (11, 11), (12, 1)):
        module, data = RecordingModule(rank), (make_loader(rank, 20), make_loader(0, 1))
        settings = {"max_epochs": None, "max_steps": max_steps, "num_sanity_val_steps": 0}
        strategy = case.strategy(4, timeout_s=20)
        fit_with(strategy, module, *data, val_check_interval=validate_every, **settings)
        assert len(module.validated) == max_steps // validate_every
        final, validated = picture(module), module.validated[-1]
        same.append(all(map(torch.equal, final, validated)))
    return same


def test_fit_returns_the_model_of_its_last_validation(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    """With every method, during and between rounds, and with pending results."""
    cases = {name: CASES[name] for name in without_variants()}
    # With rounds by the clock, rounds also start and end at sync points.
    cases = {name: case for name, case in cases.items() if not case.by_clock}
    found = run_each(pool, end_after, {name: [case] for name, case in cases.items()}, world=2)
    for name in cases:
        with subtests.test(name):
            assert found[name] == [[True] * 3] * 2


def test_local_evaluation(pool: Pool) -> None:
    results = pool.run(fit_recording, {"algorithm": LocalSGD(), "evaluate": "local"}, world=2)
    for result in results:
        assert_same(result["validated"][1], result["trained"][5], atol=0)
    assert not torch.equal(results[0]["validated"][1][0], results[1]["validated"][1][0])


def test_fit_returns_the_consensus_or_local_parameters(pool: Pool) -> None:
    settings = {"algorithm": GASLoC(), "topology": "ring"}
    average = pool.run(fit_recording, {**settings, "finalize": "average"}, world=4)
    keep = pool.run(fit_recording, {**settings, "finalize": "keep"}, world=4)
    consensus = mean_of([result["final"] for result in keep])
    assert not torch.equal(keep[0]["final"][0], keep[1]["final"][0])
    assert not torch.equal(keep[0]["final"][1], keep[1]["final"][1])
    for result in average:
        assert_same(result["final"], consensus)
        assert torch.equal(result["final"][0], average[0]["final"][0])
        assert result["running"] == 12
    for result in keep:
        assert_same((result["final"][1],), (result["trained"][-1][1],), atol=0)


# ------------------------------------------------------------------------------- metrics


class MeasuredModule(TinyModule):
    """Validates with self.log(sync_dist=True) and with a torchmetrics metric."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.error = MeanSquaredError()
        self.numbers: dict[str, float] = {}

    def measure(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        inputs, target = batch
        self.error(self.model(inputs).squeeze(-1), target)
        self.log(f"{stage}_loss", loss_of(self.model, batch), sync_dist=True, batch_size=4)
        self.log(f"{stage}_error", self.error, batch_size=4)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.measure("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.measure("test", batch)


def fit_and_measure(rank: int, world: int) -> dict[str, Any]:
    module = MeasuredModule()
    trainer = make_trainer(
        LocoStrategy(DiLoCo(), sync_every=3), max_epochs=1, use_distributed_sampler=False
    )
    before = trainer.validate(module, make_loader(rank, 2), verbose=False)[0]
    start = flat(module)
    trainer.fit(module, make_loader(rank, 6), make_loader(rank, 2))
    during = {key: value.item() for key, value in trainer.callback_metrics.items()}
    after_one = flat(module)
    after = trainer.validate(module, make_loader(rank, 2), verbose=False)[0]
    tested = trainer.test(module, make_loader(rank, 2), verbose=False)[0]
    assert torch.equal(flat(module), after_one)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader(rank, 6), make_loader(rank, 2))
    return {
        "before": before,
        "during": during,
        "after": after,
        "tested": tested,
        "weights": [start, after_one, flat(module)],
        "rounds": trainer.strategy.statistics.rounds,
    }


def mean_loss(weights: Tensor, world: int) -> float:
    model = make_model()
    nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    losses = [loss_of(model, worker_batch(worker, s)) for worker in range(world) for s in range(2)]
    return torch.stack(losses).mean().item()


def test_metrics_and_every_entry_of_the_trainer(pool: Pool) -> None:
    results = pool.run(fit_and_measure, world=2)
    start, after_one, after_two = results[0]["weights"]
    assert not torch.equal(start, after_one)
    assert not torch.equal(after_one, after_two)
    for result in results:
        for weights, expected in zip(result["weights"], (start, after_one, after_two), strict=True):
            assert torch.equal(weights, expected)
        for stage, prefix, weights in (
            ("before", "val", start),
            ("during", "val", after_one),
            ("after", "val", after_one),
            ("tested", "test", after_one),
        ):
            expected = pytest.approx(mean_loss(weights, 2), rel=1e-6)
            assert result[stage][f"{prefix}_loss"] == expected
            assert result[stage][f"{prefix}_error"] == expected
        assert result["rounds"] == 1


class LocalMetricModule(TinyModule):
    """A metric that gets worse only on worker 1, from the third epoch on."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        worse = self.global_rank == 1 and self.current_epoch >= 2
        self.log("val_loss", 100.0 if worse else 10.0 - self.current_epoch, batch_size=4)


def fit_until_stopped(rank: int, world: int) -> tuple[int, int]:
    stopping = EarlyStopping("val_loss", patience=1)
    data = make_loader(rank, 3), make_loader(rank, 1)
    module, strategy = LocalMetricModule(lr=LR), strategy_of("gasloc", 4)
    trainer = fit_with(strategy, module, *data, max_epochs=20, callbacks=[stopping])
    return trainer.current_epoch, trainer.global_step


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_early_stopping_stops_all_workers_together(pool: Pool) -> None:
    assert pool.run(fit_until_stopped, world=3) == [(3, 9)] * 3
