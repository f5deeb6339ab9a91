"""A strategy whose workers are driven by an engine each: where Lightning's hooks call it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.devices import device_of_messages
from lightning_loco.earlier_run import EarlierRun
from lightning_loco.engine import Engine as RoundEngine
from lightning_loco.engine import RoundSettings
from lightning_loco.schedules import Schedule
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.added_hooks import add_hooks
from lightning_loco.strategies.checkpoint.workers import WorkerCheckpoints
from lightning_loco.strategies.data import Pace, share_data
from lightning_loco.strategies.driven import Engine, bytes_of_ddp, describe, link_of, summarize
from lightning_loco.strategies.external_updates import (
    WrittenWeights,
    averaged_models,
    finish_with_averages,
)
from lightning_loco.strategies.local_model import LocalModel, check_batch_norm, leave_shared_memory
from lightning_loco.strategies.local_training import (
    LocalSteps,
    check_left_out,
    clear_non_finite,
    loss_in,
)
from lightning_loco.strategies.meeting import SyncPointStrategy
from lightning_loco.strategies.summary import NO_METRICS, advice
from lightning_loco.values import check_choice, check_common_arguments

SAMPLED = 8192
"""Elements from which the consensus distance at the end is estimated."""

_NO_TRAINING = (
    "the end of a fit that trained nothing: no batches there, or nothing left of max_steps, "
    "max_epochs or max_time"
)


class EngineStrategy(SyncPointStrategy):
    """Each rank is a worker with its own copy of the model, which an engine drives.

    Gradients are never reduced. The engine is told of every local (optimizer) step and decides when
    this worker exchanges with others. Validation, checkpoints and the model after ``fit`` are the
    mean of the workers' local parameters.

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
        evaluate: Literal["average", "outer", "local"] = "average",
        finalize: Literal["average", "keep"] = "average",
        checkpoint_folder: Literal["shared", "private"] = "shared",
        timeout_s: float = 600.0,
        summary: bool = True,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        """What the constructor of every strategy of workers ends with.

        :meth:`make_engine` makes one of ``settings``; the common arguments have defaults here.
        """
        check_choice("evaluate", evaluate, ("average", "outer", "local"))
        check_choice("finalize", finalize, ("average", "keep"))
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
        self.evaluate, self.finalize, self.timeout_s = evaluate, finalize, timeout_s
        self.summary = summary
        self.statistics = Statistics()
        self._steps = LocalSteps()
        self._pace: Pace | None = None
        self._added = ExitStack()
        self._loss: Any = math.nan
        self.engine: Engine | None = None
        self.checkpoints = WorkerCheckpoints(self, checkpoint_folder)
        self._weights = WrittenWeights(self)

    @property
    def schedule(self) -> Schedule | None:
        """When rounds begin and end; None if there are none."""
        return None

    @abstractmethod
    def make_engine(self, group: WorkerGroup) -> Engine:
        """Decide when and with whom this worker exchanges; called on every worker."""

    @abstractmethod
    def reset(self, saved: EarlierRun | None = None) -> list[str]:
        """Start from the model, with what fits of another run, and say what does not fit."""

    @property
    def sync_points(self) -> Engine | None:
        """The engine, which takes part in the others' rounds while it waits."""
        return self.engine

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("The engine exists only during Trainer.fit.")
        return self.engine

    # ------------------------------------------------------------------- setup

    def configure_ddp(self) -> None:
        """Put the model into a shell with the names of DDP's; gradients stay local."""
        assert self.lightning_module is not None
        self.model = LocalModel(self.lightning_module)

    def setup_environment(self) -> None:
        """Connect the ranks; from here on those of a ``fit`` watch over each other."""
        super().setup_environment()
        if self.is_fitting:
            self._finished = False
            self.group = WorkerGroup.begin(timeout_s=self.timeout_s)
            self.checkpoints.begin_fit()

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the engine: check the model on all workers and give them the same start."""
        if not self.is_fitting:
            super().setup(trainer)
            return
        check_batch_norm(self)
        lightning_compat.remove_lockstep(trainer, self.request_stop)
        super().setup(trainer)
        assert self.lightning_module is not None
        leave_shared_memory(self.lightning_module)
        assert self.group is not None
        self.group.connect(device_of_messages(self.settings.outer_device, self.root_device))
        self.engine = self.make_engine(self.group)
        self._choose_evaluated(self.engine, trainer)
        self.statistics = self.engine.statistics
        self._steps = LocalSteps()
        if self.schedule is not None:
            self._pace = Pace(trainer, self.schedule, self.worker, self.num_workers)
        self._weights.begin_fit()
        self.engine.worker.averaged_copies.find_copies = lambda: averaged_models(trainer)
        self._added = add_hooks(
            trainer,
            batches_end=self._weights.end_batches,
            end=self._end_training,
            saving=self.checkpoints.consensus_shown,
            sync_point=self.sync_point,
            validation_start=self._begin_validation,
            validation_end=self._end_validation,
        )
        trained = self.lightning_module.parameters()
        self._added.callback(self._steps.watch(trained, self._before_raw_step, self._count))
        if self._pace is not None:
            self._added.callback(self._pace.restore)
        rank_zero_info(describe(self.engine, self.schedule))

    def _choose_evaluated(self, engine: Engine, trainer: pl.Trainer) -> None:
        """Refuse what cannot be evaluated so, and files that were chosen by another model."""
        if self.evaluate == "outer":
            if engine.settings.consensus_key is None:
                raise ValueError(
                    "evaluate='outer' needs outer parameters that are the same on all workers, "
                    f"which {engine.settings.algorithm} has not. Use evaluate='average'."
                )
            assert isinstance(engine, RoundEngine)
            engine.shows_outer = True
        for callback in trainer.checkpoint_callbacks if self.evaluate == "local" else ():
            monitor = getattr(callback, "monitor", None)
            if monitor not in NO_METRICS:
                raise ValueError(
                    f"{type(callback).__name__}(monitor={monitor!r}) would choose files by what "
                    "each worker's own model has reached, but they hold the mean of all. Use "
                    "evaluate='average', or leave monitor out."
                )

    def sync_point(self, purpose: str) -> None:
        """Wait until all workers have come to the same place, as in :class:`SyncPointStrategy`."""
        self._weights.note()
        super().sync_point(purpose)
        self._weights.expect()

    def process_dataloader(self, dataloader: object) -> object:
        """Share the training data in proportion to ``sync_every`` when it is a list."""
        if self.schedule is not None:
            dataloader = share_data(dataloader, self.schedule.shares(self.num_workers), self.worker)
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Refuse a run too short for overlap; go on from this worker's own checkpoint."""
        if self._pace is not None:
            with self._engine.worker.group.errors_shared("the start of training"):
                self._pace.check_length(self._trainer)
            for line in self._advice():
                rank_zero_info(line)
        self._go_on()

    def _advice(self) -> Iterator[str]:
        engine, shown = self._engine, self.evaluate
        settings, layout = engine.settings, engine.worker.replica.layout
        assert isinstance(settings, RoundSettings)
        if link_of(engine) is not None:  # such a worker cannot average with the others
            shown = "local" if settings.consensus_key is None else "outer"
        return advice(self._trainer, settings, self.worker, layout, shown)

    def _go_on(self) -> None:
        self._finished = False  # a search for the learning rate may have trained before
        self._weights.resume(self.checkpoints)

    # ---------------------------------------------------------------- training

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop at a common step; safe to call from a signal handler."""
        if self.engine is not None:
            self.engine.worker.stop.request(reason)
        else:
            lightning_compat.raise_in_loop(self._trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make the round that is due before the coming step; end soon if a worker has failed.

        Rounds are made here and not after the step, because a validation, a checkpoint or the end
        of ``fit`` may lie in between: they are those of the parameters and of the statistics of
        BatchNorm that local steps have brought about.
        """
        if self._finished:
            self._go_on()
        self._steps.begin_batch()
        self._weights.begin_batches()
        watchdog = self._engine.worker.group.watchdog
        if watchdog is not None:
            watchdog.raise_if_failed()
        self._make_due_round()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; its optimizers see the parameters that its gradients belong to."""
        copy_on_write = self._engine.worker.replica.copy_on_write
        copy_on_write.hold()
        output = super().training_step(*args, **kwargs)
        self._loss = loss_in(output)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            copy_on_write.release()
            self._stop_if_agreed()
        return output

    def prepare_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Do what comes before a step of the optimizer, and say what it is to call.

        A step that is not made through Lightning has no closure: it comes as one that does nothing,
        and what is returned is called at once, right before the step.
        """
        return closure

    def _before_raw_step(self, optimizer: Optimizer) -> None:
        self.prepare_step(optimizer, lambda: None)()

    def _count(self, optimizer: Optimizer) -> None:
        if self._steps.is_new(optimizer):
            self._engine.count_step()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step and count."""
        closure = self.prepare_step(optimizer, closure)
        with self._steps.through_lightning():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        is_automatic = self.lightning_module.automatic_optimization
        if is_automatic:
            self._engine.worker.replica.copy_on_write.release()
        self._count(optimizer)
        if is_automatic:
            self._stop_if_agreed()
        return output

    def _stop_if_agreed(self) -> None:
        if self._engine.worker.stop_agreed is not None:
            lightning_compat.stop_after_batch(self._trainer, self._added)

    def _make_due_round(self) -> None:
        """Make the round that is due; none before the first step, when all workers are equal."""
        engine = self._engine
        if engine.worker.steps and engine.is_due:
            check_left_out(engine.worker.replica.left_out, self.optimizers)
            engine.worker.last_loss = self._loss
            engine.make_round()
            if not engine.worker.was_finite:
                clear_non_finite(self.optimizers)

    @contextmanager
    def _end_training(self) -> Iterator[None]:
        """Leave the consensus in the model, before all hooks."""
        self._weights.end_fit()
        engine, worker, distance = self._engine, self._engine.worker, None
        check_left_out(worker.replica.left_out, self.optimizers)
        if self.summary and worker.group.num_workers > 1:
            self.sync_point("the end of training")
            distance = worker.measure_consensus(SAMPLED)
        finish_with_averages(engine, self._trainer, keeps_local=self.finalize == "keep")
        self._finished = True
        if self.summary:
            layout, num_workers = worker.replica.layout, worker.group.num_workers
            of_ddp = bytes_of_ddp(num_workers, layout.num_bytes, worker.steps)
            rank_zero_info(summarize(engine.statistics, worker.steps, of_ddp, distance))
        yield

    def on_exception(self, exception: BaseException) -> None:
        """Save once more after an agreed stop; tell the other workers of a failure."""
        engine = self.engine
        if self.group is None or self._finished:
            return
        if engine is not None and engine.stop_agreed and isinstance(exception, SIGTERMException):
            engine.worker.show_local()
            self.checkpoints.save_interrupted(self._trainer, engine.stop_agreed)
        else:
            self.group.report_error(exception)

    def teardown(self) -> None:
        """Close the engine and the groups."""
        self._added.close()
        watchdog = self.group.watchdog if self.group is not None else None
        if watchdog is not None and not (self._finished or self._is_alone):
            watchdog.leave(_NO_TRAINING)
        for part in (self.engine, self.group):
            if part is not None:
                part.close()
        self.engine = self.group = self._pace = None
        if isinstance(self.model, LocalModel):
            self.model = self.lightning_module
        super().teardown()

    def _begin_validation(self) -> None:
        if self.is_training and self.evaluate != "local":
            self._weights.share_start()
            self.sync_point("validation")
            self._engine.show_consensus("validation of the consensus")

    def _end_validation(self) -> None:
        if self.is_training:
            self._engine.worker.show_local()
