"""A remote optimizer with features of Lightning: metrics, callbacks, checkpoints, precision."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco._util.fault_points import on_reach
from lightning_loco.compression import Int8
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolEnvironment, PoolError
from tests.harness.small_model import (
    TinyModule,
    ValidatedModule,
    WorkerData,
    flat,
    loss_of,
    make_loader,
    worker_batch,
)
from tests.strategies.families import all_ranks, fit_part, fit_with, remote_or_ddp, remote_trainer

STEPS = 8


class Rates(Callback):
    """Records the learning rate that a monitor would log."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        configs = trainer.lr_scheduler_configs
        owner = configs[0].scheduler.optimizer if configs else trainer.optimizers[0]
        self.seen.append(owner.param_groups[0]["lr"])


def train(
    rank: int, world: int, module: TinyModule, num_workers: int | None, options: Any, settings: Any
) -> tuple[Tensor, list[float], list[float]]:
    """Return weights, learning rates and losses of a rank; DDP if ``num_workers`` is None."""
    rates = Rates()
    training = None if isinstance(module, Estimated) else make_loader(rank, STEPS)
    validation = make_loader(9, 2) if isinstance(module, ValidatedModule) else None
    settings = {"max_epochs": 2, "callbacks": [rates], **settings}
    strategy = remote_or_ddp(num_workers, **options)
    fit_with(strategy, module, training, validation, **settings)
    return flat(module), rates.seen, module.losses


class Plateau(ValidatedModule):
    """Has a schedule that depends on a validation metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=0, threshold=10.0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


class Groups(TinyModule):
    """Has two groups, a frozen parameter, and one without a gradient in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        first, *others = self.model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=0.01)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            return loss
        with torch.no_grad():
            offset = self.model[2].bias.clone()
        inputs, target = batch
        hidden = self.model[1](self.model[0](inputs))
        outputs = hidden @ self.model[2].weight.T + offset
        return (outputs.squeeze(-1) - target).square().mean()


class Estimated(TinyModule):
    """Has a schedule as long as the run, which Lightning computes from the data."""

    def train_dataloader(self) -> DataLoader[Any]:
        return make_loader(self.trainer.global_rank % 2, STEPS)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        assert steps == 2 * STEPS
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(TinyModule):
    """Uses manual optimization, with clipping."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ReadInHooks(TinyModule):
    """Records gradients and changes them, in every hook where this is allowed."""

    def record_norm(self) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.3)
        self.losses.append(norm.item())

    def on_after_backward(self) -> None:
        self.record_norm()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad += 0.1 * param.grad.sign()

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.record_norm()


class ReadWithGroups(ReadInHooks, Groups):
    """Also has a parameter without a gradient in every other step."""


class ReadInStep(TinyModule):
    """Changes gradients in its ``optimizer_step``."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        self.losses.append(nn.utils.clip_grad_norm_(self.parameters(), 0.3).item())
        optimizer.step()


class ReadByHand(Manual):
    """Accumulates gradients and changes them, with manual optimization."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with self.trainer.model.no_sync():
            self.manual_backward(TinyModule.training_step(self, batch, batch_idx))
        self.manual_backward(TinyModule.training_step(self, batch, batch_idx))
        self.losses.append(nn.utils.clip_grad_norm_(self.parameters(), 0.3).item())
        optimizer.step()


class DropsNan(TinyModule):
    """Has an infinite loss in a batch of one rank; a hook drops this gradient."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_bad = batch_idx == 3 and self.trainer.global_rank == 1
        return loss / 0 if is_bad else loss

    def on_after_backward(self) -> None:
        if any(not p.grad.isfinite().all() for p in self.parameters() if p.grad is not None):
            self.zero_grad()


MODULES = [Plateau, Groups, Estimated, Manual, ReadWithGroups, ReadInStep, ReadByHand, DropsNan]


