"""A remote optimizer with metrics, checkpoints and interrupted runs."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco._util.fault_points import on_reach
from lightning_loco.compression import Int8
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import (
    TinyModule,
    ValidatedModule,
    WorkerData,
    flat,
    loss_of,
    make_loader,
)
from tests.strategies.families import all_ranks, fit_part, remote_or_ddp, remote_trainer

STEPS = 8


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
