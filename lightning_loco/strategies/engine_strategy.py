"""A strategy whose workers are driven by an engine each: where Lightning's hooks call it."""

from __future__ import annotations

import math
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_loco.comm import Statistics, Worker, WorkerGroup
from lightning_loco.schedules import Schedule
from lightning_loco.strategies import lightning_private
from lightning_loco.strategies.arguments import check_choice, check_common_arguments
from lightning_loco.strategies.driven import Engine
from lightning_loco.strategies.meeting import MeetingStrategy
from lightning_loco.strategies.pace import ScaledSteps, check_length, share_data
from lightning_loco.strategies.shared_memory import leave_shared_memory
from lightning_loco.strategies.user_optimizers import check_left_out, clear_non_finite
from lightning_loco.strategies.worker_checkpoints import WorkerCheckpoints
from lightning_loco.strategies.written_weights import WrittenWeights


class EngineStrategy(MeetingStrategy):
    """Each rank is a worker with its own copy of the model, which an engine drives.

    Gradients are never reduced. The engine is told of every local (optimizer) step and decides when
    this worker exchanges with others. Validation, checkpoints and the model after ``fit`` are the
    consensus.

    Attributes:
        settings: What the engine is made of; given to :meth:`_init_with`.
        engine: During ``fit``.
        checkpoints: Writes and reads them.
    """

    settings: Any
    engine: Engine | None
    checkpoints: WorkerCheckpoints

    def _init_with(
        self,
        settings: Any,
        *,
        evaluate: Literal["average", "local"] = "average",
        finalize: Literal["average", "keep"] = "average",
        timeout_s: float = 600.0,
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
        check_common_arguments(timeout_s, start_method)
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
        self.statistics = Statistics()
        self._optimizer_steps: dict[int, int] = {}
        self._local_steps = 0
        self._scaled_steps: ScaledSteps | None = None
        self._loss: Any = math.nan
        self.engine: Engine | None = None
        self.checkpoints = WorkerCheckpoints(self)
        self._weights = WrittenWeights(self)

    @property
    def schedule(self) -> Schedule | None:
        """When rounds begin and end; None if there are none."""
        return None

    @abstractmethod
    def make_engine(self, group: WorkerGroup) -> Engine:
        """Decide when and with whom this worker exchanges; called on every worker.

        Args:
            group: The workers; the engine closes it.
        """

    @abstractmethod
    def begin_anew(self) -> None:
        """Make what the model holds now the start of the algorithm; called on every worker."""

    @property
    def meeting_place(self) -> Worker | None:
        """This worker, which takes part in the others' rounds while it waits."""
        return None if self.engine is None else self.engine.worker

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("The engine exists only during Trainer.fit.")
        return self.engine

    # ------------------------------------------------------------------- setup

    def configure_ddp(self) -> None:
        """Leave the model unwrapped: gradients stay local."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the engine: check the model on all workers and give them the same start."""
        if not self.is_fitting:
            super().setup(trainer)
            return
        if lightning_private.syncs_batch_norm(self):
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
        if self.schedule is not None:
            self._scaled_steps = ScaledSteps(trainer, self.schedule, self.worker, self.num_workers)
        self._weights.begin_fit(trainer)
        self._describe(self.engine)

    def meet(self, purpose: str) -> None:
        """Wait until all workers have come to the same place, as in :class:`MeetingStrategy`."""
        self._weights.note()
        super().meet(purpose)
        self._weights.expect()

    def _describe(self, engine: Engine) -> None:
        worker, settings = engine.worker, engine.settings
        rounds = "" if self.schedule is None else f"{self.schedule}, topology {settings.topology}, "
        rank_zero_info(
            f"{settings.algorithm} on {worker.group.num_workers} workers, "
            f"{worker.replica.layout.numel:,} trainable parameters, {rounds}"
            f"start {worker.checksum:08x}."
        )

    def process_dataloader(self, dataloader: object) -> object:
        """Share the training data in proportion to ``sync_every`` when it is a list."""
        if self.schedule is not None:
            dataloader = share_data(dataloader, self.schedule.shares(self.num_workers), self.worker)
        lightning_private.set_present_epoch(self._trainer, dataloader)
        return dataloader

    def on_train_start(self) -> None:
        """Refuse a run too short for overlap; go on from this worker's own checkpoint."""
        if self.schedule is not None:
            with self._engine.worker.group.errors_shared():
                check_length(self.schedule, self.worker, self._trainer.estimated_stepping_batches)
        self._weights.resume(self.checkpoints)

    # ---------------------------------------------------------------- training

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop at a common step; safe to call from a signal handler."""
        if self.engine is not None:
            self.engine.worker.stop.request(reason)
        else:
            lightning_private.raise_in_loop(self._trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End soon when another worker has failed."""
        self._weights.begin_batches()
        watchdog = self._engine.worker.group.watchdog
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
            check_left_out(engine.worker.replica.left_out, self.optimizers)
            engine.worker.last_loss = self._loss if isinstance(self._loss, Tensor) else math.nan
            engine.make_round()
            if not engine.worker.was_finite:
                clear_non_finite(self.optimizers)
        if engine.worker.stop_agreed is not None:
            lightning_private.raise_in_loop(self._trainer)

    def on_train_end(self) -> None:
        """Share the last partial round and leave the consensus in the model."""
        self._weights.end_fit()
        engine = self._engine
        check_left_out(engine.worker.replica.left_out, self.optimizers)
        engine.finish()
        if self.finalize == "keep":
            engine.worker.show_local()
        self._finished = True

    def on_exception(self, exception: BaseException) -> None:
        """Save once more after an agreed stop; tell the other workers of a failure."""
        engine = self.engine
        if engine is None or self._finished:
            return
        worker = engine.worker
        if worker.stop_agreed is not None and isinstance(exception, SIGTERMException):
            worker.show_local()
            self.checkpoints.save_interrupted(self._trainer, worker.stop_agreed)
        elif worker.group.watchdog is not None:
            text = "".join(traceback.format_exception(exception))
            worker.group.watchdog.report(text)

    def teardown(self) -> None:
        """Close the groups of the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        if self._scaled_steps is not None:
            self._scaled_steps.restore()
            self._scaled_steps = None
        super().teardown()

    # ---------------------------------------------------------------- evaluate

    def on_validation_start(self) -> None:
        """Show the consensus to the validation."""
        if self.is_training and self.evaluate == "average":
            self._weights.share_start()
            self.meet("validation")
            self._engine.worker.show_consensus("validation of the consensus")

    def on_validation_end(self) -> None:
        """Bring the local parameters back."""
        if self.is_training:
            self._engine.worker.show_local()
