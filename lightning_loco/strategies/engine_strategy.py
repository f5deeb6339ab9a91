"""The base of strategies whose workers have an engine each, which exchanges with the others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_loco._util.checks import (
    check_choice,
    check_replica_size,
    ranks_per_worker,
)
from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.devices import device_of_messages
from lightning_loco.elastic.member_connection import MemberConnection
from lightning_loco.engine import RoundSettings
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.schedules import Schedule
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.arguments import WorkerArguments
from lightning_loco.strategies.changed_weights import (
    ExternalUpdates,
    averaged_models,
    finish_with_averages,
)
from lightning_loco.strategies.checkpoint.checkpoints import Checkpoints
from lightning_loco.strategies.checkpoint.local_state import LocalState
from lightning_loco.strategies.checkpoint.main_file import MainFile
from lightning_loco.strategies.data import MaxSteps, share_data
from lightning_loco.strategies.lightning_compat import add_hooks
from lightning_loco.strategies.local_training import (
    LocalModel,
    check_batch_norm,
    check_untracked,
    clear_non_finite,
    leave_shared_memory,
    loss_in,
    optimized_by,
)
from lightning_loco.strategies.replica_group import ReplicaGroup, warn_of_straddling
from lightning_loco.strategies.summary import (
    NO_METRICS,
    NOT_SHOWN,
    advice,
    describe,
    errors_as_warnings,
    measure_distance,
    show_summary,
)
from lightning_loco.strategies.worker_strategy import WorkerStrategy

_NO_TRAINING = (
    "the end of a fit that trained nothing: no batches there, or nothing left of max_steps, "
    "max_epochs or max_time"
)


class EngineStrategy(WorkerStrategy):
    """A strategy in which each worker has its own copy of the model and an engine.

    Gradients are not reduced between workers; within a worker of several ranks DDP averages them in
    every step, and each rank has an engine that exchanges with the ranks of equal place
    (see :class:`~lightning_loco.distributed.WorkerGroup`). The engine, None outside ``fit``, counts
    local (optimizer) steps and decides when this worker exchanges with others. Validation,
    checkpoints and the model after ``fit`` are the mean of the workers' local parameters.
    """

    settings: Any
    engine: LocalParticipant | None

    def _init_with(
        self,
        settings: Any,
        /,
        *,
        evaluate: Literal["average", "outer", "local"] = "average",
        finalize: Literal["average", "keep"] = "average",
        checkpoint_folder: Literal["shared", "private"] = "shared",
        replica_size: int | Literal["node"] = 1,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        **common: Unpack[WorkerArguments],
    ) -> None:
        """Check and set the arguments of every strategy whose engine ``settings`` make."""
        check_choice("evaluate", evaluate, ("average", "outer", "local"))
        check_choice("finalize", finalize, ("average", "keep"))
        check_replica_size(replica_size)
        self._init_worker(
            {
                "find_unused_parameters": find_unused_parameters,
                "static_graph": static_graph,
                "gradient_as_bucket_view": gradient_as_bucket_view,
            },
            **common,
        )
        self.settings = settings
        self.asked_replica_size = replica_size
        self._replica_group: ReplicaGroup | None = None
        self.evaluate, self.finalize = evaluate, finalize
        self.checkpoint_folder = checkpoint_folder
        self._max_steps: MaxSteps | None = None
        self.engine: LocalParticipant | None = None
        self._failed_engine: LocalParticipant | None = None
        self._save_to(MainFile(self))
        self._external_updates = ExternalUpdates(self)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that this strategy has in common with others, as they were given."""
        return {
            **super().arguments,
            "evaluate": self.evaluate,
            "finalize": self.finalize,
            "checkpoint_folder": self.checkpoint_folder,
            "replica_size": self.asked_replica_size,
        }

    def _init_like(self, method: EngineStrategy) -> None:
        self._init_with(method.settings, **method.arguments)

    def _save_to(self, main: MainFile) -> None:
        """Set how the main files of checkpoints are written."""
        self._run_state = LocalState(self, main, self.checkpoint_folder)
        self.checkpoints = Checkpoints(self, self._run_state)

    @property
    def schedule(self) -> Schedule | None:
        """When rounds start and end; None if there are no rounds."""
        return None

    @property
    def data_shares(self) -> list[int]:
        """In what proportion the readers share the data, a positive integer for each.

        A reader is a rank, or several that read the same data.
        """
        readers, workers = self.distributed_sampler_kwargs["num_replicas"], self.num_workers
        shares = [1] * workers if self.schedule is None else self.schedule.shares(workers)
        return [share for share in shares for _ in range(readers // workers)]

    @abstractmethod
    def engine_of(
        self, model: torch.nn.Module, group: WorkerGroup, optimized: Sequence[Tensor] | None
    ) -> LocalParticipant:
        """Make an engine of a model from the settings; all ranks must call it.

        Only the ``optimized`` parameters are exchanged, by default all trainable ones.
        """

    def make_engine(self, group: WorkerGroup) -> LocalParticipant:
        """Make the engine of this worker; called on every worker."""
        assert self.lightning_module is not None
        return self.engine_of(self.lightning_module, group, optimized_by(self.optimizers))

    @property
    def participant(self) -> LocalParticipant | None:
        """The engine, which takes part in the rounds of the others while it waits."""
        return self.engine

    @property
    def member_connection(self) -> MemberConnection | None:
        """The connection to members that join and leave; None if the workers are fixed."""
        return None

    @property
    def failed_engine(self) -> LocalParticipant | None:
        """The engine of a fit that this worker has ended with an error; None without.

        An engine with rounds is kept until the next fit, because checkpoints read it.
        """
        if self.engine is None:
            return self._failed_engine
        return self.engine if self._is_alone and not self._finished else None

    @property
    def _engine(self) -> LocalParticipant:
        if self.engine is None:
            raise RuntimeError("The engine exists only during Trainer.fit.")
        return self.engine

    # ------------------------------------------------------------------- setup

    @property
    def replica_size(self) -> int:
        """Number of ranks of a worker, which are consecutive."""
        size = self.asked_replica_size
        return self.ranks_per_node if size == "node" else size

    @property
    def replica_arguments(self) -> str:
        """The arguments that make workers of several ranks, for messages."""
        return f"replica_size={self.replica_size}"

    @property
    def has_replica_size(self) -> bool:
        """Whether ``replica_size`` was given."""
        return self.asked_replica_size != 1

    def check_ranks(self) -> None:
        """Raise ValueError if the ranks cannot be divided into workers."""
        ranks_per_worker(self.asked_replica_size, self.ranks_per_node, self.num_ranks)

    def configure_ddp(self) -> None:
        """Wrap the model under the attribute names of DDP; gradients stay local.

        A worker of several ranks is wrapped in DDP later, when the engine has compared the models.
        """
        assert self.lightning_module is not None
        if self._replica_group is None:
            self.model = LocalModel(self.lightning_module)

    def setup_environment(self) -> None:
        """Connect the ranks, and start the watchdog."""
        self.check_ranks()
        super().setup_environment()
        self._finished = False
        size = self.replica_size
        self.group = WorkerGroup.start(timeout_s=self.timeout_s, replica_size=size)
        if self.is_fitting:
            self._failed_engine = None
            if size > 1:
                warn_of_straddling(size, self.ranks_per_node, self.replica_arguments)
                self._replica_group = ReplicaGroup(self.group)
            self.checkpoints.start_fit()

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the engine: check the model on all workers and broadcast worker 0's."""
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
        self._set_evaluated(self.engine, trainer)
        self.statistics = self.engine.statistics
        self._steps.start_fit()
        if self.schedule is not None:
            self._max_steps = MaxSteps(trainer, self.schedule, self.worker, self.num_workers)
        self._external_updates.start_fit()
        self._added = add_hooks(
            trainer,
            batches_end=self._external_updates.on_batches_end,
            end=self._end_training,
            saving=self._run_state.consensus_shown,
            sync_point=self.sync_point,
            validation_start=self._start_validation,
            validation_end=self._end_validation,
        )
        self._connect_gradients(self.group)
        trained = self.lightning_module.parameters()
        steps = self._steps
        watching = steps.watch(trained, lambda one: steps.prepare(one)(), steps.count)
        self._added.callback(watching)
        if self._max_steps is not None:
            self._added.callback(self._max_steps.restore)
        with errors_as_warnings(NOT_SHOWN):
            rank_zero_info(describe(self.engine, self.schedule))

    def _connect_gradients(self, group: WorkerGroup) -> None:
        """Let the ranks of a worker average their gradients in every step."""
        if self._replica_group is not None:
            assert self.lightning_module is not None
            self.model = self._replica_group.wrap(self, self.lightning_module)

    def _set_evaluated(self, engine: LocalParticipant, trainer: pl.Trainer) -> None:
        """Choose the validated model; ValueError for settings that contradict the choice."""
        if self.evaluate == "outer":
            check_has_outer(engine)
            engine.shows_outer = True
        for callback in trainer.checkpoint_callbacks if self.evaluate == "local" else ():
            monitor = getattr(callback, "monitor", None)
            if monitor not in NO_METRICS:
                raise ValueError(
                    f"{type(callback).__name__}(monitor={monitor!r}) would choose files by a "
                    "metric of each worker's own model, but files hold the mean of all. Use "
                    "evaluate='average', or leave monitor out."
                )

    def process_dataloader(self, dataloader: object) -> object:
        """Divide the training data in proportion to ``sync_every`` if that is a list."""
        if self.schedule is not None:
            reader = self.distributed_sampler_kwargs
            dataloader = share_data(dataloader, self.data_shares, reader["rank"])
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Refuse a run that is too short for overlap; resume from this worker's checkpoint."""
        if self._max_steps is not None:
            with self._engine.worker.group.errors_shared("the start of training"):
                self._max_steps.check_length(self._trainer)
            with errors_as_warnings(NOT_SHOWN):
                for line in self._advice():
                    rank_zero_info(line)
        self._resume()

    def _advice(self) -> Iterator[str]:
        engine, shown = self._engine, self.evaluate
        settings, layout = engine.settings, engine.worker.replica.layout
        assert isinstance(settings, RoundSettings)
        if self.member_connection is not None:  # such a worker cannot average with the others
            shown = "local" if settings.consensus_key is None else "outer"
        return advice(self._trainer, settings, self.worker, layout, shown)

    def _resume(self) -> None:
        # A learning rate finder may have trained before, to the end.
        self._finished, self.statistics.consensus_distance = False, None
        self._external_updates.resume_from(self.checkpoints)

    # ---------------------------------------------------------------- training

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop at a common step; safe to call from a signal handler."""
        if self.engine is not None:
            self.engine.request_stop(reason)
        else:
            lightning_compat.raise_in_loop(self._trainer)

    def sync_point(self, purpose: str) -> None:
        """Wait until all workers have reached the same sync point, see :class:`WorkerStrategy`."""
        self._external_updates.before_sync_point()
        self.wait_inside(purpose)
        super().sync_point(purpose)
        self._external_updates.after_sync_point()

    def wait_inside(self, purpose: str) -> None:
        """Wait until all ranks of this worker are here too; an error names those that are not."""
        if self._replica_group is not None and self.is_training:
            self._replica_group.meet(purpose, self._engine.worker.steps)

    def _errors_named(self) -> AbstractContextManager[None]:
        """Return a context in which errors of DDP name the rank that is missing."""
        if self._replica_group is None:
            return nullcontext()
        return self._replica_group.errors_named(f"local step {self._engine.worker.steps + 1}")

    def show_consensus(self, purpose: str) -> None:
        """Put the consensus into the model, right after :meth:`sync_point`.

        ``sync_point`` does nothing once training has ended: then the engine waits for all workers.
        """
        self._look_up_averaged_copies()
        if self._finished:
            self._engine.show_consensus(purpose)
        else:
            self._engine.write_consensus(purpose)

    def _look_up_averaged_copies(self) -> None:
        """Find the averaged copies that belong to the consensus: callbacks make and drop them."""
        self._engine.worker.averaged_copies.modules = averaged_models(self._trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Run the round that is due before the next step; raise if another worker has failed.

        Rounds run here and not after the step, because a validation, a checkpoint or the end
        of ``fit`` may come between: these use the parameters and the BatchNorm statistics after
        the local steps.
        """
        if self._finished:
            self._resume()
        self._steps.start_batch()
        self._external_updates.on_batch_start()
        self._engine.worker.group.raise_if_failed()
        self._make_due_round()

    def _make_due_round(self) -> None:
        """Run the round that is due; none before the first step, when all workers are equal."""
        engine = self._engine
        if engine.worker.steps and engine.check_due():
            check_untracked(engine.worker.replica.left_out, self.optimizers)
            engine.worker.last_loss = self._steps.loss
            engine.make_round()
            if not engine.worker.was_finite:
                clear_non_finite(self.optimizers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; a round that ends during it is applied after the optimizer step."""
        copy_on_write = self._engine.worker.replica.copy_on_write
        copy_on_write.hold()
        with self._errors_named():
            output = super().training_step(*args, **kwargs)
        self._steps.loss = loss_in(output)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            copy_on_write.release()
            self._stop_if_agreed()
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute the gradients; in a worker of several ranks, their mean."""
        with self._errors_named():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; before it DDP sends the buffers of a worker's first rank."""
        with self._errors_named():
            return super().validation_step(*args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step and count the local step."""
        closure = self._steps.prepare(optimizer, closure)
        with self._steps.through_lightning():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        is_automatic = self.lightning_module.automatic_optimization
        if is_automatic:
            self._engine.worker.replica.copy_on_write.release()
        self._steps.count(optimizer)
        if is_automatic:
            self._stop_if_agreed()
        return output

    def _stop_if_agreed(self) -> None:
        stop = self._engine.worker.stop
        if stop.agreed is not None:
            lightning_compat.stop_after_batch(self._trainer, self._added, stop.postpone)

    # -------------------------------------------------------------- validation

    def _start_validation(self) -> None:
        if self.is_training and self.evaluate != "local":
            self._external_updates.broadcast_start()
            self.sync_point("validation")
            self.show_consensus("validation of the consensus")

    def _end_validation(self) -> None:
        if self.is_training:
            self._engine.worker.show_local()

    # --------------------------------------------------------------------- end

    @contextmanager
    def _end_training(self) -> Iterator[None]:
        """Leave the consensus in the model before all hooks of the end of training."""
        self._external_updates.on_training_end()
        engine = self._engine
        check_untracked(engine.worker.replica.left_out, self.optimizers)
        if self.member_connection is None:
            self.sync_point("the end of training")
        if self.summary:
            measure_distance(engine)
        self._look_up_averaged_copies()
        finish_with_averages(engine, self._trainer, keeps_local=self.finalize == "keep")
        self._finished = True
        if self.summary:
            show_summary(engine)
        yield

    def on_exception(self, exception: BaseException) -> None:
        """Save a checkpoint after an agreed stop; report a failure to the other workers."""
        engine = self.engine
        if self.group is None:
            return
        is_stop = isinstance(exception, SIGTERMException) and not self._finished
        if is_stop and engine is not None and engine.stop_agreed:
            engine.worker.show_local()
            self.checkpoints.save_interrupted(self._trainer, engine.stop_agreed)
        else:
            self.group.report_error(exception)

    def teardown(self) -> None:
        """Close the engine and the groups."""
        watchdog = self.group.watchdog if self.group is not None else None
        if not self.is_training:
            self._end_together(self.group)
        elif watchdog is not None:
            watchdog.leave(_NO_TRAINING)
        self._added.close()
        failed = self.failed_engine
        self._failed_engine = failed if failed and failed.is_saved_after_failure else None
        group, self.group = self.group, None
        for part in (self.engine, group):
            if part is not None:
                part.close()
        self.engine = self._max_steps = None
        if isinstance(self.model, LocalModel):
            self.model = self.lightning_module
        super().teardown()
        if self._replica_group is not None and group is not None:
            self._replica_group.close(self, has_failed=group.failed)
            self._replica_group = None


def check_has_outer(engine: LocalParticipant) -> None:
    """Raise ValueError if an engine has no outer parameters to be evaluated."""
    if engine.settings.consensus_key is None:
        raise ValueError(
            "evaluate='outer' needs outer parameters that are the same on all workers, "
            f"which {engine.settings.algorithm} does not have. Use evaluate='average'."
        )