@pytest.mark.parametrize(("kind", "num_tiers"), cover(MODULES, [2, 3], strength=1))
def test_modules_give_the_results_of_ddp(
    pool: Pool, kind: type[TinyModule], num_tiers: int
) -> None:
    found = pool.run(train, kind(), 2, {}, {}, world=1 + num_tiers)
    unused = {"find_unused_parameters": True}
    expected, rates, losses = pool.run(train, kind(), None, unused, {}, world=2)[0]
    for weights, own_rates, _ in found[:2]:
        assert torch.equal(weights, expected)
        assert own_rates == rates
    assert found[0][2] == losses
    assert torch.equal(found[-1][0], expected)
    assert kind is not Plateau or len(set(rates)) > 1


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {"accumulate_grad_batches": 3}),
        ({"num_servers": 2}, {"gradient_clip_val": 0.5}),
        ({"num_workers": 1, "replica_size": 2}, {}),
    ],
    ids=str,
)
def test_hooks_see_the_mean_gradient_of_ddp(
    pool: Pool, options: dict[str, int], settings: dict[str, Any]
) -> None:
    num_workers, world = options.pop("num_workers", 2), 2 + options.get("num_servers", 1)
    found = pool.run(train, ReadInHooks(), num_workers, options, settings, world=world)
    expected = pool.run(train, ReadInHooks(), None, {}, settings, world=2)
    for (weights, _, losses), of_ddp in zip(found[:2], expected, strict=True):
        assert torch.equal(weights, of_ddp[0])
        assert losses == of_ddp[2]  # including the norms


def test_hooks_see_a_mean_gradient_that_was_compressed(pool: Pool) -> None:
    found = pool.run(train, ReadInHooks(), 2, {"compression": "int8"}, {}, world=3)
    expected = pool.run(train, ReadInHooks(), None, {}, {}, world=2)
    for (_, _, losses), of_ddp in zip(found[:2], expected, strict=True):
        assert losses == pytest.approx(of_ddp[2], rel=0.05)


class Norms(Callback):
    """Records the gradient norm."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found.append(norm_of_gradients(module))


def norm_of_gradients(module: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()


class SkipsABatch(Manual):
    """Has no backward pass in one batch of one rank."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx != 1 or self.trainer.global_rank == 0:
            self.manual_backward(TinyModule.training_step(self, batch, batch_idx))
        optimizer.step()


def log_on_one_rank(rank: int, world: int) -> tuple[list[Tensor], Tensor]:
    module, norms = SkipsABatch(), Norms()
    data = make_loader(rank, 4 - rank)  # the first rank takes the last step alone
    fit_with(remote_or_ddp(2), module, data, callbacks=[norms] if rank == 0 else [])
    return norms.found, flat(module)


def test_a_callback_on_one_rank_sees_the_mean_of_all(pool: Pool) -> None:
    (norms, weights), *_ = pool.run(log_on_one_rank, world=3)
    module, expected = TinyModule(), []
    optimizer = module.configure_optimizers()
    for step, readers in enumerate([(0, 1), (0,), (0, 1), (0,)]):
        optimizer.zero_grad()
        for worker in readers:  # one without a backward pass counts as zero
            loss = loss_of(module.model, worker_batch(worker, step))
            (loss / (1 if step == 3 else 2)).backward()
        expected.append(norm_of_gradients(module))
        optimizer.step()
    torch.testing.assert_close(norms, expected)
    torch.testing.assert_close(weights, flat(module))


