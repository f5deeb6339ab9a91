"""Callbacks that read the optimizer or write final weights, compared with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.harness.pool import Pool
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader
from tests.strategies.families import fit_with, remote_or_ddp

STEPS = 6


class Scheduled(ValidatedModule):
    """Has momentum, weight decay, two parameter groups and optionally a schedule."""

    def __init__(self, schedule: bool) -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


CALLBACKS = {
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.5),
    "swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
}


def run(
    rank: int, world: int, kind: str, num_workers: int | None, folder: str
) -> tuple[Tensor, dict[str, Tensor]]:
    module = ValidatedModule(optimizer="Adam")
    path = f"{folder}/{num_workers}.ckpt"

    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(path)

    fit_with(
        remote_or_ddp(num_workers),
        module,
        make_loader(rank, STEPS),
        make_loader(9, 2),
        max_epochs=4,
        callbacks=[CALLBACKS[kind](), Saves()],
    )
    saved = torch.load(path, weights_only=False)["state_dict"] if rank == 0 else {}
    return flat(module), saved


@pytest.mark.filterwarnings("ignore:Swapping scheduler:UserWarning")
@pytest.mark.parametrize("kind", CALLBACKS)
def test_callbacks_write_the_final_weights_of_ddp(pool: Pool, tmp_path: Path, kind: str) -> None:
    first, second, _ = pool.run(run, kind, 2, str(tmp_path), world=3)
    expected, saved = pool.run(run, kind, None, str(tmp_path), world=2)[0]
    assert torch.equal(first[0], expected)
    assert torch.equal(second[0], expected)
    assert first[1].keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(first[1][name], value), name
    if kind == "pruning":
        assert (first[0] == 0.0).any()


def monitor(
    rank: int, world: int, schedule: bool, num_workers: int | None, folder: str
) -> list[str]:
    module = Scheduled(schedule)
    fit_with(
        remote_or_ddp(num_workers),
        module,
        make_loader(rank, STEPS),
        make_loader(9, 2),
        max_epochs=2,
        logger=CSVLogger(folder, name=f"{num_workers}", version="0"),
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor(log_momentum=True, log_weight_decay=True)],
    )
    if rank != 0:
        return []
    return (Path(folder) / f"{num_workers}" / "0" / "metrics.csv").read_text().splitlines()


@pytest.mark.filterwarnings("ignore:.*no learning rate schedulers:RuntimeWarning")
@pytest.mark.parametrize("schedule", [True, False])
def test_a_monitor_shows_the_local_optimizer(pool: Pool, tmp_path: Path, schedule: bool) -> None:
    found = pool.run(monitor, schedule, 2, str(tmp_path), world=3)[0]
    expected = pool.run(monitor, schedule, None, str(tmp_path), world=2)[0]
    assert found == expected
    assert "lr-AdamW/pg1" in found[0]


def profile(rank: int, world: int, name: str, folder: str) -> Tensor:
    module = TinyModule()
    fit_with(
        remote_or_ddp(2),
        module,
        make_loader(rank, STEPS),
        profiler=name,
        default_root_dir=folder,
    )
    return flat(module)


@pytest.mark.parametrize("name", ["simple", "advanced", "pytorch"])
def test_profilers_work(pool: Pool, tmp_path: Path, name: str) -> None:
    first, second, server = pool.run(profile, name, str(tmp_path), world=3)
    assert torch.equal(first, server)
    assert torch.equal(second, server)
