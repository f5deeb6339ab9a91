"""A strategy with service ranks: the default process group holds only the ranks that train."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_loco.distributed.job import Job
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.distributed.worker_group import ExplainErrors, WorkerGroup, abort_groups
from lightning_loco.model.replica import ParameterOwners
from lightning_loco.model.same_model import check_same_tensors
from lightning_loco.parameter_server import RemoteParticipant, Serving, Tiers, Transport, serve
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.changed_weights import averaged_models, share_complete_averages
from lightning_loco.strategies.checkpoint.reader import resumed_by_all
from lightning_loco.strategies.lightning_compat import add_hooks
from lightning_loco.strategies.local_training import LocalModel
from lightning_loco.strategies.worker_strategy import WorkerStrategy, job_name

log = logging.getLogger(__name__)

_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path", "dirpath")


class ServiceRankStrategy(WorkerStrategy, DDPStrategy):
    """Shows Lightning the ranks that train; on service ranks, its collectives do nothing.

    Attributes:
        counts: ``(num_workers, num_servers, replica_size)``; ``num_workers`` None means 2 tiers.
        timeout_s: Longest wait for another rank, in seconds.
        remote: A worker with its client of the servers, during ``fit``.
        service: All ranks, those that train and those that serve, during ``fit``.
        replica_group: The ranks of this worker, if there are several, during ``fit``.
    """

    counts: tuple[int | None, int, int]
    timeout_s: float
    remote: RemoteParticipant | None = None
    service: WorkerGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    _gradients_group: dist.ProcessGroup | None = None
    _job: Job | None = None
    _added: ExitStack
    _owners: ParameterOwners | None = None

    # ------------------------------------------------------------------- ranks

    @property
    def participant(self) -> RemoteParticipant | None:
        """The client of the servers, at which workers wait for each other; None on others."""
        return self.remote

    @property
    def tiers(self) -> Tiers:
        """The roles of all ranks; ValueError if their number does not match."""
        return Tiers.detect(self.num_ranks, *self.counts)

    def check_ranks(self) -> None:
        """Raise ValueError if the number of ranks does not match the roles."""
        Tiers.detect(self.num_ranks, *self.counts)

    @property
    def serves(self) -> bool:
        """Whether this is a service rank, which does not train."""
        return self.global_rank >= self.tiers.num_training

    @property
    def world_size(self) -> int:
        """Number of ranks that train."""
        return self.tiers.num_training

    @property
    def replica_size(self) -> int:
        """Number of ranks of a worker."""
        return self.tiers.replica_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of samplers that divide data among the ranks that train."""
        last = self.tiers.num_training - 1
        return {"num_replicas": last + 1, "rank": min(self.global_rank, last)}

    # ------------------------------------------------------------------- setup

    def setup_distributed(self) -> None:
        """Find all ranks, and put those that train into the default process group.

        From now on all ranks of a ``fit`` watch each other.
        """
        self.set_world_ranks()
        self._close_connections()
        self._job = self._join_job()
        if self.is_fitting:
            self.service = WorkerGroup.of_job(self._job, waits_indefinitely=self.serves)
        if not self.serves:
            super().setup_distributed()

    def _join_job(self) -> Job:
        tiers, environment = self.tiers, self.cluster_environment
        assert environment is not None
        names = [tiers.name(rank) for rank in range(tiers.world_size)]
        job = Job(
            environment.main_address,
            environment.main_port,
            self.global_rank,
            names,
            self.timeout_s,
            job_name(environment),
        )
        job.publish_end()
        return job

    def _init_default_group(self) -> None:
        assert self._job is not None
        backend = lightning_compat.backend_of(self)
        self._job.init_default_group(self.world_size, backend, self.root_device)

    def setup_environment(self) -> None:
        """Connect the ranks; in ``fit``, also those that train with those that serve."""
        self._finished = False
        super().setup_environment()
        if self.service is not None:
            self.service.connect()
            resume = partial(resumed_by_all, self.service)
            lightning_compat.choose_checkpoint(self._trainer, resume)
        elif not self.serves:
            size = self.tiers.replica_size
            self.group = WorkerGroup.start(timeout_s=self.timeout_s, replica_size=size)

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up training; service ranks make the model and its optimizer, and only in ``fit``."""
        if not self.serves:
            super().setup(trainer)
            if self.is_fitting:
                self._added = add_hooks(
                    trainer,
                    end=self._before_end,
                    saving=self._before_saving,
                    sync_point=self.sync_point,
                    validation_start=self._before_validation,
                )
                self._owners = self._find_owners()
        elif self.is_fitting:
            assert self.accelerator is not None
            assert self.lightning_module is not None
            self.accelerator.setup(trainer)
            self.model = self.precision_plugin.convert_module(self.lightning_module)
            self.model_to_device()
            self.setup_optimizers(trainer)
        else:
            lightning_compat.replace_loops(trainer, lambda: None)

    def _find_owners(self) -> ParameterOwners:
        """Return the modules that own the trainable parameters of the optimizers."""
        assert self.lightning_module is not None
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        optimized = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        named = [(n, p) for n, p in self.lightning_module.named_parameters() if id(p) in optimized]
        return ParameterOwners(self.lightning_module, [n for n, _ in named], [p for _, p in named])

    def check_same_models(self, service: WorkerGroup) -> None:
        """Raise ValueError on all ranks if those that train have different models."""
        assert self.lightning_module is not None
        training = slice(self.tiers.num_training)
        check_same_tensors(
            self.lightning_module, lambda *value: service.gather_objects(*value)[training]
        )

    def configure_ddp(self) -> None:
        """Wrap the model: without communication, or in DDP if a worker has several ranks."""
        assert self.lightning_module is not None
        if self.tiers.replica_size == 1:
            self.model = LocalModel(self.lightning_module)
        else:
            self.replica_group = self.tiers.new_replica_group(self.global_rank, "gloo")
            self._gradients_group = self.tiers.new_replica_group(self.global_rank)
            lightning_compat.average_gradients_in(self, self._gradients_group)
            super().configure_ddp()

    # ----------------------------------------------------------- service ranks

    def _serve_workers(self, transport: Transport, serving: Serving) -> None:
        """Serve until all workers have left ``fit``, then take over worker 0's metrics and paths.

        With these, ``callback_metrics`` and ``ckpt_path="best"`` work on service ranks as well.
        """
        (optimizer,) = self.optimizers
        farewell = serve(
            optimizer.param_groups,
            lambda _: optimizer,
            self.tiers,
            self.global_rank,
            transport=transport,
            serving=serving,
        )
        metrics = {
            name: torch.tensor(v, device="cpu") for name, v in farewell.get("metrics", {}).items()
        }
        lightning_compat.set_callback_metrics(self._trainer, metrics)
        paths_of_callbacks = farewell.get("checkpoints", [])
        for callback, paths in zip(self._model_checkpoints, paths_of_callbacks, strict=False):
            for name, path in paths.items():
                setattr(callback, name, path)

    def _farewell(self) -> dict[str, Any]:
        """Return metrics and paths of checkpoints, which service ranks take over after ``fit``."""
        metrics = self._trainer.callback_metrics
        return {
            "metrics": {name: float(value) for name, value in metrics.items()},
            "checkpoints": [
                {name: str(getattr(callback, name) or "") for name in _PATHS}
                for callback in self._model_checkpoints
            ],
        }

    @property
    def _model_checkpoints(self) -> list[ModelCheckpoint]:
        callbacks = self._trainer.checkpoint_callbacks
        return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]

    # ---------------------------------------------------------------- training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Raise if another rank has failed, or if a parameter was replaced by another object."""
        assert self.service is not None
        assert self._owners is not None
        self.service.raise_if_failed()
        self._owners.check()

    @contextmanager
    def _before_end(self) -> Iterator[None]:
        """Synchronize before the hooks at the end of training."""
        self._synchronize("end of training")
        yield

    @contextmanager
    def _before_saving(self) -> Iterator[None]:
        if averaged_models(self._trainer):
            self._synchronize("checkpoint")
        yield

    def _before_validation(self) -> None:
        """Synchronize, and validate with the buffers of worker 0, as DDP does."""
        if self.is_training and self.world_size > 1:
            self._synchronize("validation")
            assert self.lightning_module is not None
            with self.waiting_in("validation"):
                for buffer in self.lightning_module.buffers():
                    dist.broadcast(buffer, 0)

    def _synchronize(self, purpose: str) -> None:
        """Give workers that have run out of data the current parameters and averages of them."""
        self.sync_point(purpose)
        if self.is_training and averaged_models(self._trainer):
            with self.waiting_in(purpose):
                share_complete_averages(self._trainer, self.training_ranks())

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Return the values of all ranks that train, see :class:`WorkerStrategy`."""
        if self.service is None:
            return super().gather(value, purpose)
        self.sync_point(purpose)
        with self.waiting_in(purpose):
            return self.training_ranks().gather_from_ranks(value, purpose)

    def training_ranks(self) -> WorkerGroup:
        """Return the ranks that train, as a worker group for collectives."""
        size = self.world_size
        group = dist.group.WORLD if size > 1 else None
        names = list(map(self.tiers.name, range(size)))
        return WorkerGroup(self.global_rank, size, names, data=group, control=group)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the ranks that train; before ``setup`` for all, which may prepare data."""
        name = args[0] if args else kwargs.get("name")
        if self.service is not None and name == lightning_compat.BEFORE_SETUP:
            self.service.wait_for_all("the preparation of data")
        super().barrier(*args, **kwargs)

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank takes part in this rank's collectives: it serves, or has failed."""
        return self.serves or super()._is_alone

    def waiting_in(self, label: str) -> AbstractContextManager[object]:
        """Make errors inside name the rank that is missing."""
        if self.service is None:
            return super().waiting_in(label)
        return ExplainErrors(self.service, label, involves_all=False)

    # --------------------------------------------------------- checkpoints and end

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; after ``fit``, service ranks wait until the file is written."""
        if self.service is not None or not self._trainer.state.status.stopped:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        error: BaseException | None = None
        with closing(self._join_job()) as job:
            if self.serves:
                job.wait_until_written()
                return
            try:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            except BaseException as found:
                error = found
                raise
            finally:
                if self.is_global_zero:
                    job.report_written(error)

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks of a ``fit`` that this one has failed."""
        hint = ""
        is_own = not isinstance(error, WorkerFailure)
        if self.serves and is_own and "process group" in str(error):
            hint = (
                "A service rank is in no process group: run your own collectives before training, "
                "in setup() for instance, only on ranks with `not trainer.strategy.serves`."
            )
            log.error(hint)
        for group in filter(None, (self.service, self.group)):
            group.report_error(error, hint)

    def teardown(self) -> None:
        """Close the connections."""
        self._added.close()
        self._owners = None
        self._close_connections()
        if isinstance(self.model, LocalModel):
            self.model = self.lightning_module
        super().teardown()
        self._close_replica_groups()

    def _close_replica_groups(self) -> None:
        if self.replica_group is None:
            return
        lightning_compat.average_gradients_in(self, None)
        groups = [group for group in (self.replica_group, self._gradients_group) if group]
        self.replica_group = self._gradients_group = None
        if self._trainer.state.status == TrainerStatus.INTERRUPTED:
            abort_groups(groups)
        else:
            list(map(dist.destroy_process_group, groups))

    def _close_connections(self) -> None:
        if self._job is not None:
            self._job.close()  # first, so that nothing waits for a store that does not answer
            self._job = None
        for group in filter(None, (self.service, self.group)):
            group.close()
        self.service = self.group = None
