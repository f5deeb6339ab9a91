"""A remote optimizer with compression in the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_loco import RemoteOptimizerStrategy
from tests.harness.pool import Pool
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader
from tests.strategies.families import fit_with, remote_or_ddp, saved_weights
from tests.strategies.test_remote import ReadInHooks
from tests.strategies.test_remote_laggards import CODEC, decoded

STEPS = 8


class Wide(ValidatedModule):
    """Has enough float32 parameters to make the sizes of other messages negligible."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4096), nn.Tanh(), nn.Linear(4096, 1))
        self.lr = 1e-4

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([part.float() for part in batch], batch_idx)  # type: ignore[arg-type]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step([part.float() for part in batch], batch_idx)  # type: ignore[arg-type]


def train_wide(rank: int, world: int, compression: str | None) -> Any:
    module = Wide()
    strategy = RemoteOptimizerStrategy(2, compression=compression, timeout_s=30)
    data = make_loader(rank, 20), make_loader(9, 2)
    trainer = fit_with(strategy, module, *data, max_epochs=3)
    loss = trainer.callback_metrics["val_loss"].item()
    return loss, module.losses, strategy.statistics


@pytest.mark.parametrize("num_tiers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_training_with_a_quarter_of_the_bytes(pool: Pool, num_tiers: int) -> None:
    found = pool.run(train_wide, "int8", world=1 + num_tiers)
    exact = pool.run(train_wide, None, world=1 + num_tiers)
    (loss, losses, counted), (exact_loss, _, exact_counted) = found[0], exact[0]
    assert loss == pytest.approx(exact_loss, rel=0.02)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert exact_counted.bytes_saved == 0
    whole = counted.bytes_sent + counted.bytes_saved
    assert whole == pytest.approx(exact_counted.bytes_sent, rel=0.001)
    assert 0.25 < counted.bytes_sent / whole < 0.27


class Overwrites(TinyModule):
    """Optionally overwrites an element on all workers, before a last step with learning rate 0."""

    def __init__(self, loads: bool) -> None:
        super().__init__()
        self.loads = loads

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.loads and batch_idx == STEPS - 1:
            self.model[0].weight.data[0, 0] = 0.25

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        last = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: float(s < STEPS - 1))
        return [optimizer], [{"scheduler": last, "interval": "step"}]


def train(
    rank: int, world: int, module: TinyModule, options: dict[str, Any], path: str = ""
) -> dict[str, Any]:
    """Return weights and losses; the server's with full precision, from worker 0, if saved."""
    full: list[Any] = []

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if path:
                trainer.save_checkpoint(path)
                remote = trainer.strategy.remote.optimizer
                full.extend(remote.full_precision_parameters() if not rank else ())

    options = {"num_workers": 2, "compression": CODEC, **options}
    fit_with(remote_or_ddp(**options), module, make_loader(rank, STEPS), callbacks=[Save()])
    order = {id(param): index for index, param in enumerate(module.parameters())}
    full.sort(key=lambda pair: order[id(pair[0])])
    return {
        "weights": flat(module),
        "losses": module.losses,
        "full": torch.cat([value.reshape(-1) for _, value in full]) if full else None,
    }


def train_ddp(rank: int, world: int, module: TinyModule) -> dict[str, Any]:
    fit_with(remote_or_ddp(None), module, make_loader(rank, STEPS))
    return {"weights": flat(module), "losses": module.losses}


@pytest.mark.parametrize("num_tiers", [2, 3])
def test_a_manual_change_does_not_round_other_elements(pool: Pool, num_tiers: int) -> None:
    *workers, last = pool.run(train, Overwrites(True), {}, world=1 + num_tiers)
    server = last["weights"]
    without = pool.run(train, Overwrites(False), {}, world=1 + num_tiers)[-1]["weights"]
    assert server[0] == 0.25
    assert torch.equal(server[1:], without[1:])
    for worker in workers[:2]:
        assert torch.equal(worker["weights"], decoded(TinyModule(), server))


def test_both_ranks_of_a_worker_decode_the_same(pool: Pool) -> None:
    options = {"num_workers": 1, "replica_size": 2}
    first, second, server = pool.run(train, TinyModule(), options, world=3)
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["weights"], decoded(TinyModule(), server["weights"]))


class Single(TinyModule):
    """Has float32 parameters, which it can clip before each forward pass."""

    def __init__(self, clips: bool) -> None:
        super().__init__()
        self.float()
        self.clips = clips

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for parameter in self.parameters() if self.clips else ():
            parameter.data.clamp_(-0.2, 0.2)
        return super().training_step([part.float() for part in batch], batch_idx)  # type: ignore[arg-type]


@pytest.mark.parametrize("clips", [False, True])
def test_bfloat16(pool: Pool, tmp_path: Path, clips: bool) -> None:
    """Also if weights are clipped, only messages are rounded, and no parameters of the server."""
    path = str(tmp_path / "one.ckpt")
    found = pool.run(train, Single(clips), {"compression": "bf16"}, path, world=3)
    expected = pool.run(train_ddp, Single(clips), world=2)[0]["weights"]
    rounded, server = found[0]["weights"], found[2]["weights"]
    assert torch.equal(found[0]["full"], server)
    assert torch.equal(rounded, found[1]["weights"])
    assert torch.equal(rounded, server.bfloat16().float())
    assert not torch.equal(rounded, server)
    torch.testing.assert_close(server, expected, rtol=0.05, atol=0.02)
    assert torch.equal(saved_weights(path), server)


def test_hooks_see_a_mean_gradient_that_was_compressed(pool: Pool) -> None:
    found = pool.run(train, ReadInHooks(), {"compression": "int8"}, world=3)
    of_ddp = pool.run(train_ddp, ReadInHooks(), world=2)
    for own, other in zip(found[:2], of_ddp, strict=True):
        assert own["losses"] == pytest.approx(other["losses"], rel=0.05)
