"""Workers of several ranks: DDP within a worker, rounds between workers, and what goes wrong."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_loco import (
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    LocalSGDStrategy,
    PairwiseGossipStrategy,
)
from lightning_loco.callbacks import CommunicationMonitor, StragglerSimulator, WorkerLogs
from lightning_loco.distributed import WorkerGroup
from lightning_loco.strategies.replica_group import ReplicaGroup, warn_of_straddling
from tests.harness.failing import KINDS, FailIn
from tests.harness.limits import HARNESS_S
from tests.harness.pool import Pool, PoolEnvironment, PoolError, make_trainer
from tests.harness.small_model import (
    TinyModule,
    ValidatedModule,
    flat,
    loss_of,
    make_model,
    norm_model,
    worker_batch,
)
from tests.strategies.replica_runs import METHODS, Run, check_fault, fit, loader

SIZE = 2  # ranks of a worker


@pytest.mark.parametrize("method", list(METHODS))
def test_two_ranks_are_one_worker_that_reads_the_rows_of_both(pool: Pool, method: str) -> None:
    run = Run(method, {"finalize": "keep"}, {"max_steps": 11}, TinyModule)
    results = run.compare(pool, "ddp")
    assert (results[0]["params"] - flat(TinyModule())).abs().max() > 1e-2
    assert (results[0]["params"] - results[SIZE]["params"]).abs().max() > 1e-4


class TwoOptimizers(TinyModule):
    """Manual optimization: one optimizer for each layer, and accumulated gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        self.manual_backward(loss_of(self.model, batch) / 2)
        if batch_idx % 2:
            for optimizer in optimizers:
                self.clip_gradients(optimizer, 0.5)
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        layers = self.model[0], self.model[2]
        return [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in layers]


class SometimesUnused(TinyModule):
    """A layer that only every other step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 1).double()
        nn.init.constant_(self.extra.weight, 0.1)
        nn.init.zeros_(self.extra.bias)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        if batch_idx % 2:
            loss = loss + self.extra(batch[0]).square().mean()
        return loss


class Synchronized(TinyModule):
    """Records after which backward passes DDP has averaged the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def on_after_backward(self) -> None:
        model = self.trainer.model
        if isinstance(model, DistributedDataParallel):
            assert model.module is self
            self.seen.append(bool(model.require_backward_grad_sync))


def test_manual_optimization_with_two_optimizers(pool: Pool) -> None:
    Run(module=TwoOptimizers).compare(pool, "ddp")


def test_clipping_clips_the_mean_gradient(pool: Pool) -> None:
    Run(trainer={"gradient_clip_val": 0.2}).compare(pool, "ddp")


def test_accumulation_averages_once_in_a_step(pool: Pool) -> None:
    run = Run(trainer={"accumulate_grad_batches": 2}, module=Synchronized)
    results = run.compare(pool, "ddp")
    assert {str(one["seen"]) for one in results} == {str([False, True] * (run.steps // 2))}


def test_unused_parameters_and_gradients_as_views(pool: Pool) -> None:
    arguments = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    Run(arguments=arguments, module=SometimesUnused).compare(pool, "ddp")


def test_a_static_graph(pool: Pool) -> None:
    Run(arguments={"static_graph": True}).compare(pool, "ddp")


def test_unused_parameters_need_the_argument(pool: Pool) -> None:
    run = Run(arguments={"timeout_s": 20}, module=SometimesUnused)
    with pytest.raises(PoolError, match="find_unused_parameters=True") as error:
        pool.run(fit, run, SIZE, grace_s=30)
    assert sorted(error.value.failures) == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["diloco", "gasloc", "async_diloco of fragments"])
def test_workers_with_different_numbers_of_batches(pool: Pool, method: str) -> None:
    run = Run(method, trainer={"max_epochs": 2}, steps=(7, 12), validates=True)
    run.compare(pool, "ddp")


def test_a_list_of_sync_every(pool: Pool) -> None:
    Run("gasloc", {"sync_every": [2, 4]}, steps=(8, 16)).compare(pool, "ddp")


def callbacks() -> list[pl.Callback]:
    return [EarlyStopping("val_loss", patience=1, min_delta=10.0)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 3},
        {"max_epochs": 2, "val_check_interval": 4},
        {"max_steps": 15, "max_epochs": -1},
        {"limit_train_batches": 5, "max_epochs": 2},
        {"fast_dev_run": True},
        {"max_time": "00:01:00:00"},
        {"overfit_batches": 2, "max_epochs": 2},
    ],
    ids=str,
)
def test_settings_of_the_trainer(pool: Pool, settings: dict[str, Any]) -> None:
    run = Run(trainer=settings, callbacks=callbacks, validates=True)
    results = run.compare(pool, "ddp")
    assert all(math.isfinite(one["metrics"]["val_loss"]) for one in results)
    if settings == {"max_epochs": 3}:
        assert results[0]["epochs"] < 3  # EarlyStopping


