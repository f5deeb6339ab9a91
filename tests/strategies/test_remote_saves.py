"""Checkpoints that a script saves after a fit with a remote optimizer."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from lightning_loco import RemoteOptimizerStrategy
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import TinyModule, flat, make_loader
from tests.strategies.families import all_ranks, remote_trainer

STEPS = 3


class SlowIO(TorchCheckpointIO):
    """Saves slowly, and may raise an error."""

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


def continue_without_steps(rank: int, world: int, path: str) -> list[int]:
    steps = []
    with all_ranks() as environment:
        for limits in ({"max_epochs": 0}, {"max_epochs": 1, "max_steps": 2}):
            trainer = remote_trainer(
                environment, RemoteOptimizerStrategy(2, timeout_s=20), **limits
            )
            module = TinyModule(optimizer="AdamW")
            resumed = path if steps else None
            trainer.fit(module, make_loader(rank, STEPS), ckpt_path=resumed, weights_only=False)
            if not steps:
                trainer.save_checkpoint(path)
            steps.append(trainer.global_step)
    return steps


@pytest.mark.recovery
def test_a_run_without_steps_can_be_continued(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(continue_without_steps, str(tmp_path / "none.ckpt"), world=3)
    assert found[:2] == [[0, 2]] * 2


class Fails(TinyModule):
    """Raises an error after two steps on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(optimizer="AdamW")
        self.failing = rank

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank == self.failing:
            raise ValueError("bad sample")
        return super().training_step(batch, batch_idx)


def save_on_exception(
    rank: int, world: int, folder: str, failing: int
) -> tuple[str, Tensor, list[str]]:
    """Return the error, the last parameters, and the warnings of a fit that fails; fit again."""
    settings: Any = {"max_epochs": 1, "use_distributed_sampler": False}
    with all_ranks() as environment, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        callback = OnExceptionCheckpoint(folder, filename="failed")
        strategy = RemoteOptimizerStrategy(2, timeout_s=3600)
        trainer = remote_trainer(
            environment, strategy, callbacks=[callback], enable_checkpointing=True, **settings
        )
        module = Fails(failing)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            trainer.fit(module, make_loader(rank, STEPS))
        again = remote_trainer(environment, RemoteOptimizerStrategy(2, timeout_s=20), **settings)
        again.fit(TinyModule(), make_loader(rank, STEPS))
    texts = [str(one.message) for one in seen if "was not written" in str(one.message)]
    return str(caught.value), flat(module), texts


@pytest.mark.recovery
@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_after_an_exception(pool: Pool, tmp_path: Path, failing: int) -> None:
    """The optimizer's rank answers the save only if worker 0 itself has raised the error."""
    found = pool.run(save_on_exception, str(tmp_path), failing, world=3)
    for error, _, _ in found:
        assert "bad sample" in error
    path, (_, weights, warned) = tmp_path / "failed.ckpt", found[0]
    if failing == 1:
        assert not path.exists()
        assert len(warned) == 1
        assert "bad sample" in warned[0]
        return
    assert not warned
    saved = torch.load(path, weights_only=True)
    assert torch.equal(torch.cat([v.reshape(-1) for v in saved["state_dict"].values()]), weights)
    state = saved["optimizer_states"][0]["state"]
    assert {int(one["step"]) for one in state.values()} == {2}
