"""Parameters of every kind: precision, missing gradients, frozen, tied, strided, mixed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_loco.distributed.worker_status import WorkerStatus
from tests.harness.pool import Pool, PoolEnvironment
from tests.harness.small_model import TinyModule, flat, make_model, worker_batch
from tests.strategies.families import fit_with, strategy_of
from tests.strategies.plain_runs import LR, fit, simulate

# ------------------------------------------------------------------------------ precision


class FloatModule(LightningModule):
    """A float32 network, which Lightning's precision plugins may cast."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model().float()
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        self.dtypes.add(self.model(inputs).dtype)
        return (self.model(inputs).squeeze(-1) - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class FloatData(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, worker: int, num_steps: int) -> None:
        self.batches = [worker_batch(worker, step) for step in range(num_steps)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.batches[step]
        return inputs.float(), target.float()


def fit_in_precision(
    rank: int, world: int, precision: str
) -> tuple[Tensor, set[torch.dtype], int, torch.dtype]:
    module = FloatModule()
    loader = DataLoader(FloatData(rank, 12), batch_size=None)
    settings: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # Lightning offers it on GPUs only
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        settings = {"plugins": [PoolEnvironment(), plugin]}
    outer: list[torch.dtype] = []

    class Record(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
            outer.append(trainer.strategy.engine.state_dict()["shared"][0]["state"]["outer"].dtype)

    strategy = fit(rank, module, 12, loader=loader, callbacks=[Record()], **settings)
    return flat(module), module.dtypes, strategy.statistics.rounds, outer[0]


@pytest.mark.parametrize(
    ("precision", "of_parameters", "of_outputs"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("16-mixed", torch.float32, torch.float16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision(
    pool: Pool, precision: str, of_parameters: torch.dtype, of_outputs: torch.dtype
) -> None:
    results = pool.run(fit_in_precision, precision, world=2)
    exact = simulate(2, 4)
    for weights, dtypes, num_rounds, outer in results:
        assert dtypes == {of_outputs}
        assert num_rounds == 3
        assert outer == torch.float32
        assert weights.dtype == of_parameters
        assert torch.equal(weights, results[0][0])
        torch.testing.assert_close(weights.double(), exact, rtol=0.05, atol=0.05)


def fit_by_clock(rank: int, world: int, precision: str) -> tuple[Tensor, set[torch.dtype]]:
    module, loader = FloatModule(), DataLoader(FloatData(rank, 20), batch_size=None)
    fit_with(strategy_of("async_model_average"), module, loader, precision=precision)
    return flat(module), module.dtypes


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_of_averages_by_the_clock(pool: Pool, precision: str) -> None:
    results = pool.run(fit_by_clock, precision, world=2)
    for weights, dtypes in results:
        assert dtypes == {torch.bfloat16}
        assert torch.equal(weights, results[0][0])
        assert torch.isfinite(weights).all()


def half_model() -> nn.Sequential:
    return make_model().bfloat16()


def half_step(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
    inputs, target = worker_batch(worker, step)
    optimizer.zero_grad()
    (model(inputs.bfloat16()).squeeze(-1) - target.bfloat16()).square().mean().backward()
    optimizer.step()


def test_bfloat16_parameters_are_averaged_in_float32(pool: Pool) -> None:
    expected = simulate(2, 4, half_step, half_model)
    assert expected.dtype == torch.float32
    for weights, *_ in pool.run(fit_in_precision, "bf16-true", world=2):
        assert torch.equal(weights, expected.bfloat16())


# ------------------------------------------------------------------------- parameters


class FrozenModule(TinyModule):
    """The first layer is frozen, and differs between ranks before training."""

    def __init__(self, rank: int) -> None:
        super().__init__(lr=LR)
        self.model[0].requires_grad_(False)
        if rank > 0:
            self.model[0].weight.data.add_(rank)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model[2].parameters(), lr=LR)


def fit_frozen(rank: int, world: int) -> tuple[Tensor, Tensor, int]:
    module = FrozenModule(rank)
    bytes_sent: list[int] = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            bytes_sent.append(trainer.strategy.statistics.bytes_sent)

    fit(rank, module, 6, callbacks=[Record()])
    return flat(module.model[0]), flat(module.model[2]), bytes_sent[-1]


def test_frozen_parameters_are_neither_sent_nor_changed(pool: Pool) -> None:
    def make() -> nn.Module:
        model = make_model()
        model[0].requires_grad_(False)
        return model

    for frozen, trained, bytes_sent in pool.run(fit_frozen, world=2):
        assert torch.equal(frozen, flat(make_model()[0]))
        torch.testing.assert_close(trained, simulate(2, 2, make=make), rtol=0, atol=1e-12)
        rows_bytes = 2 * WorkerStatus.width(0) * 8  # statuses of the two workers
        assert (
            bytes_sent == trained.nbytes + rows_bytes
        )  # 2 (N - 1) / N times the trainable parameters


def images(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * worker + step)
    return torch.randn(2, 3, 6, 6, generator=generator), torch.randn(2, generator=generator)


class ImageModule(LightningModule):
    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 1)
        )
        self.model.to(memory_format=memory_format)
        self.memory_format = memory_format

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        outputs = self.model(inputs.to(memory_format=self.memory_format))
        return (outputs.squeeze(-1) - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def fit_images(rank: int, world: int, memory_format: torch.memory_format) -> tuple[Tensor, bool]:
    module = ImageModule(memory_format)
    loader = DataLoader([images(rank, step) for step in range(6)], batch_size=None)
    fit(rank, module, 6, loader=loader)
    kept = module.model[0].weight.is_contiguous(memory_format=memory_format)
    return flat(module), kept


def test_channels_last_is_kept_and_gives_the_same_result(pool: Pool) -> None:
    (plain, _), _ = pool.run(fit_images, torch.contiguous_format, world=2)
    for weights, kept in pool.run(fit_images, torch.channels_last, world=2):
        assert kept
        torch.testing.assert_close(weights, plain, rtol=1e-4, atol=1e-5)


class MixedNet(nn.Module):
    """Layers of three floating-point types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4).double()
        self.second = nn.Linear(4, 4).bfloat16()
        self.third = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs)).bfloat16()
        return self.third(self.second(hidden).float()).double()


def fit_mixed(rank: int, world: int) -> list[Tensor]:
    module = TinyModule(lr=LR)
    module.model = MixedNet()
    fit(rank, module, 6)
    return [p.detach() for p in module.parameters()]


def test_parameters_of_several_dtypes(pool: Pool) -> None:
    expected = simulate(2, 2, make=MixedNet).split([12, 4, 16, 4, 4, 1])
    for parameters in pool.run(fit_mixed, world=2):
        assert [p.dtype for p in parameters] == [p.dtype for p in MixedNet().parameters()]
        for parameter, flat_expected in zip(parameters, expected, strict=True):
            assert torch.equal(parameter.reshape(-1), flat_expected.to(parameter.dtype))
