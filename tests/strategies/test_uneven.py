"""Workers with different numbers of batches end cleanly, or with an error that explains why not."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_loco import (
    AsyncDiLoCoStrategy,
    CommunicationMonitor,
    ConsensusMonitor,
    LocalSGDStrategy,
    PairwiseGossipStrategy,
    PeerMonitor,
)
from tests.cases import KINDS, Case, rows
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader, worker_batch
from tests.strategies.families import fit_with, strategy_of


class Logs(Callback):
    """Slows steps of gossip, so that fetches can complete; records the names that are logged."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, PairwiseGossipStrategy):
            time.sleep(0.005)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.names = {name for name in trainer.logged_metrics if name.startswith("loco/")}


def fit_uneven(
    rank: int, world: int, method: Case | str, folder: str
) -> tuple[int, int, Tensor, set[str]]:
    module, logs = ValidatedModule(), Logs()
    checkpoint = ModelCheckpoint(dirpath=folder, monitor="val_loss", filename="{epoch}")
    if isinstance(method, str):
        strategy, batches = strategy_of("pairwise_gossip", interpolation=method), 20 + 10 * rank
        monitors: list[Callback] = [PeerMonitor()]
    else:
        strategy, batches = strategy_of(method, 4), 5 + 3 * rank
        monitors = [ConsensusMonitor()]
    fit_with(
        strategy,
        module,
        make_loader(rank, batches),
        make_loader(rank, 2),
        max_epochs=2,
        log_every_n_steps=1,
        callbacks=[checkpoint, CommunicationMonitor(), *monitors, logs],
        enable_checkpointing=True,
    )
    return len(module.losses), strategy.statistics.rounds, flat(module), logs.names


def check_uneven(pool: Pool, folder: Path, method: Case | str) -> dict[str, Any]:
    """Check the results of two epochs; return what the checkpoint says of the run."""
    is_gossip = isinstance(method, str)
    results = pool.run(fit_uneven, method, str(folder), world=3)
    all_steps = [40, 60, 80] if is_gossip else [10, 16, 22]  # no data is skipped
    assert [steps for steps, *_ in results] == all_steps
    for _, rounds, model, names in results:
        assert rounds > (3 if is_gossip else 0)
        assert is_gossip or rounds == results[0][1]
        assert torch.equal(model, results[0][2])
        assert torch.isfinite(model).all()
        gossip_logs = {"loco/fetches", "loco/blend_factor", "loco/peer_score_min"}
        assert not is_gossip or gossip_logs <= names
    (path,) = folder.glob("*.ckpt")
    saved: dict[str, Any] = torch.load(path, weights_only=True)["lightning_loco"]
    return saved


@rows("uneven", often=(*KINDS, "neighbor_average"))
def test_unequal_numbers_of_batches(pool: Pool, tmp_path: Path, case: Case) -> None:
    saved = check_uneven(pool, tmp_path, case)
    assert saved["algorithm"] == type(case.algorithm).__name__
    assert not case.by_clock or saved["settings"]["interval_s"] == 0


@pytest.mark.parametrize(
    "interpolation",
    [
        pytest.param("constant", marks=pytest.mark.soak),
        pytest.param("clock", marks=pytest.mark.soak),
        "loss",
    ],
)
def test_unequal_numbers_of_batches_with_gossip(
    pool: Pool, tmp_path: Path, interpolation: str
) -> None:
    assert check_uneven(pool, tmp_path, interpolation)["algorithm"] == "PairwiseAverage"


def fit_weighted(rank: int, world: int) -> Tensor:
    module = TinyModule()
    fit_with(strategy_of("local_sgd", 2), module, make_loader(rank, 2 if rank else 4))
    return flat(module)


def test_the_final_model_is_the_mean_whatever_the_numbers_of_steps(pool: Pool) -> None:
    """After the common round, only worker 0 takes steps."""
    results = pool.run(fit_weighted, world=2)
    module = TinyModule()
    start = pool.run(_common_round, world=2)[0]
    nn.utils.vector_to_parameters(start.clone(), module.parameters())
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
    fit_with(strategy_of("local_sgd", 2), module, make_loader(rank, 2))
    return flat(module)


def fit_diverging(rank: int, world: int, folder: str) -> None:
    checkpoint = ModelCheckpoint(dirpath=folder, every_n_train_steps=7, save_top_k=-1)
    data = make_loader(rank, 5 + 5 * rank), make_loader(rank, 2)
    fit_with(
        strategy_of("local_sgd"),
        ValidatedModule(),
        *data,
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )


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


class CollectivesBetweenEpochs(TinyModule):
    """Calls collectives without the strategy at the start and end of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.means: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        dist.barrier()

    def on_train_epoch_end(self) -> None:
        total = torch.tensor(float(len(self.losses)))
        dist.all_reduce(total)
        self.means.append(self.mean.compute().item())
        dist.barrier()


def fit_with_collectives(rank: int, world: int, method: str) -> tuple[list[float], float, Tensor]:
    module = CollectivesBetweenEpochs()
    strategy = strategy_of(method, 2, timeout_s=15)
    trainer = fit_with(strategy, module, make_loader(rank, 4 + 6 * rank), max_epochs=2)
    return module.means, trainer.callback_metrics["mean"].item(), flat(module)


@pytest.mark.parametrize("method", ["local_sgd", "async_diloco", "gasloc", "async_model_average"])
def test_collectives_in_hooks_of_epochs_with_uneven_data(pool: Pool, method: str) -> None:
    results = pool.run(fit_with_collectives, method, world=2, timeout_s=30)
    for means, logged, final in results:
        assert means == results[0][0]
        assert logged == results[0][1] == means[-1]
        assert torch.equal(final, results[0][2])


# ------------------------------------------------------------ data of unknown length


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """An iterable dataset of unknown length, which may be empty."""

    def __init__(self, worker: int, num_steps: int) -> None:
        self.worker = worker
        self.num_steps = num_steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (worker_batch(self.worker, step) for step in range(self.num_steps))


def fit_unknown(rank: int, world: int, settings: dict[str, Any]) -> tuple[int, Tensor]:
    module = TinyModule()
    strategy = AsyncDiLoCoStrategy(sync_every=4, fragments=None, timeout_s=20)
    trainer = fit_with(strategy, module, DataLoader(Endless(rank, 20), batch_size=None), **settings)
    return trainer.global_step, flat(module)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 1}, 20),
        ({"max_epochs": -1, "max_time": {"seconds": 1}}, None),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 3}, 3),
    ],
)
def test_overlap_with_data_of_unknown_length(
    pool: Pool, settings: dict[str, Any], steps: int | None
) -> None:
    results = pool.run(fit_unknown, settings, world=2)
    for made, final in results:
        assert steps is None or made == steps
        assert torch.equal(final, results[0][1])


def fit_without_batches(rank: int, world: int) -> tuple[int, list[str]]:
    trainer = make_trainer(LocalSGDStrategy(sync_every=2), max_epochs=1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        trainer.fit(TinyModule(), DataLoader(Endless(0, 0 if rank else 4), batch_size=None))
    texts = [str(warning.message) for warning in found]
    return trainer.global_step, [text for text in texts if "local step was taken" in text]


def test_a_worker_without_batches_is_named(pool: Pool) -> None:
    (steps, texts), others = pool.run(fit_without_batches, world=2)
    assert steps == 4
    assert texts == ["No local step was taken on worker 1. The training data had no batches there."]
    assert others == (0, [])
