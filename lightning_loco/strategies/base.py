"""LocoStrategy: any low-communication algorithm under Lightning's Trainer."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import Unpack

from lightning_loco.algorithms import Algorithm
from lightning_loco.comm import Statistics, WorkerGroup
from lightning_loco.rounds import RoundSettings, StepEngine
from lightning_loco.rounds.engine import Engine
from lightning_loco.strategies import lightning_private
from lightning_loco.strategies.arguments import (
    RoundArguments,
    check_choice,
    check_common_arguments,
    spelled_out,
)
from lightning_loco.strategies.meeting import MeetingStrategy
from lightning_loco.strategies.sampler import ShareSampler
from lightning_loco.strategies.shared_memory import leave_shared_memory
from lightning_loco.strategies.worker_checkpoints import WorkerCheckpoints

log = logging.getLogger(__name__)


class LocoStrategy(MeetingStrategy):
    """Train one model on workers that exchange rarely, sparsely or late.

    Each rank is a worker with its own copy of the model and its own share of the data. Gradients
    are never reduced; every ``sync_every`` optimizer steps the workers make a round of the
    algorithm. Validation, checkpoints and the model after ``fit`` are the consensus.

    Args:
        algorithm: What a round computes: ``LocalSGD()``, ``DiLoCo()``, ``GASLoC()`` or your own.
        sync_every: Local (optimizer) steps between rounds, at least 1; or a list with one number
            per worker, whose share of the data and of ``max_steps`` is then in proportion.
        overlap: Apply a round's result one round later and hide its communication (DiLoCo).
        warm_start: With overlap, make the first round a blocking one.
        topology: Who exchanges with whom, for gossip: a name such as ``"ring"``, a ``Topology``, a
            networkx graph, an ``(N, N)`` mixing matrix or an edge-list file.
        evaluate: ``"average"`` validates the consensus, ``"local"`` each worker its own model.
        finalize: ``"average"`` leaves the consensus in the model after fit, ``"keep"`` each
            worker's own parameters (until ``Trainer.validate``, which shares worker 0's).
        timeout_s: Longest wait for another worker, in seconds.
        bucket_bytes: Memory for messages under way, in bytes.
        accelerator: As in ``DDPStrategy``; usually set by the Trainer.
        parallel_devices: As in ``DDPStrategy``.
        cluster_environment: As in ``DDPStrategy``.
        checkpoint_io: As in ``DDPStrategy``.
        precision_plugin: As in ``DDPStrategy``.
        process_group_backend: As in ``DDPStrategy``: ``"nccl"``, ``"gloo"``; None chooses.
        start_method: How Lightning starts processes: ``"popen"``, ``"spawn"``, ``"fork"`` or
            ``"forkserver"``.

    Raises:
        ValueError: If a value is out of range, at construction or before training starts.
        TypeError: If a value has the wrong type or an argument is unknown.

    Example::

        strategy = LocoStrategy(GASLoC(momentum=0.3), topology="ring", sync_every=50)
        trainer = Trainer(strategy=strategy, devices=4, num_nodes=8)
    """

    def _init_with(
        self,
        settings: RoundSettings,
        *,
        evaluate: Literal["average", "local"] = "average",
        finalize: Literal["average", "keep"] = "average",
        timeout_s: float = 600.0,
        bucket_bytes: int = 64 * 2**20,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        """What the constructor of every strategy of workers ends with.

        Here the common arguments have their defaults.

        Args:
            settings: What the engine of :meth:`make_engine` is made of; kept as ``settings``.
            evaluate: As in the class, like all arguments that follow.
        """
        for name, value, allowed in (
            ("evaluate", evaluate, ("average", "local")),
            ("finalize", finalize, ("average", "keep")),
        ):
            check_choice(name, value, allowed)
        check_common_arguments(timeout_s, bucket_bytes, start_method)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
            start_method=start_method,
        )
        self.settings = settings
        self.evaluate = evaluate
        self.finalize = finalize
        self.timeout_s = timeout_s
        self.bucket_bytes = bucket_bytes
        self.statistics = Statistics()
        self._optimizer_steps: dict[int, int] = {}
        self._local_steps = 0
        self._max_steps: int | None = None
        self._loss: Any = math.nan
        self.engine: Engine | None = None
        self.checkpoints = WorkerCheckpoints(self)

    @property
    def meeting_place(self) -> Engine | None:
        """The engine: it takes part in the others' rounds while this worker waits."""
        return self.engine

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("The engine exists only during Trainer.fit.")
        return self.engine

    @spelled_out(_init_with)
    def __init__(
        self,
        algorithm: Algorithm,
        *,
        sync_every: int | Sequence[int] = 100,
        overlap: bool = False,
        warm_start: bool = True,
        topology: Any | None = None,
        **common: Unpack[RoundArguments],
    ) -> None:
        settings = RoundSettings(algorithm, sync_every, overlap, warm_start, topology)
        self._init_with(settings, **common)

    # ------------------------------------------------------------------- setup

    def configure_ddp(self) -> None:
        """Leave the model unwrapped: gradients stay local."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the engine: check the model on all workers and give them the same start."""
        if not self.is_fitting:
            super().setup(trainer)
            return
        if self._layer_sync is not None:
            raise MisconfigurationException(
                "sync_batchnorm=True communicates in every forward pass, which low-communication "
                "training avoids. Use Trainer(sync_batchnorm=False); statistics of BatchNorm are "
                "averaged for validation and checkpoints."
            )
        lightning_private.remove_lockstep(trainer, self.request_stop)
        super().setup(trainer)
        assert self.lightning_module is not None
        leave_shared_memory(self.lightning_module)
        group = WorkerGroup.create(timeout_s=self.timeout_s, device=self.root_device)
        self.engine = self.make_engine(group)
        self.statistics = self.engine.statistics
        self._optimizer_steps = {}
        self._local_steps = 0
        self._finished = False
        self.checkpoints.begin_fit()
        self._scale_max_steps(trainer)
        self._describe(self.engine)

    def make_engine(self, group: WorkerGroup) -> Engine:
        """Decide when and with whom this worker exchanges; called on every worker.

        Args:
            group: The workers; the engine closes it.
        """
        assert self.lightning_module is not None
        settings = self.settings
        return StepEngine(
            self.lightning_module,
            settings.algorithm,
            sync_every=settings.sync_every,
            overlap=settings.overlap,
            warm_start=settings.warm_start,
            topology=settings.topology,
            bucket_bytes=self.bucket_bytes,
            group=group,
        )

    def _scale_max_steps(self, trainer: pl.Trainer) -> None:
        """``max_steps`` counts the local steps of the worker that makes most of them per round."""
        assert self.engine is not None
        sync_every = self.engine.settings.sync_every
        loop = trainer.fit_loop.epoch_loop
        if not isinstance(sync_every, int) and loop.max_steps > 0:
            self._max_steps = loop.max_steps
            loop.max_steps = loop.max_steps * self.engine.sync_every // max(sync_every)

    def _describe(self, engine: Engine) -> None:
        layout = engine.replica.layout
        rank_zero_info(
            f"{engine.algorithm} on {engine.group.num_workers} workers, "
            f"{layout.numel:,} trainable parameters, a round every {engine.settings.sync_every} "
            f"local steps, topology {engine.settings.topology}, start {engine.checksum:08x}."
        )

    def process_dataloader(self, dataloader: object) -> object:
        """Share the training data in proportion to ``sync_every`` when it is a list."""
        shares = self.settings.shares(self.num_workers)
        if len(set(shares)) > 1 and isinstance(dataloader, DataLoader):
            even = lightning_private.sampler_of(dataloader)
            if isinstance(even, DistributedSampler):
                sampler = ShareSampler(even, shares, self.worker)
                dataloader = lightning_private.with_sampler(dataloader, sampler)
        lightning_private.set_present_epoch(self._trainer, dataloader)
        return dataloader

    def on_train_start(self) -> None:
        """Refuse a run too short for overlap; go on from this worker's own checkpoint."""
        self._check_length(self._engine)
        self.checkpoints.resume(self._trainer)

    def _check_length(self, engine: Engine) -> None:
        error = None
        steps = self._trainer.estimated_stepping_batches
        if engine.settings.overlap and steps < 2 * engine.sync_every:
            error = ValueError(
                f"overlap applies a round's result one round later, but this run of {steps:.0f} "
                f"local steps has room for a single round of sync_every={engine.sync_every}. "
                f"Use overlap=False (algorithm=diloco) or sync_every of at most {steps // 2:.0f}."
            )
        engine.group.raise_together(error)

    # ---------------------------------------------------------------- training

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop at a common step; safe to call from a signal handler."""
        if self.engine is not None:
            self.engine.request_stop(reason)
        else:
            lightning_private.raise_in_loop(self._trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End soon when another worker has failed."""
        watchdog = self._engine.group.watchdog
        if watchdog is not None:
            watchdog.raise_if_failed()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; with manual optimization, make a due round after it."""
        output = super().training_step(*args, **kwargs)
        self._loss = output.get("loss", math.nan) if isinstance(output, Mapping) else output
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._make_due_round()
        return output

    def prepare_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Do what comes before a step of the optimizer, and say what it is to call."""
        return closure

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step and count; with automatic optimization, make a due round right after."""
        closure = self.prepare_step(optimizer, closure)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        done = self._optimizer_steps.get(id(optimizer), 0) + 1
        self._optimizer_steps[id(optimizer)] = done
        if done > self._local_steps:
            self._local_steps = done
            self._engine.count_step()
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            self._make_due_round()
        return output

    def _make_due_round(self) -> None:
        engine = self._engine
        if engine.is_due:
            engine.last_loss = self._loss if isinstance(self._loss, Tensor) else math.nan
            engine.make_round()
            if not engine.was_finite:
                _clear_non_finite(self.optimizers)
        if engine.stop_agreed is not None:
            lightning_private.raise_in_loop(self._trainer)

    def on_train_end(self) -> None:
        """Share the last partial round and leave the consensus in the model."""
        engine = self._engine
        engine.finish()
        if self.finalize == "keep":
            engine.show_local()
        self._finished = True

    def on_exception(self, exception: BaseException) -> None:
        """Save once more after an agreed stop; tell the other workers of a failure."""
        engine = self.engine
        if engine is None or self._finished:
            return
        if engine.stop_agreed is not None and isinstance(exception, SIGTERMException):
            engine.show_local()
            self.checkpoints.save_interrupted(self._trainer, engine.stop_agreed)
        elif engine.group.watchdog is not None:
            text = "".join(traceback.format_exception(exception))
            engine.group.watchdog.report(text)

    def teardown(self) -> None:
        """Close the groups of the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        if self._max_steps is not None:
            self._trainer.fit_loop.epoch_loop.max_steps = self._max_steps
            self._max_steps = None
        super().teardown()

    # ------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus, for the checkpoint."""
        return self.checkpoints.model_state(super().lightning_module_state_dict)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write the side file of every worker, then the main file."""
        self.checkpoints.save(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the main file and, to resume training, this worker's side files."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        return self.checkpoints.load(loaded, checkpoint_path)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint and its side files."""
        self.checkpoints.remove(filepath)

    # ---------------------------------------------------------------- evaluate

    def on_validation_start(self) -> None:
        """Show the consensus to the validation."""
        if self.is_training and self.evaluate == "average":
            self.meet("validation")
            self._engine.show_consensus("validation of the consensus")

    def on_validation_end(self) -> None:
        """Bring the local parameters back."""
        if self.is_training:
            self._engine.show_local()


def _clear_non_finite(optimizers: Sequence[Optimizer]) -> None:
    """Zero what NaN and infinity have left in the memory of the optimizers."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
