"""What strategies require of Lightning, and what Lightning's users expect of a strategy."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_loco import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DiLoCo,
    DiLoCoStrategy,
    GASLoC,
    GASLoCStrategy,
    LocalSGD,
    LocalSGDStrategy,
    LocoStrategy,
    PairwiseGossipStrategy,
    StragglerSimulator,
    StreamingDiLoCoStrategy,
)
from lightning_loco.strategies import METHODS, lightning_compat, register_strategies
from lightning_loco.strategies.engine_strategy import EngineStrategy
from lightning_loco.strategies.lightning_compat import add_hooks
from lightning_loco.topology import Hypercube
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, make_loader, quiet_trainer, worker_batch

# ------------------------------------------------------- private names of Lightning


def test_private_names_of_lightning_exist() -> None:
    trainer = quiet_trainer(devices=1)
    signals = trainer._signal_connector
    assert signals.received_sigterm is False
    for handler in (signals._sigterm_notifier_fn, signals._slurm_sigusr_handler_fn):
        assert list(inspect.signature(handler).parameters) == ["signum", "_"]
    assert isinstance(trainer._logger_connector.should_update_logs, bool)
    parameters = list(inspect.signature(lightning_compat._update_dataloader).parameters)
    assert parameters[:2] == ["dataloader", "sampler"]
    parameters = list(inspect.signature(lightning_compat._set_sampler_epoch).parameters)
    assert parameters == ["dataloader", "epoch"]
    loop = trainer.fit_loop.epoch_loop
    assert isinstance(loop.max_steps, int)
    assert list(inspect.signature(loop.advance).parameters) == ["data_fetcher"]
    assert (loop._skip_next_val, loop.val_loop._has_run) == (False, False)
    assert LocalSGDStrategy()._checkpoint_io is None
    assert isinstance(AsyncCheckpointIO(), lightning_compat._WrappingCheckpointIO)
    assert trainer.fit_loop._skip_backward is False
    assert trainer.fit_loop._last_train_dl_reload_epoch == -math.inf
    assert loop.val_loop._last_val_dl_reload_epoch == -math.inf
    assert isinstance(loop._should_check_val_epoch(), bool)
    assert not inspect.signature(loop._on_before_fetch).parameters
    assert not inspect.signature(trainer._teardown).parameters
    assert lightning_compat._PrefetchDataFetcher().batches == []


class RecordsEpoch(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append("batch")

    def on_train_epoch_end(self, *args: Any) -> None:
        self.seen.append("hook")


def test_batches_end_is_called_before_hooks_of_the_epoch_end(tmp_path: Path) -> None:
    callback = RecordsEpoch()
    trainer = quiet_trainer(
        devices=1, max_epochs=2, callbacks=[callback], default_root_dir=tmp_path
    )
    hooks = add_hooks(
        trainer,
        batches_end=lambda: callback.seen.append("end"),
        end=nullcontext,
        saving=nullcontext,
        sync_point=callback.seen.append,
    )
    with hooks:
        trainer.fit(TinyModule(), make_loader(0, 2))
    assert callback.seen == ["batch", "batch", "end", "hook"] * 2


def test_the_lockstep_is_removed_from_one_trainer_only() -> None:
    trainer, other = (quiet_trainer(devices=1) for _ in range(2))
    reasons: list[str] = []
    lightning_compat.remove_lockstep(trainer, reasons.append)
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        assert name in vars(trainer._signal_connector)
        assert name not in vars(other._signal_connector)
    # Lightning before 2.5.2 has no broadcast to remove.
    if hasattr(other.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        assert "_broadcast_sigterm_tensor" in vars(trainer.fit_loop.epoch_loop)
        assert "_broadcast_sigterm_tensor" not in vars(other.fit_loop.epoch_loop)
    trainer._signal_connector._slurm_sigusr_handler_fn(10, None)
    trainer._signal_connector._sigterm_notifier_fn(15, None)
    assert reasons == [lightning_compat.REQUEUE, lightning_compat.TERMINATE]


def test_received_sigterm_ends_the_training_loop(pool: Pool) -> None:
    assert pool.run(stop_after_three, world=1) == [3]


class StopAfterThree(pl.Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            lightning_compat.raise_in_loop(trainer)


def stop_after_three(rank: int, world: int) -> int:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    trainer = make_trainer("auto", max_epochs=1, callbacks=[StopAfterThree()])
    with pytest.raises(SIGTERMException):
        trainer.fit(TinyModule(), make_loader(0, 10))
    return trainer.global_step


class OlderFiles(CheckpointIO):
    """A CheckpointIO with the loading signature of Lightning 2.5."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def remove_checkpoint(self, path: Any) -> None:
        raise NotImplementedError

    def load_checkpoint(self, path: str, map_location: Any = None) -> dict[str, Any]:
        return {"read": path}


