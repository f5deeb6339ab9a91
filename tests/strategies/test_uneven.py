"""Workers with different numbers of batches end cleanly, or with an error that explains why not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_loco import LocalSGD, LocalSGDStrategy, LocoStrategy
from tests.cases import KINDS, Case, rows
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader


def fit_uneven(rank: int, world: int, case: Case, folder: str) -> tuple[int, int, Tensor]:
    module = ValidatedModule()
    checkpoint = ModelCheckpoint(dirpath=folder, monitor="val_loss", filename="{epoch}")
    strategy = case.strategy(4, timeout_s=30)
    trainer = make_trainer(
        strategy,
        max_epochs=2,
        use_distributed_sampler=False,
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    trainer.fit(module, make_loader(rank, 5 + 3 * rank), make_loader(rank, 2))
    return len(module.losses), strategy.statistics.rounds, flat(module)


@rows("uneven", often=KINDS)
def test_unequal_numbers_of_batches(pool: Pool, tmp_path: Path, case: Case) -> None:
    results = pool.run(fit_uneven, case, str(tmp_path), world=3)
    assert [steps for steps, _, _ in results] == [10, 16, 22]  # no data is skipped
    assert len({rounds for _, rounds, _ in results}) == 1
    for _, _, model in results[1:]:
        assert torch.equal(model, results[0][2])
    assert torch.isfinite(results[0][2]).all()


def fit_weighted(rank: int, world: int) -> Tensor:
    module = TinyModule()
    trainer = make_trainer(
        LocoStrategy(LocalSGD(), sync_every=2), max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(module, make_loader(rank, 2 if rank else 4))
    return flat(module)


def test_the_final_model_is_the_mean_whatever_the_numbers_of_steps(pool: Pool) -> None:
    """After the common round, only worker 0 takes steps."""
    results = pool.run(fit_weighted, world=2)
    module = TinyModule()
    start = pool.run(_common_round, world=2)[0]
    with torch.no_grad():
        offset = 0
        for p in module.parameters():
            p.copy_(start[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
    optimizer = module.configure_optimizers()
    for step in (2, 3):
        optimizer.zero_grad()
        module.training_step(make_loader(0, 4).dataset[step], step).backward()
        optimizer.step()
    mean = (flat(module) + start) / 2
    torch.testing.assert_close(results[0], mean, rtol=0, atol=1e-12)
    assert torch.equal(results[0], results[1])


def _common_round(rank: int, world: int) -> Tensor:
    module = TinyModule()
    trainer = make_trainer(
        LocoStrategy(LocalSGD(), sync_every=2), max_steps=2, use_distributed_sampler=False
    )
    trainer.fit(module, make_loader(rank, 2))
    return flat(module)


def fit_diverging(rank: int, world: int, folder: str) -> None:
    checkpoint = ModelCheckpoint(dirpath=folder, every_n_train_steps=7, save_top_k=-1)
    trainer = make_trainer(
        LocoStrategy(LocalSGD(), sync_every=3, timeout_s=30),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    trainer.fit(ValidatedModule(), make_loader(rank, 5 + 5 * rank), make_loader(rank, 2))


def test_different_sync_points_are_an_error_on_every_worker(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="wait for each other at different sync points") as error:
        pool.run(fit_diverging, str(tmp_path), world=2)
    for failure in error.value.failures.values():
        assert "worker 0 at validation after 5 local steps" in failure.message
        # Lightning 2.6 reduces before it saves, and older versions broadcast.
        where = r"worker 1 at (reduce|broadcast) after 7 local steps"
        assert re.search(where, failure.message)
        assert "limit_train_batches" in failure.message
    assert sorted(error.value.failures) == [0, 1]


class WithoutLength(IterableDataset[Any]):
    """The batches of worker 0; no batches on others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return iter(() if self.rank else make_loader(0, 4))


def fit_without_batches(rank: int, world: int) -> tuple[int, list[str]]:
    trainer = make_trainer(LocalSGDStrategy(sync_every=2), max_epochs=1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        trainer.fit(TinyModule(), DataLoader(WithoutLength(rank), batch_size=None))
    texts = [str(warning.message) for warning in found]
    return trainer.global_step, [text for text in texts if "local step was taken" in text]


def test_a_worker_without_batches_is_named(pool: Pool) -> None:
    (steps, texts), others = pool.run(fit_without_batches, world=2)
    assert steps == 4
    assert texts == ["No local step was taken on worker 1. The training data had no batches there."]
    assert others == (0, [])
