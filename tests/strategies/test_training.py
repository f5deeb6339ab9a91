"""Training in the styles of Lightning users equals a plain loop with the same local steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_loco import GASLoC, LocalSGD
from tests.harness.pool import Pool, PoolEnvironment, PoolError
from tests.harness.small_model import (
    TinyModule,
    flat,
    loss_of,
    make_model,
    train_step,
    worker_batch,
)
from tests.harness.toys import LocalStep, plain_step
from tests.strategies.plain_runs import LR, fit, simulate

CRITIC_STEPS = 3

# ------------------------------------------------ modules, and the same steps without Lightning


class ManualModule(TinyModule):
    """The small model with manual optimization."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.model, batch))
        optimizer.step()


class TwoNets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Linear(3, 2).double()
        self.critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def critic_loss(self, batch: tuple[Tensor, Tensor], repeat: int) -> Tensor:
        inputs, target = batch
        fake = self.generator(inputs).detach() + repeat
        return (self.critic(fake).squeeze(-1) - target).square().mean()

    def generator_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.critic(self.generator(batch[0])).square().mean()


class AdversarialModule(LightningModule):
    """Three critic steps for each generator step, with toggled optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nets = TwoNets()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        worker = self.trainer.strategy.engine.worker
        # A round of 6 local steps is due after every second batch, and never within one.
        assert worker.round_index == batch_idx // 2
        for_generator, for_critic = self.optimizers()
        for repeat in range(CRITIC_STEPS):
            self.descend(for_critic, self.nets.critic_loss(batch, repeat))
        loss = self.nets.generator_loss(batch)
        self.descend(for_generator, loss)
        assert worker.round_index == batch_idx // 2
        assert worker.steps == CRITIC_STEPS * (batch_idx + 1)
        return {"loss": loss.detach()}

    def descend(self, optimizer: Any, loss: Tensor) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.nets.generator.parameters(), lr=LR),
            torch.optim.SGD(self.nets.critic.parameters(), lr=LR),
        ]


def adversarial_step(worker: int, model: Any, _: Any, step: int) -> None:
    batch = worker_batch(worker, step)

    def descend(net: nn.Module, loss: Tensor) -> None:
        parameters = list(net.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.data.sub_(gradient, alpha=LR)

    for repeat in range(CRITIC_STEPS):
        descend(model.critic, model.critic_loss(batch, repeat))
    descend(model.generator, model.generator_loss(batch))


def accumulating_step(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
    batches = [worker_batch(worker, batch) for batch in (2 * step, 2 * step + 1)]
    train_step(model, optimizer, *batches)


def clipped_by_value(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, worker_batch(worker, step)).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()


def is_skipped(worker: int, step: int) -> bool:
    """Return whether a step has no effect, as two steps of worker 1."""
    return worker == 1 and step in (1, 2)


def skipping_step(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
    if not is_skipped(worker, step):
        plain_step(worker, model, optimizer, step)


class OverflowingModule(TinyModule):
    """Has infinite gradients in some steps, like float16."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        return loss * torch.inf if is_skipped(self.global_rank, batch_idx) else loss

    def on_train_end(self) -> None:
        scale = self.trainer.precision_plugin.scaler.get_scale()
        assert scale == 2.0 ** (8 if self.global_rank == 1 else 10)


def float16() -> list[Any]:
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))]


