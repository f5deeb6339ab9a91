"""Checkpoints that a script saves after a fit with a remote optimizer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_loco import RemoteOptimizerStrategy
from tests.pool import Pool, PoolError
from tests.small_model import TinyModule, make_loader
from tests.strategies.remote_runs import all_ranks, remote_trainer

STEPS = 3


class LateIO(TorchCheckpointIO):
    """Takes a moment for a file, or has no space for it."""

    def __init__(self, error: OSError | None) -> None:
        self.error = error

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        if self.error is not None:
            raise self.error
        super().save_checkpoint(*args, **kwargs)


def save_after_fit(rank: int, world: int, folder: str, error: OSError | None) -> list[bool]:
    """Fit and save, twice; whether the files are there then."""
    settings: Any = {"max_epochs": 1, "use_distributed_sampler": False}
    are_there = []
    with all_ranks() as environment:
        for number in range(2):
            strategy = RemoteOptimizerStrategy(
                2, timeout_s=20, checkpoint_io=LateIO(error if number else None)
            )
            trainer = remote_trainer(environment, strategy, **settings)
            trainer.fit(TinyModule(), make_loader(rank, STEPS))
            path = Path(folder, f"{number}.ckpt")
            trainer.save_checkpoint(path)
            are_there.append(path.exists())
    return are_there


def test_who_serves_waits_until_a_checkpoint_is_written(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(save_after_fit, str(tmp_path), None, world=3) == [[True, True]] * 3


def test_who_serves_is_told_why_a_checkpoint_is_not_written(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(save_after_fit, str(tmp_path), OSError("no space left"), world=3)
    messages = [caught.value.failures[rank].message for rank in (0, 2)]
    assert "no space left" in messages[0]
    assert "Worker 0: no space left" in messages[1]
