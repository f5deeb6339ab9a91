"""Training loops in the style of Lightning users: rounds follow the same local steps."""

from __future__ import annotations

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
from tests.harness.toys import plain_step
from tests.strategies.plain_runs import LR, assert_all_close, fit, simulate

# ------------------------------------------------------------------- manual optimization


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


def fit_manual(rank: int, world: int) -> Tensor:
    module = ManualModule()
    fit(rank, module, 12)
    return flat(module)


def test_manual_optimization(pool: Pool) -> None:
    assert_all_close(pool.run(fit_manual, world=2), simulate(2, 4))


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


CRITIC_STEPS = 3


class AdversarialModule(LightningModule):
    """Three critic steps for each generator step, with toggled optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nets = TwoNets()
        self.rounds_inside: list[tuple[int, int]] = []
        self.steps: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        engine = self.trainer.strategy.engine
        before = engine.worker.round_index
        for_generator, for_critic = self.optimizers()
        self.toggle_optimizer(for_critic)
        for repeat in range(CRITIC_STEPS):
            loss = self.nets.critic_loss(batch, repeat)
            for_critic.zero_grad()
            self.manual_backward(loss)
            for_critic.step()
        self.untoggle_optimizer(for_critic)
        self.toggle_optimizer(for_generator)
        loss = self.nets.generator_loss(batch)
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.rounds_inside.append((before, engine.worker.round_index))
        self.steps.append(engine.worker.steps)
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.nets.generator.parameters(), lr=LR),
            torch.optim.SGD(self.nets.critic.parameters(), lr=LR),
        ]


def fit_adversarial(rank: int, world: int) -> tuple[Tensor, list[tuple[int, int]], list[int], int]:
    module = AdversarialModule()
    strategy = fit(rank, module, 6, sync_every=2 * CRITIC_STEPS)
    return flat(module), module.rounds_inside, module.steps, strategy.statistics.rounds


def adversarial_step(worker: int, model: Any, _: Any, step: int) -> None:
    batch = worker_batch(worker, step)

    def descend(net: nn.Module, loss: Tensor) -> None:
        parameters = list(net.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.data.sub_(gradient, alpha=LR)

    for repeat in range(CRITIC_STEPS):
        descend(model.critic, model.critic_loss(batch, repeat))
    descend(model.generator, model.generator_loss(batch))


def test_several_optimizers_with_different_numbers_of_steps(pool: Pool) -> None:
    expected = simulate(2, 3, adversarial_step, TwoNets, sync_every=2)
    for weights, rounds_inside, steps, num_rounds in pool.run(fit_adversarial, world=2):
        # A round of 6 local steps is due after every second batch, and never within one.
        assert rounds_inside == [(i // 2, i // 2) for i in range(6)]
        assert steps == [CRITIC_STEPS * (i + 1) for i in range(6)]
        assert num_rounds == 2
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- automatic optimization


def fit_accumulating(rank: int, world: int) -> tuple[Tensor, int]:
    module = TinyModule(lr=LR)
    strategy = fit(rank, module, 12, accumulate_grad_batches=2)
    return flat(module), strategy.statistics.rounds


def accumulating_step(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
    batches = [worker_batch(worker, batch) for batch in (2 * step, 2 * step + 1)]
    train_step(model, optimizer, *batches)


def test_accumulated_batches_make_one_local_step(pool: Pool) -> None:
    expected = simulate(2, 2, accumulating_step)
    for weights, num_rounds in pool.run(fit_accumulating, world=2):
        assert num_rounds == 1
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def fit_clipped(rank: int, world: int, by: str) -> Tensor:
    module = TinyModule(lr=LR)
    fit(rank, module, 6, gradient_clip_val=0.1, gradient_clip_algorithm=by)
    return flat(module)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_gradients_are_clipped_locally(pool: Pool, by: str) -> None:
    def clipped_step(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        if by == "norm":
            train_step(model, optimizer, worker_batch(worker, step), clip=0.1)
            return
        optimizer.zero_grad()
        loss_of(model, worker_batch(worker, step)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()

    assert_all_close(pool.run(fit_clipped, by, world=2), simulate(2, 2, clipped_step))


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


def fit_overflowing(rank: int, world: int) -> tuple[Tensor, int, float]:
    module = OverflowingModule(lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    strategy = fit(rank, module, 12, plugins=[PoolEnvironment(), precision])
    return flat(module), strategy.statistics.rounds, scaler.get_scale()


def test_a_step_skipped_by_the_gradient_scaler_does_not_shift_rounds(pool: Pool) -> None:
    expected = simulate(2, 4, skipping_step)
    results = pool.run(fit_overflowing, world=2)
    assert [scale for _, _, scale in results] == [2.0**10, 2.0**8]
    for weights, num_rounds, _ in results:
        assert num_rounds == 3
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- time and schedules


class ScheduledModule(TinyModule):
    """Halves the learning rate after every second local step."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.rates: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit_scheduled(rank: int, world: int) -> tuple[Tensor, list[float]]:
    module = ScheduledModule()
    fit(rank, module, 6)
    return flat(module), module.rates


def test_learning_rate_schedules_are_local(pool: Pool) -> None:
    def scheduled_step(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] = LR * 0.5 ** (step // 2)
        plain_step(worker, model, optimizer, step)

    expected = simulate(2, 2, scheduled_step)
    for weights, rates in pool.run(fit_scheduled, world=2):
        assert rates == [LR * 0.5 ** (step // 2) for step in range(6)]
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def fit_two_epochs(rank: int, world: int) -> tuple[Tensor, int, int]:
    module = TinyModule(lr=LR)
    strategy = fit(rank, module, 6, sync_every=4, max_epochs=2)
    return flat(module), strategy.statistics.rounds, module.trainer.global_step


def test_rounds_are_independent_of_epochs(pool: Pool) -> None:
    def repeating_step(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        plain_step(worker, model, optimizer, step % 6)

    expected = simulate(2, 3, repeating_step, sync_every=4)
    for weights, num_rounds, global_step in pool.run(fit_two_epochs, world=2):
        assert (num_rounds, global_step) == (2, 12)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def test_steps_after_the_last_round_count(pool: Pool) -> None:
    def step_of_five(worker: int, model: nn.Module, optimizer: Any, step: int) -> None:
        if step < 5:
            plain_step(worker, model, optimizer, step)

    assert_all_close(pool.run(fit_five, world=2), simulate(2, 2, step_of_five))


def fit_five(rank: int, world: int) -> Tensor:
    module = TinyModule(lr=LR)
    fit(rank, module, 5)
    return flat(module)


# ------------------------------------------------- different local steps on each worker


def fit_unequal(rank: int, world: int) -> tuple[Tensor, int, int, int]:
    module = TinyModule(lr=LR)
    strategy = fit(
        rank,
        module,
        12,
        sync_every=[3, 1, 2],
        algorithm=GASLoC(),
        topology="ring",
        max_epochs=-1,
        max_steps=12,
    )
    trainer = module.trainer
    return flat(module), trainer.global_step, strategy.statistics.rounds, trainer.max_steps


def test_each_worker_makes_its_own_number_of_local_steps(pool: Pool) -> None:
    expected = simulate(3, 4, sync_every=[3, 1, 2], algorithm=GASLoC(), topology="ring")
    results = pool.run(fit_unequal, world=3)
    assert [steps for _, steps, _, _ in results] == [12, 4, 8]
    for weights, _, num_rounds, max_steps in results:
        assert num_rounds == 3
        assert max_steps == 12  # as the user has set it
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


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


# ---------------------------------------------------------------------------- one worker


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