class ScheduledModule(TinyModule):
    """Halves the learning rate after every second local step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.optimizers().param_groups[0]["lr"] == LR * 0.5 ** (batch_idx // 2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def scheduled_step(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["lr"] = LR * 0.5 ** (step // 2)
    plain_step(worker, model, optimizer, step)


def repeating_step(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
    plain_step(worker, model, optimizer, step % 6)


def step_of_five(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
    if step < 5:
        plain_step(worker, model, optimizer, step)


class Branches(nn.Module):
    """A worker uses only one branch, so gradients of the other one are None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(3, 1).double() for _ in range(2)])

    def loss(self, worker: int, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(self.branches[worker % 2], batch)


class BranchModule(TinyModule):
    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.model = Branches()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model.loss(self.global_rank, batch)

    def on_train_end(self) -> None:
        unused = self.model.branches[(self.global_rank + 1) % 2]
        assert all(p.grad is None for p in unused.parameters())


def branch_step(worker: int, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model.loss(worker, worker_batch(worker, step)).backward()
    optimizer.step()


class TiedNet(nn.Module):
    """Two layers that share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3).double()
        self.second = nn.Linear(3, 3).double()
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 1).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(inputs))))


class TiedModule(TinyModule):
    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.model = TiedNet()

    def on_train_end(self) -> None:
        assert self.model.first.weight is self.model.second.weight


@dataclasses.dataclass(frozen=True)
class Run:
    """A fit, and the plain loop with the same result.

    Args:
        batches: Of each worker in an epoch.
        rounds: Rounds of the plain loop; the last one is the mean at the end of the fit.
        module: Makes the module.
        step: Its local step in the plain loop.
        trainer: Arguments of the Trainer.
        settings: Arguments of the strategy and of the plain loop, besides ``sync_every=3``.
        sync_every: Optimizer steps between rounds, if the plain loop counts them differently.
        make: Makes the model of the plain loop.
        steps: ``global_step`` of each worker.
        world: Number of workers.
        plugins: Makes plugins of the Trainer.
    """

    batches: int
    rounds: int
    module: Callable[[], LightningModule] = partial(TinyModule, lr=LR)
    step: LocalStep = plain_step
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sync_every: int | None = None
    make: Callable[[], nn.Module] = make_model
    steps: tuple[int, ...] | None = None
    world: int = 2
    plugins: Callable[[], list[Any]] = list


RUNS: dict[str, Run] = {
    "optimizer by hand": Run(12, 4, ManualModule),
    "optimizers with different numbers of steps": Run(
        6,
        3,
        AdversarialModule,
        adversarial_step,
        settings={"sync_every": 2},
        sync_every=2 * CRITIC_STEPS,
        make=TwoNets,
    ),
    "accumulated batches are one local step": Run(
        12, 2, step=accumulating_step, trainer={"accumulate_grad_batches": 2}
    ),
    "gradients are clipped locally by norm": Run(
        6,
        2,
        step=partial(plain_step, clip=0.1),
        trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"},
    ),
    "gradients are clipped locally by value": Run(
        6,
        2,
        step=clipped_by_value,
        trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "steps that the gradient scaler skips count": Run(
        12, 4, partial(OverflowingModule, lr=LR), skipping_step, plugins=float16
    ),
    "schedules are local": Run(6, 2, partial(ScheduledModule, lr=LR), scheduled_step),
    "rounds are independent of epochs": Run(
        6,
        3,
        step=repeating_step,
        trainer={"max_epochs": 2},
        settings={"sync_every": 4},
        steps=(12, 12),
    ),
    "steps after the last round count": Run(5, 2, step=step_of_five),
    "each worker has its number of local steps": Run(
        12,
        4,
        trainer={"max_epochs": -1, "max_steps": 12},
        settings={"sync_every": [3, 1, 2], "algorithm": GASLoC(), "topology": "ring"},
        steps=(12, 4, 8),
        world=3,
    ),
    "parameters without gradients on some workers": Run(
        6, 2, BranchModule, branch_step, make=Branches, world=3
    ),
    "tied weights remain tied": Run(6, 2, TiedModule, make=TiedNet),
}


def fit_run(rank: int, world: int, name: str) -> tuple[Tensor, int, int, int]:
    run = RUNS[name]
    module, plugins = run.module(), [PoolEnvironment(), *run.plugins()]
    settings = {**run.settings, **run.trainer, "plugins": plugins}
    if run.sync_every is not None:
        settings["sync_every"] = run.sync_every
    strategy = fit(rank, module, run.batches, **settings)
    trainer = module.trainer
    return flat(module), strategy.statistics.rounds, trainer.global_step, trainer.max_steps


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_local_steps_and_rounds_of_a_plain_loop(pool: Pool, name: str) -> None:
    run = RUNS[name]
    expected = simulate(
        run.world, run.rounds, run.step, run.make, **{"sync_every": 3, **run.settings}
    )
    results = pool.run(fit_run, name, world=run.world)
    for weights, num_rounds, _, max_steps in results:
        assert num_rounds == run.rounds - 1
        assert max_steps == run.trainer.get("max_steps", -1)  # as the user has set it
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
    assert run.steps in (None, tuple(steps for _, _, steps, _ in results))


# -------------------------------------------------------------------- data, and other identities


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """A dataset whose samples are their indices."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = worker_batch(0, index, size=1)
        return torch.cat([inputs[0, :2], torch.tensor([float(index)]).double()]), target[0]


class CountingModule(TinyModule):
    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.seen: list[list[int]] = []
        self.rounds: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen[-1] += batch[0][:, 2].int().tolist()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.rounds.append(self.trainer.strategy.statistics.rounds)


def fit_shares(rank: int, world: int) -> tuple[list[list[int]], list[int]]:
    module = CountingModule()
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
    fit(
        rank,
        module,
        0,
        sync_every=[3, 1, 2],
        loader=loader,
        max_epochs=2,
        use_distributed_sampler=True,
    )
    return module.seen, module.rounds


def test_data_is_divided_in_proportion_to_the_local_steps(pool: Pool) -> None:
    results = pool.run(fit_shares, world=3)
    for epoch in range(2):
        parts = [seen[epoch] for seen, _ in results]
        assert [len(part) for part in parts] == [24, 8, 16]
        assert sorted(sum(parts, [])) == list(range(48))
    assert results[0][0][0] != results[0][0][1]  # shuffled again in each epoch
    assert [rounds for _, rounds in results] == [[3, 7]] * 3


class SkippingModule(TinyModule):
    """Returns None in some steps."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        if is_skipped(self.global_rank, batch_idx):
            return None
        return loss_of(self.model, batch)


def fit_skipping(rank: int, world: int) -> None:
    fit(rank, SkippingModule(lr=LR), 12)


def test_returning_none_on_one_worker_ends_all_workers(pool: Pool) -> None:
    # Lightning refuses it in distributed training; the other worker must not wait for long.
    with pytest.raises(PoolError) as caught:
        pool.run(fit_skipping, world=2)
    messages = [caught.value.failures[rank].message for rank in (0, 1)]
    assert all("by returning None in distributed training is not supported" in m for m in messages)
    assert messages[0].startswith("Worker 1 failed:")


def fit_one_worker(rank: int, world: int) -> tuple[Tensor, int]:
    module = TinyModule(lr=LR)
    strategy = fit(rank, module, 6, algorithm=LocalSGD())
    return flat(module), strategy.statistics.rounds


def test_one_worker_is_plain_training(pool: Pool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(6):
        plain_step(0, model, optimizer, step)
    ((weights, num_rounds),) = pool.run(fit_one_worker, world=1)
    assert num_rounds == 1
    assert torch.equal(weights, flat(model))