# ------------------------------------------------------------------- other identities


def fit_one_worker(rank: int, world: int, strategy: str) -> Tensor:
    chosen = LocalSGDStrategy(sync_every=3, replica_size=world) if strategy == "loco" else strategy
    trainer = make_trainer(chosen, max_epochs=2)
    module = TinyModule(optimizer="Adam")
    inputs, targets = worker_batch(0, 0, size=24)
    trainer.fit(module, DataLoader(TensorDataset(inputs, targets), batch_size=3, shuffle=True))
    return flat(module)


def test_one_worker_of_two_ranks_is_ddp(pool: Pool) -> None:
    pl.seed_everything(7, verbose=False)
    loco, ddp = (pool.run(fit_one_worker, name, world=2) for name in ("loco", "ddp"))
    for one, other in zip(loco, ddp, strict=True):
        assert torch.equal(one, other)


def average_by_the_clock(rank: int, world: int) -> dict[str, Any]:
    strategy = AsyncModelAverageStrategy(interval_s=0.0, warmup_steps=2, replica_size=SIZE)
    trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=False)
    module = ValidatedModule()
    trainer.fit(module, loader(rank, SIZE, 20), loader(rank, SIZE, 2))
    return {"params": flat(module), "rounds": strategy.statistics.rounds}


def test_averaging_by_the_clock_keeps_the_ranks_of_a_worker_equal(pool: Pool) -> None:
    results = pool.run(average_by_the_clock, world=4)
    assert results[0]["rounds"] > 0
    for result in results[1:]:
        assert torch.equal(result["params"], results[0]["params"])
        assert result["rounds"] == results[0]["rounds"]


class Normalized(ValidatedModule):
    """With BatchNorm, whose statistics are each rank's own within a step, as with DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.model = norm_model()


def fit_normalized(rank: int, world: int) -> dict[str, Tensor]:
    strategy = DiLoCoStrategy(sync_every=3, replica_size=SIZE)
    trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=False)
    module = Normalized()
    trainer.fit(module, loader(rank, SIZE), loader(rank, SIZE, 2))
    return module.state_dict()


def test_all_ranks_end_with_the_same_buffers(pool: Pool) -> None:
    first, *others = pool.run(fit_normalized, world=4)
    assert (first["model.1.running_mean"] != 0).all()
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


def averaging() -> list[pl.Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)]


def test_averaged_weights(pool: Pool) -> None:
    Run(trainer={"max_epochs": 3}, callbacks=averaging).compare(pool, "ddp")


class CollectsInStep(TinyModule):
    """Waits for all ranks within a step, while the second worker makes two more rounds."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 + 4 * strategy.worker:
            rounds = strategy.statistics.rounds
            strategy.barrier("in the step")
            self.seen = strategy.statistics.rounds - rounds
        return loss


def test_rounds_within_a_step(pool: Pool) -> None:
    run = Run(arguments={"sync_every": 2}, trainer={"max_steps": 10}, module=CollectsInStep)
    results = run.compare(pool, "ddp")
    assert [one["seen"] for one in results] == [2, 2, 0, 0]


class OwnWeights(TinyModule):
    """Begins with other weights on each rank; a hook then writes those of the first rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(seed=dist.get_rank())

    def on_train_start(self) -> None:
        if self.trainer.is_global_zero:
            with torch.no_grad():
                self.model[0].weight.fill_(0.25)


def test_all_ranks_start_from_the_weights_of_the_first(pool: Pool) -> None:
    Run(trainer={"max_steps": 7}, module=OwnWeights).compare(pool, "ddp")


def fit_again(rank: int, world: int) -> list[Tensor]:
    strategy = LocalSGDStrategy(sync_every=2, replica_size=SIZE)
    settings: dict[str, Any] = {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
    trainer = make_trainer(strategy, max_epochs=1, **settings)
    module, data = ValidatedModule(), (loader(rank, SIZE, 4), loader(rank, SIZE, 2))
    found = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, *data)
        found.append(flat(module))
        (metrics,) = trainer.validate(module, data[1], verbose=False)
        found.append(torch.tensor(metrics["val_loss"]))
    return found


def test_a_second_fit_and_a_validation_between(pool: Pool) -> None:
    first, *others = pool.run(fit_again, world=4)
    assert not torch.equal(first[0], first[2])
    for other in others:
        assert all(map(torch.equal, first, other))


# ------------------------------------------------------------------------------ data


class Reading(pl.LightningModule):
    """Records the samples that this rank trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (samples,) = batch
        self.seen += samples.int().tolist()
        return (self.weight - samples.mean()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def read(rank: int, world: int, sync_every: int | list[int], replica_size: int) -> Any:
    strategy = LocalSGDStrategy(sync_every=sync_every, replica_size=replica_size)
    trainer = make_trainer(strategy, max_epochs=1)
    module = Reading()
    data = TensorDataset(torch.arange(48.0))
    trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True))
    return module.seen, trainer.global_step


