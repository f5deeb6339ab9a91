"""A remote optimizer with compression in the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.compression import Int8
from tests.harness.pool import Pool
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader
from tests.strategies.families import Seen, fit_with

CODEC = Int8(block=4)
STEPS = 8


def decoded(module: TinyModule, full: Tensor) -> Tensor:
    """Return the values that workers decode; parameters are one bucket, the last one first."""
    params = list(module.parameters())
    parts = list(reversed(full.split([param.numel() for param in params])))
    values = torch.cat(parts)
    values = CODEC.decode(CODEC.encode(values), torch.empty_like(values))
    return torch.cat(list(reversed(values.split([len(part) for part in parts]))))


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


def run_uneven(rank: int, world: int, folder: str) -> tuple[Tensor, list[Tensor]]:
    """Give worker 0 fewer batches, so that it misses steps."""
    module, seen = ValidatedModule(), Seen(f"{folder}/one.ckpt")
    strategy = RemoteOptimizerStrategy(2, compression=CODEC, timeout_s=20)
    data = make_loader(rank, STEPS if rank == 0 else STEPS + 3), make_loader(9, 2)
    fit_with(strategy, module, *data, callbacks=[seen], max_epochs=2)
    return flat(module), seen.validated


@pytest.mark.parametrize("num_tiers", [2, 3])
def test_a_worker_that_misses_steps_decodes_the_same_parameters(
    pool: Pool, tmp_path: Path, num_tiers: int
) -> None:
    first, second, *_, server = pool.run(run_uneven, str(tmp_path), world=1 + num_tiers)
    assert len(first[1]) == 2
    assert all(map(torch.equal, first[1], second[1]))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], decoded(TinyModule(), server[0]))
    assert not torch.equal(first[0], server[0])
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(torch.cat([value.reshape(-1) for value in saved.values()]), server[0])


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


def run_loaded(rank: int, world: int, loads: bool) -> Tensor:
    module = Overwrites(loads)
    strategy = RemoteOptimizerStrategy(2, compression=CODEC, timeout_s=20)
    fit_with(strategy, module, make_loader(rank, STEPS))
    return flat(module)


@pytest.mark.parametrize("num_tiers", [2, 3])
def test_a_manual_change_does_not_round_other_elements(pool: Pool, num_tiers: int) -> None:
    *workers, server = pool.run(run_loaded, True, world=1 + num_tiers)
    without = pool.run(run_loaded, False, world=1 + num_tiers)[-1]
    assert server[0] == 0.25
    assert torch.equal(server[1:], without[1:])
    for weights in workers[:2]:
        assert torch.equal(weights, decoded(TinyModule(), server))


def run_replicas(rank: int, world: int) -> Tensor:
    module = TinyModule()
    strategy = RemoteOptimizerStrategy(1, replica_size=2, compression=CODEC, timeout_s=20)
    fit_with(strategy, module, make_loader(rank, STEPS))
    return flat(module)


def test_both_ranks_of_a_worker_decode_the_same(pool: Pool) -> None:
    first, second, server = pool.run(run_replicas, world=3)
    assert torch.equal(first, second)
    assert torch.equal(first, decoded(TinyModule(), server))
