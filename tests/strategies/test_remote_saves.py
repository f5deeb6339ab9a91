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


class SlowIO(TorchCheckpointIO):
    """Is slow, and may raise."""

    def __init__(self, error: OSError | None) -> None:
        self.error = error

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        if self.error is not None:
            raise self.error
        super().save_checkpoint(*args, **kwargs)


def save_after_fit(rank: int, world: int, folder: str, error: OSError | None) -> list[bool]:
    """Fit and save, twice; return whether the files exist."""
    settings: Any = {"max_epochs": 1, "use_distributed_sampler": False}
    exist = []
    with all_ranks() as environment:
        for number in range(2):
            strategy = RemoteOptimizerStrategy(
                2, timeout_s=20, checkpoint_io=SlowIO(error if number else None)
            )
            trainer = remote_trainer(environment, strategy, **settings)
            trainer.fit(TinyModule(), make_loader(rank, STEPS))
            path = Path(folder, f"{number}.ckpt")
            trainer.save_checkpoint(path)
            exist.append(path.exists())
    return exist


def test_service_ranks_wait_until_a_checkpoint_is_written(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(save_after_fit, str(tmp_path), None, world=3) == [[True, True]] * 3


def test_service_ranks_raise_the_error_of_a_failed_save(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(save_after_fit, str(tmp_path), OSError("no space left"), world=3)
    messages = [caught.value.failures[rank].message for rank in (0, 2)]
    assert "no space left" in messages[0]
    assert "Worker 0: no space left" in messages[1]