@pytest.mark.parametrize(
    ("sync_every", "sizes"), [(2, [12, 12, 12, 12]), ([1, 2], [8, 8, 16, 16])], ids=str
)
def test_all_ranks_divide_the_data(
    pool: Pool, sync_every: int | list[int], sizes: list[int]
) -> None:
    results = pool.run(read, sync_every, SIZE, world=4)
    assert [len(samples) for samples, _ in results] == sizes
    assert sorted(sum((samples for samples, _ in results), [])) == list(range(48))
    assert [steps for _, steps in results] == [size // 2 for size in sizes]


# --------------------------------------------------------------------------- logging


def log(rank: int, world: int, folder: str) -> dict[str, Any]:
    strategy = DiLoCoStrategy(sync_every=3, replica_size=SIZE)
    every = {"save_top_k": -1, "save_last": True}
    checkpoint = ModelCheckpoint(Path(folder) / "saved", monitor="val_loss", **every)
    trainer = make_trainer(
        strategy,
        max_epochs=2,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        callbacks=[
            CommunicationMonitor(),
            LearningRateMonitor(),
            WorkerLogs(),
            StragglerSimulator({1: 0.001}),
            checkpoint,
        ],
    )
    module = ValidatedModule()
    trainer.fit(module, loader(rank, SIZE), loader(rank, SIZE, 2))
    return {
        "identity": (strategy.worker, strategy.place, strategy.num_workers),
        "metrics": dict(trainer.logged_metrics),
        "params": flat(module),
        "saved": torch.load(checkpoint.last_model_path, weights_only=True)["state_dict"],
    }


def test_callbacks_that_log_and_save(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(log, str(tmp_path), world=4)
    assert [one["identity"] for one in results] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert "lr-SGD" in (tmp_path / "metrics.csv").read_text().partition("\n")[0]
    for result in results:
        assert result["metrics"]["loco/round"] == 7
        assert result["metrics"]["loco/bytes_sent"] > 0
        saved = torch.cat([value.reshape(-1) for value in result["saved"].values()])
        assert torch.equal(saved, result["params"])
    names = sorted(path.name for path in tmp_path.glob("worker_*.csv"))
    assert names == ["worker_00000.csv", "worker_00001.csv"]


# -------------------------------------------------------------------------- refusals


def refused(rank: int, world: int) -> str:
    trainer = make_trainer(LocalSGDStrategy(replica_size=2), max_steps=1)
    with pytest.raises(ValueError, match="replica_size") as error:
        trainer.fit(TinyModule(), loader(rank, 1))
    return str(error.value)


def test_a_number_of_ranks_that_is_no_multiple(pool: Pool) -> None:
    assert set(pool.run(refused, world=3)) == {
        "replica_size=2 does not divide the 3 ranks. Start a multiple of 2 "
        "(Trainer(devices=..., num_nodes=...)), or choose a replica_size that divides 3."
    }


def size_of_node(rank: int, world: int) -> tuple[int, int, int]:
    strategy = LocalSGDStrategy(sync_every=2, replica_size="node")
    plugins = [PoolEnvironment(num_nodes=2)]
    trainer = make_trainer(
        strategy,
        max_steps=4,
        devices=2,
        num_nodes=2,
        plugins=plugins,
        use_distributed_sampler=False,
    )
    trainer.fit(TinyModule(), loader(rank, SIZE))
    return strategy.replica_size, strategy.worker, strategy.place


def test_node_is_the_number_of_ranks_of_a_node(pool: Pool) -> None:
    assert pool.run(size_of_node, world=4) == [(2, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1)]


def test_values_that_are_refused(subtests: pytest.Subtests) -> None:
    for value, kind, text in (
        (0, ValueError, "replica_size is the number of ranks of a worker and must be at least 1"),
        (2.0, TypeError, "replica_size must be an integer, or 'node'"),
        (True, TypeError, "replica_size must be an integer, or 'node'"),
        ("nodes", TypeError, "got 'nodes'"),
    ):
        with subtests.test(str(value)), pytest.raises(kind, match=text):
            LocalSGDStrategy(replica_size=value)
        with subtests.test(f"{value} of gossip"), pytest.raises(kind, match=text):
            PairwiseGossipStrategy(replica_size=value)


def test_a_worker_on_parts_of_two_nodes_is_warned_of() -> None:
    message = "^replica_size=2 makes .* ranks 2 to 3 are one worker on several nodes"
    with pytest.warns(UserWarning, match=message):
        warn_of_straddling(2, 3, "replica_size=2")
    for size, per_node in ((2, 4), (4, 2), (3, 3)):
        warn_of_straddling(size, per_node, "")  # a warning would be an error


def fit_with_sync_batchnorm(rank: int, world: int) -> str:
    trainer = make_trainer(LocalSGDStrategy(replica_size=2), max_steps=1, sync_batchnorm=True)
    with pytest.raises(MisconfigurationException) as error:
        trainer.fit(TinyModule(), loader(rank, SIZE))
    return str(error.value)


def test_synchronized_batch_norm_is_refused(pool: Pool) -> None:
    assert "sync_batchnorm=True" in pool.run(fit_with_sync_batchnorm, world=2)[0]


# ------------------------------------------------------------------------------ stop


class StopLater(pl.Callback):
    """Asks one rank to stop."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.002)
        if (trainer.global_rank, trainer.global_step) == (3, 5):
            os.kill(os.getpid(), signal.SIGTERM)


def fit_until_stopped(rank: int, world: int, by_clock: bool) -> tuple[int, bool]:
    common: dict[str, Any] = {"replica_size": SIZE, "timeout_s": 20}
    strategy: Any = (
        AsyncModelAverageStrategy(interval_s=0.01, **common)
        if by_clock
        else LocalSGDStrategy(sync_every=5, **common)
    )
    # In place of a save, which waits for the others as well.
    strategy.checkpoints.save_interrupted = lambda *_: strategy.sync_point("a stop")
    trainer = make_trainer(
        strategy, max_epochs=1, use_distributed_sampler=False, callbacks=[StopLater()]
    )
    try:
        trainer.fit(TinyModule(), loader(rank, SIZE, 5000))
    except SIGTERMException:
        return trainer.global_step, True
    return trainer.global_step, False


@pytest.mark.recovery
@pytest.mark.parametrize("by_clock", [False, True], ids=["by steps", "by the clock"])
def test_the_ranks_of_a_worker_stop_at_the_same_step(pool: Pool, by_clock: bool) -> None:
    results = pool.run(fit_until_stopped, by_clock, world=4)
    (one,) = set(results)
    step, is_stopped = one
    assert is_stopped
    assert step < 5000


# ---------------------------------------------------------------------------- faults

TIMEOUT_S = 5.0


class FailBeforeBackward(pl.Callback):
    """Fails in a batch, before the gradients of its worker are averaged."""

    def __init__(self, fail: Callable[[], object]) -> None:
        self.fail = fail

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            self.fail()


def fit_with_fault(rank: int, world: int, kind: str, phase: str, victim: int, folder: Path) -> None:
    def fail() -> None:
        (folder / "failed_at").write_text(str(time.time()))
        KINDS[kind]()

    failing = FailBeforeBackward(fail) if phase == "batch" else FailIn(phase, fail)
    trainer = make_trainer(
        DiLoCoStrategy(sync_every=3, replica_size=SIZE, timeout_s=TIMEOUT_S),
        max_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[failing] if rank == victim else [],
    )
    trainer.fit(ValidatedModule(), loader(rank, SIZE, 20), loader(rank, SIZE, 2))


FAULTS = [("killed", "batch", 2), ("raises", "batch", 3), ("frozen", "batch", 1)]
MORE_FAULTS = [
    ("killed", "batch", 0),
    ("raises", "batch", 0),
    ("killed", "set-up", 3),
    ("raises", "start", 1),
    ("killed", "validation", 1),
    ("raises", "epoch end", 2),
]


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "phase", "victim"),
    [*FAULTS, *(pytest.param(*fault, marks=pytest.mark.soak) for fault in MORE_FAULTS)],
)
def test_the_others_name_the_rank_that_fails(
    kind: str, phase: str, victim: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_in_soak = request.node.get_closest_marker("soak") is not None
    longest_s = TIMEOUT_S + 6 if is_in_soak else HARNESS_S
    outcomes = check_fault(
        fit_with_fault,
        kind,
        phase,
        victim,
        tmp_path,
        kind=kind,
        victim=victim,
        timeout_s=TIMEOUT_S,
    )
    failed_at = float((tmp_path / "failed_at").read_text())
    for outcome in outcomes:
        assert outcome.ended_at - failed_at < longest_s, outcome.error


def hear_an_error(rank: int, world: int) -> list[str]:
    group = WorkerGroup.create(timeout_s=20, replica_size=SIZE)
    replica = ReplicaGroup(group)
    assert group.watchdog is not None
    found = []
    try:
        with pytest.raises(RuntimeError) as caught, replica.errors_named("local step 6"):
            raise RuntimeError("shapes cannot be multiplied")
        found.append(str(caught.value))
        dist.barrier()
        if rank == 1:
            group.watchdog.end()  # gives no sign of life, as a frozen process
        else:
            with pytest.raises(RuntimeError) as caught, replica.errors_named("local step 6"):
                raise RuntimeError("Application timeout caused pair closure")
            found.append(str(caught.value))
        dist.barrier()
    finally:
        replica.close(DDPStrategy(), has_failed=False)
        group.failed = False
        group.close()
    return found


def test_an_error_is_that_of_a_frozen_sibling_whatever_its_text(pool: Pool) -> None:
    """Some of gloo's texts do not say that they are its own."""
    own, of_sibling = pool.run(hear_an_error, world=SIZE)[0]
    assert own == "shapes cannot be multiplied"
    assert "from worker 0, place 1 (rank 1) (no sign of life)" in of_sibling


class WaitsElsewhere(TinyModule):
    """Its ranks wait for all others, each of a worker at another point."""

    def on_train_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        strategy.barrier(f"of place {strategy.place}")


def fit_waiting_elsewhere(rank: int, world: int) -> str:
    strategy = DiLoCoStrategy(sync_every=3, replica_size=SIZE, timeout_s=20)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(RuntimeError) as error:
        trainer.fit(WaitsElsewhere(), loader(rank, SIZE, 4))
    return str(error.value)


def test_ranks_of_one_worker_at_different_sync_points(pool: Pool) -> None:
    texts = pool.run(fit_waiting_elsewhere, world=4)
    first = "The ranks of worker 0 wait for each other at different sync points: "
    where = (
        "worker 0, place 0 (rank 0) at barrier of place 0 after 4 local steps; "
        "worker 0, place 1 (rank 1) at barrier of place 1 after 4 local steps."
    )
    assert any(first + where in text for text in texts)
    for text in texts:
        assert re.search(r"orker \d(, place \d \(rank \d\))? (failed|wait)", text), text


def fit_uneven_ranks(rank: int, world: int, lengths: list[int], sync_every: int) -> None:
    strategy = DiLoCoStrategy(sync_every=sync_every, replica_size=SIZE, timeout_s=2)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(ValidatedModule(), loader(rank, SIZE, lengths[rank]), loader(rank, SIZE, 2))


def fit_uneven_epochs(rank: int, world: int, lengths: list[int]) -> None:
    """The rank with fewer batches starts the next epoch while its sibling makes a round."""
    strategy = DiLoCoStrategy(sync_every=3, replica_size=SIZE, timeout_s=4)
    trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(TinyModule(), loader(rank, SIZE, lengths[rank]))


def test_a_rank_that_starts_the_next_epoch_alone_is_named(pool: Pool) -> None:
    with pytest.raises(PoolError) as error:
        pool.run(fit_uneven_epochs, [8, 8, 6, 8], world=4, grace_s=15)
    assert sorted(error.value.failures) == [0, 1, 2, 3]
    for rank, failure in error.value.failures.items():
        for other in (2, 3):
            assert rank == other or f"orker 1, place {other - 2} (rank {other})" in failure.message


@pytest.mark.parametrize(
    ("lengths", "sync_every"), [([8, 8, 5, 8], 3), ([8, 8, 6, 8], 3), ([4, 5, 5, 5], 100)], ids=str
)
def test_ranks_of_one_worker_with_different_numbers_of_batches(
    pool: Pool, lengths: list[int], sync_every: int
) -> None:
    with pytest.raises(PoolError) as error:
        pool.run(fit_uneven_ranks, lengths, sync_every, world=4, grace_s=10)
    worker = lengths.index(min(lengths)) // SIZE
    assert sorted(error.value.failures) == [0, 1, 2, 3]
    for rank, failure in error.value.failures.items():
        for other in range(SIZE * worker, SIZE * (worker + 1)):
            name = f"orker {worker}, place {other % SIZE} (rank {other})"
            assert rank == other or name in failure.message, f"rank {rank}"
    texts = [failure.message for failure in error.value.failures.values()]
    assert any("the same number of batches" in text for text in texts)
