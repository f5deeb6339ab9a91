"""A resumed run continues in its data, even if loaders are made before the checkpoint is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import RemoteOptimizerStrategy
from lightning_loco.strategies.registry import METHODS
from tests.pool import Pool
from tests.small_model import TinyModule
from tests.strategies.remote_runs import fit_with

pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
SAVED_AT = 10
"""In the middle of the second epoch."""


class RecordingModule(TinyModule):
    """Records what it reads; asks for the number of steps as OneCycle schedules do."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(float(batch[0].sum()))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.asks:
            assert self.trainer.estimated_stepping_batches == 21
        return super().configure_optimizers()


def read(
    rank: int, world: int, name: str, asks: bool, folder: str, ckpt_path: str | None = None
) -> list[float]:
    """Return what a worker reads of three epochs, from a checkpoint if there is one."""
    module = RecordingModule(asks)
    generator = torch.Generator().manual_seed(0)
    inputs, target = (
        torch.randn(28, *shape, generator=generator, dtype=torch.float64) for shape in ((3,), ())
    )
    loader = StatefulDataLoader(TensorDataset(inputs, target), batch_size=2)
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    fit_with(
        RemoteOptimizerStrategy(2, timeout_s=30)
        if name == "remote_optimizer"
        else METHODS[name](sync_every=4, timeout_s=30),
        module,
        loader,
        ckpt_path=ckpt_path,
        max_epochs=3,
        callbacks=[save],
        enable_checkpointing=True,
        use_distributed_sampler=True,
    )
    return module.seen


@pytest.mark.parametrize("name", ["diloco", "remote_optimizer"])
@pytest.mark.parametrize("asks", [False, True])
def test_the_position_in_the_data(pool: Pool, tmp_path: Path, name: str, asks: bool) -> None:
    world, path = 3 if name == "remote_optimizer" else 2, str(tmp_path)
    saved = f"{path}/step={SAVED_AT}.ckpt"
    first = pool.run(read, name, asks, path, world=world)[:2]
    second = pool.run(read, name, asks, path, saved, world=world)[:2]
    for uninterrupted, resumed in zip(first, second, strict=True):
        assert len(uninterrupted) == 21
        assert resumed == uninterrupted[SAVED_AT:]