class NewerFiles(OlderFiles):
    """A CheckpointIO with the loading signature of Lightning 2.6."""

    def load_checkpoint(
        self, path: str, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return {"read": path, "weights_only": weights_only}


@pytest.mark.parametrize("wraps", [False, True])
def test_files_are_read_with_every_version_of_checkpoint_io(wraps: bool) -> None:
    older, newer = (AsyncCheckpointIO(io) if wraps else io for io in (OlderFiles(), NewerFiles()))
    assert lightning_compat.load_checkpoint(older, "a", weights_only=True) == {"read": "a"}
    loaded = lightning_compat.load_checkpoint(newer, "a", weights_only=True)
    assert loaded == {"read": "a", "weights_only": True}


# ------------------------------------------------------------------------------- sampler


class Indices(Dataset[Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class IndexModule(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.tolist()
        return super().training_step(worker_batch(0, batch_idx), batch_idx)


def collect_indices(rank: int, world: int) -> list[int]:
    module = IndexModule()
    trainer = make_trainer(LocoStrategy(LocalSGD(), sync_every=2), max_epochs=1)
    trainer.fit(module, DataLoader(Indices(), batch_size=4, shuffle=True))
    return module.seen


def test_every_worker_gets_its_own_share_of_the_data(pool: Pool) -> None:
    shares = pool.run(collect_indices, world=4)
    assert [len(share) for share in shares] == [8] * 4
    assert sorted(sum(shares, [])) == list(range(32))


# ----------------------------------------------------------------------------- lock-step


class Clock(pl.Callback):
    """Measures the seconds from the start of training to the end of this worker's last batch."""

    def on_train_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.barrier("all start together")
        self.started_s = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.elapsed_s = time.perf_counter() - self.started_s


def time_batches(rank: int, world: int) -> float:
    clock = Clock()
    trainer = make_trainer(
        LocoStrategy(DiLoCo(), sync_every=100),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[clock, StragglerSimulator({0: 0.05})],
    )
    trainer.fit(TinyModule(), make_loader(rank, 10))
    return clock.elapsed_s


@pytest.mark.alone
def test_a_slow_worker_does_not_delay_others_within_a_round(pool: Pool) -> None:
    slow, *fast = pool.run(time_batches, world=3)
    assert slow >= 0.5
    assert max(fast) < 0.4


FUNCTIONS = (
    "all_reduce",
    "broadcast",
    "barrier",
    "monitored_barrier",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
)


class CollectiveCounter:
    """Counts calls of torch.distributed by name, and forwards them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._originals = {name: getattr(dist, name) for name in FUNCTIONS}

    def __enter__(self) -> CollectiveCounter:
        for name, original in self._originals.items():
            setattr(dist, name, self._counting(name, original))
        return self

    def __exit__(self, *args: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return original(*args, **kwargs)

        return counted


class CountPerBatch(pl.Callback):
    """Counts each batch's collectives, from before it is fetched until after its last hook."""

    def __init__(self, counter: CollectiveCounter) -> None:
        self.counter = counter
        self.totals: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.totals.append(self.counter.counts.total())

    @property
    def per_batch(self) -> list[int]:
        return [b - a for a, b in zip(self.totals, self.totals[1:], strict=False)]


def count_collectives(rank: int, world: int, strategy: Strategy) -> list[int]:
    with CollectiveCounter() as counter:
        callback = CountPerBatch(counter)
        trainer = make_trainer(
            strategy, max_epochs=1, use_distributed_sampler=False, callbacks=[callback]
        )
        trainer.fit(TinyModule(), make_loader(rank, 9))
    return callback.per_batch


def test_local_steps_make_no_collective(pool: Pool) -> None:
    for counts in pool.run(count_collectives, LocoStrategy(DiLoCo(), sync_every=100), world=2):
        assert counts == [0] * 8


def test_only_batches_with_a_round_make_collectives(pool: Pool) -> None:
    strategy = LocoStrategy(DiLoCo(), sync_every=3)
    for counts in pool.run(count_collectives, strategy, world=2):
        # A single one: statuses are sent with the only bucket of the round.
        assert counts == [0, 0, 1, 0, 0, 1, 0, 0]


@pytest.mark.skipif(
    not hasattr(pl.loops.training_epoch_loop._TrainingEpochLoop, "_broadcast_sigterm_tensor"),
    reason="this version of Lightning has no broadcast per batch",
)
def test_the_counter_counts_the_broadcast_of_lightning_in_each_batch(pool: Pool) -> None:
    for counts in pool.run(count_collectives, DDPStrategy(), world=2):
        assert counts == [1] * 8


# --------------------------------------------------------------------- as a Lightning user

# Public names; the other tests cover the whole table.
NAMED = {
    "local_sgd": LocalSGDStrategy,
    "diloco": DiLoCoStrategy,
    "async_diloco": AsyncDiLoCoStrategy,
    "streaming_diloco": StreamingDiLoCoStrategy,
    "gasloc": GASLoCStrategy,
    "async_model_average": AsyncModelAverageStrategy,
    "pairwise_gossip": PairwiseGossipStrategy,
}
WITH_WORKERS = {name: kind for name, kind in METHODS.items() if issubclass(kind, EngineStrategy)}


def test_unknown_arguments_are_refused(subtests: pytest.Subtests) -> None:
    for name, strategy in WITH_WORKERS.items():
        with subtests.test(name), pytest.raises(TypeError, match="sync_evry"):
            strategy(sync_evry=10)


def test_unknown_arguments_are_refused_by_the_general_strategy() -> None:
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        LocoStrategy(LocalSGD(), bucket_cap_mb=25)  # type: ignore[call-arg]


def test_strategies_are_picklable_before_setup(subtests: pytest.Subtests) -> None:
    for strategy in (
        *(strategy() for strategy in WITH_WORKERS.values()),
        LocoStrategy(DiLoCo(outer_optimizer=torch.optim.AdamW), sync_every=[3, 1], overlap=True),
        GASLoCStrategy(Hypercube(), sync_every=7, evaluate="local", finalize="keep"),
    ):
        with subtests.test(type(strategy).__name__):
            copy = pickle.loads(pickle.dumps(strategy))
            assert type(copy) is type(strategy)
            assert copy.settings == strategy.settings
            assert (copy.evaluate, copy.finalize) == (strategy.evaluate, strategy.finalize)
            assert copy.timeout_s == strategy.timeout_s


def test_strategies_by_name(subtests: pytest.Subtests) -> None:
    for name, kind in WITH_WORKERS.items():
        for suffix, launcher in (
            ("", "_SubprocessScriptLauncher"),
            ("_notebook", "_MultiProcessingLauncher"),
        ):
            with subtests.test(name + suffix):
                trainer = quiet_trainer(strategy=name + suffix, devices=4, num_nodes=2)
                strategy = trainer.strategy
                assert type(strategy) is kind
                assert strategy.num_workers == trainer.world_size == 8
                assert type(strategy.launcher).__name__ == launcher
                assert strategy.settings == kind().settings
                if suffix:
                    assert strategy.launcher._start_method == "fork"


def test_names_may_be_registered_again() -> None:
    register_strategies()
    assert NAMED.items() <= METHODS.items()
    assert METHODS.keys() - WITH_WORKERS.keys() == {"remote_optimizer"}  # see test_remote.py


def test_the_named_strategies_choose_their_algorithm() -> None:
    assert LocalSGDStrategy().settings.algorithm == LocalSGD()
    assert DiLoCoStrategy(5, 0.5, 0.4, False).settings.algorithm == DiLoCo(0.5, 0.4, False)
    overlapped = AsyncDiLoCoStrategy(5, warm_start=False, fragments=None).settings
    assert overlapped.algorithm == DiLoCo(outer_momentum=0.0)
    assert (overlapped.schedule.overlap, overlapped.schedule.warm_start) == (True, False)
    gossip = GASLoCStrategy("star", 5, 0.9, 0.4, 0.3, "gossiped").settings
    assert gossip.algorithm == GASLoC(0.9, 0.4, 0.3, "gossiped")
    assert (gossip.topology, gossip.schedule.sync_every) == ("star", 5)