class Diverges(ReadInHooks):
    """Has an infinite loss on one rank."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (self.trainer.global_rank != 1)


def test_a_gradient_that_is_not_finite_after_hooks_names_its_worker(pool: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(train, Diverges(), 2, {}, {}, world=3)
    assert caught.value.failures[2].message.startswith("Worker 1: a gradient is not finite")


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_worker_of_two_ranks(pool: Pool, num_servers: int) -> None:
    options = {"replica_size": 2, "num_servers": num_servers}
    found = pool.run(train, ValidatedModule(), 1, options, {}, world=2 + num_servers)
    expected, _, losses = pool.run(train, ValidatedModule(), None, {}, {}, world=2)[0]
    assert torch.equal(found[0][0], expected)
    assert torch.equal(found[1][0], expected)
    assert found[0][2] == losses


@pytest.mark.parametrize("clip", [None, 0.5])
def test_two_servers_have_a_shard_each(pool: Pool, clip: float | None) -> None:
    settings = {"gradient_clip_val": clip}
    module = TinyModule(optimizer="Adam")
    found = pool.run(train, module, 2, {"num_servers": 2}, settings, world=4)
    expected, _, _ = pool.run(train, module, None, {}, settings, world=2)[0]
    assert torch.equal(found[0][0], expected)
    assert torch.equal(found[1][0], expected)
    start = flat(module)
    for weights, _, _ in found[2:]:  # each rank has changed only its shard
        changed = weights != start
        assert 0 < changed.sum() < len(start)
        assert torch.equal(weights[changed], expected[changed])


def test_bfloat16_compression(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(save_rounded, str(tmp_path / "one.ckpt"), world=3)
    expected, _, _ = pool.run(train, Single().float(), None, {}, {"max_epochs": 1}, world=2)[0]
    rounded, full = found[0]
    assert torch.equal(rounded, found[1][0])
    assert torch.equal(rounded, full.bfloat16().float())
    assert not torch.equal(rounded, full)
    torch.testing.assert_close(full, expected, rtol=0.05, atol=0.02)
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(torch.cat([v.reshape(-1) for v in saved.values()]), full)


def record_order(rank: int, world: int, path: str) -> list[str]:
    """Return the sync points and file changes while a checkpoint is saved."""
    done: list[str] = []
    with all_ranks() as environment:
        strategy = RemoteOptimizerStrategy(2, timeout_s=30)
        trainer = remote_trainer(environment, strategy, max_steps=2)
        module = TinyModule()

        def sync_point(purpose: str) -> None:
            done.append(purpose)
            RemoteOptimizerStrategy.sync_point(strategy, purpose)

        def save(*_: Any) -> None:
            if trainer.global_step == 2:
                with pytest.MonkeyPatch.context() as patch, on_reach(done.append):
                    patch.setattr(strategy, "sync_point", sync_point)
                    trainer.save_checkpoint(path)

        module.on_train_batch_end = save  # type: ignore[method-assign]
        trainer.fit(module, make_loader(rank, STEPS))
    return done


@pytest.mark.recovery
def test_a_checkpoint_is_renamed_after_another_sync_point(pool: Pool, tmp_path: Path) -> None:
    """So a worker 0 that was suspended until the others ended replaces no file."""
    first, second, _ = pool.run(record_order, str(tmp_path / "one.ckpt"), world=3)
    written = first.index("before a file is in its place")
    assert "before the main file is in its place" in first[written + 1 :]
    placed = first.index("before the main file is in its place")
    assert first[written + 1 : placed] == ["checkpoint"]
    assert second.count("checkpoint") == first.count("checkpoint")
    assert os.listdir(tmp_path) == ["one.ckpt"]


class Single(TinyModule):
    """Has float32 parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([part.float() for part in batch], batch_idx)  # type: ignore[arg-type]


def save_rounded(rank: int, world: int, path: str) -> tuple[Tensor, Tensor]:
    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(path)
            self.full = trainer.strategy.remote.full_precision_parameters() if rank == 0 else []

    save, module = Save(), Single().float()
    strategy = remote_or_ddp(2, compression="bf16")
    fit_with(strategy, module, make_loader(rank, STEPS), callbacks=[save])
    if rank != 0:
        return flat(module), flat(module)
    order = {id(param): index for index, param in enumerate(module.parameters())}
    full = sorted(save.full, key=lambda pair: order[id(pair[0])])
    return flat(module), torch.cat([value.reshape(-1) for _, value in full])


class Metric(ValidatedModule):
    """Has a metric, synchronized logs, and a sampler of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.seen: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        inputs, target = batch
        self.error(self.model(inputs).squeeze(-1), target)
        self.log("val_error", self.error)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", loss_of(self.model, batch), sync_dist=True)


def use_everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    loader = DataLoader(WorkerData(0, 32), batch_size=None)
    with all_ranks() as environment:
        save = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
        stop = EarlyStopping("val_loss", min_delta=1e9, patience=1)
        trainer = remote_trainer(
            environment,
            RemoteOptimizerStrategy(2, timeout_s=30),
            max_epochs=5,
            callbacks=[save, stop],
            enable_checkpointing=True,
            default_root_dir=folder,
            log_every_n_steps=1,
        )
        module = Metric()
        before = trainer.validate(module, loader, verbose=False)
        trainer.fit(module, loader, loader)
        epochs, metrics = trainer.current_epoch, dict(trainer.callback_metrics)
        first = flat(module)
        tested = trainer.test(module, loader, ckpt_path="best", verbose=False)
        trainer.fit_loop.max_epochs = 3
        stop.wait_count = 0
        trainer.fit(module, loader, loader)
        return {
            "before": before,
            "epochs": epochs,
            "metrics": {name: float(value) for name, value in metrics.items()},
            "best": save.best_model_path,
            "tested": tested,
            "steps": trainer.global_step,
            "changed": not torch.equal(first, flat(module)),
            "weights": flat(module),
        }


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler`:UserWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
def test_metrics_callbacks_and_several_fits(pool: Pool, tmp_path: Path) -> None:
    *workers, server = pool.run(use_everything, str(tmp_path), world=3)
    for worker in workers:
        assert worker["before"][0]["val_error"] == pytest.approx(
            workers[0]["before"][0]["val_error"]
        )
        assert worker["epochs"] == 2  # stopped early
        assert worker["steps"] == 3 * 16  # half of the data each, a third epoch in the second fit
        assert worker["tested"][0]["test_loss"] > 0
        assert worker["changed"]
        assert torch.equal(worker["weights"], server["weights"])
    assert server["before"] == server["tested"] == []
    assert server["best"] == workers[0]["best"]
    assert server["metrics"] == pytest.approx(workers[0]["metrics"])


def cut(
    rank: int,
    world: int,
    folder: str,
    part: str,
    num_workers: int | None = 2,
    compression: Any = None,
) -> Tensor:
    torch.manual_seed(rank)
    module = Noisy()
    loader = StatefulDataLoader(WorkerData(rank, STEPS), batch_size=None)
    options = {} if num_workers is None else {"compression": compression}
    fit_part(remote_or_ddp(num_workers, **options), module, part, folder, loader)
    return flat(module)


def cut_with_warnings(rank: int, world: int, *args: Any) -> tuple[Tensor, list[str]]:
    """Return the weights, and the warnings about the checkpoint."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        weights = cut(rank, world, *args)
    texts = [str(warning.message) for warning in found]
    return weights, [text for text in texts if "go on from it" in text]


def test_an_interrupted_run_resumes_with_more_workers(pool: Pool, tmp_path: Path) -> None:
    pool.run(cut, str(tmp_path), "first", world=3)
    *workers, server = pool.run(cut_with_warnings, str(tmp_path), "second", 3, world=4)
    assert all(torch.equal(weights, server[0]) for weights, _ in workers)
    assert not torch.equal(server[0], flat(Noisy()))
    assert workers[0][1] == [
        "The checkpoint was written by 2 workers, and 3 workers go on from it: new are worker 2, "
        "with the positions of worker 0 and random numbers from their own seed."
    ]
    assert workers[1][1] == workers[2][1] == []


class Noisy(TinyModule):
    """Draws random numbers in every step, and has a schedule."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = batch
        noise = torch.randn(inputs.shape, dtype=inputs.dtype)
        return loss_of(self.model, (inputs + 0.1 * noise, target))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS),
                "interval": "step",
            }
        ]


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("num_tiers", "compression"),
    [(2, None), (3, None), (None, None), *cover([2, 3], [Int8(block=4), "bf16"], strength=1)],
    ids=str,
)
def test_an_interrupted_run_resumes_exactly(
    pool: Pool, tmp_path: Path, num_tiers: int | None, compression: Any
) -> None:
    """With other numbers of tiers; nearly exact with DDP, which does not restore random states."""
    settings, folder = (2, compression), str(tmp_path)
    world = 3 if compression is None else 1 + (num_tiers or 1)
    whole = pool.run(cut, folder, "whole", *settings, world=world)
    first = pool.run(cut, folder, "first", *settings, world=world)
    content = torch.load(tmp_path / "cut.ckpt", weights_only=True)
    assert set(content["optimizer_states"][0]["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    full = torch.cat([value.reshape(-1) for value in content["state_dict"].values()])
    assert torch.equal(full, first[-1])  # with full precision
    assert torch.equal(full, first[0]) == (compression is None)
    if num_tiers is None:
        rest = pool.run(cut, folder, "second", None, world=2)
        torch.testing.assert_close(rest[0], whole[0], rtol=0.1, atol=0.05)
        assert not torch.equal(rest[0], flat(Noisy()))
        return
    rest = pool.run(cut, folder, "second", *settings, world=1 + num_tiers)
    for rank in (0, 1, -1):  # an aggregator has no parameters
        assert torch.equal(rest[rank], whole[rank])


def fit_again(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Fit twice, with two trainers and strategies."""
    weights = []
    with all_ranks() as environment:
        for _ in range(2):
            module = TinyModule()
            strategy = RemoteOptimizerStrategy(2, timeout_s=30)
            settings: Any = {"max_epochs": 1, "use_distributed_sampler": False}
            remote_trainer(environment, strategy, **settings).fit(module, make_loader(rank, STEPS))
            weights.append(flat(module))
    return weights[0], weights[1]


def test_another_trainer_in_the_same_processes(pool: Pool) -> None:
    for first, second in pool.run(fit_again, world=3):
        assert torch.equal(first, second)


def train_scaled(rank: int, world: int, remote: bool, reads: bool) -> Any:
    """Train in 16-mixed, with an infinite loss on one worker in one step."""

    class Infinite(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step([part.float() for part in batch], batch_idx)
            return loss * float("inf") if rank == 1 and batch_idx == 3 else loss

    class Reading(Infinite):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = norm_of_gradients(self)
            self.losses.append(norm.item() if norm.isfinite() else -1.0)

    module = (Reading() if reads else Infinite()).float()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    settings: Any = {"max_epochs": 1, "use_distributed_sampler": False, "gradient_clip_val": 1.0}
    if not remote:
        settings["plugins"] = [plugin, PoolEnvironment()]
        trainer = fit_with(DDPStrategy(), module, make_loader(rank, STEPS), **settings)
        return flat(module), scaler.get_scale(), trainer.global_step, module.losses
    with all_ranks() as environment:
        strategy = RemoteOptimizerStrategy(2, timeout_s=30)
        trainer = remote_trainer(
            environment, strategy, **{**settings, "plugins": [plugin, environment]}
        )
        trainer.fit(module, make_loader(rank, STEPS))
        assert plugin.scaler is scaler
        return flat(module), scaler.get_scale(), trainer.global_step, module.losses


@pytest.mark.parametrize("reads", [False, True])
def test_an_infinite_loss_skips_the_step_on_all_workers(pool: Pool, reads: bool) -> None:
    found = pool.run(train_scaled, True, reads, world=3)
    of_ddp = pool.run(train_scaled, False, reads, world=2)
    for (weights, *own, losses), (expected, *others, losses_of_ddp) in zip(
        found[:2], of_ddp, strict=True
    ):
        torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
        assert own == others
        assert own[0] == 128.0
        assert losses == pytest.approx(losses_of_ddp, rel=1e-3)
    assert torch.equal(found[0][0], found[2][0])
    assert torch.equal(found[0][0], found[1][0])


def test_a_checkpoint_of_another_format_raises(pool: Pool, tmp_path: Path) -> None:
    pool.run(cut, str(tmp_path), "first", world=3)
    path = tmp_path / "cut.ckpt"
    content = torch.load(path, weights_only=True)
    content["lightning_loco_format"] -= 1
    torch.save(content, path)
    with pytest.raises(PoolError, match="has format 4, and this version of .* reads format 5"):
        pool.run(cut, str(tmp_path), "second", world=3)


@pytest.mark.parametrize("entry", ["loops", "position"])
def test_a_missing_position_raises(pool: Pool, tmp_path: Path, entry: str) -> None:
    pool.run(cut, str(tmp_path), "first", world=3)
    path = tmp_path / "cut.ckpt"
    content = torch.load(path, weights_only=True)
    del content["lightning_loco_positions"][1][entry]
    torch.save(content, path)
    with pytest.raises(PoolError, match="does not say where its workers were") as error:
        pool.run(cut, str(tmp_path), "second", world=3)
    assert sorted(error.value.failures) == [0, 1, 2]
    assert str(path) in error.value.failures[1].message
