"""The base of all strategies: Lightning's collectives, for workers that are at different steps."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_loco._util.checks import (
    check_common_arguments,
)
from lightning_loco._util.clock import REAL_CLOCK
from lightning_loco._util.text import suggestion
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.graceful_stop import StopAgreed
from lightning_loco.distributed.job import init_workers
from lightning_loco.distributed.worker_group import ExplainErrors
from lightning_loco.model.participant import Participant
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.arguments import argument_names
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO
from lightning_loco.strategies.checkpoint.checkpoints import Checkpoints
from lightning_loco.strategies.checkpoint.reader import newest_requeued
from lightning_loco.strategies.local_training import (
    LocalSteps,
)

if TYPE_CHECKING:
    # All strategies of Lightning that a subclass may have as a base class offer what is used here.
    from lightning.pytorch.strategies import DDPStrategy as LightningStrategy
else:
    LightningStrategy = ParallelStrategy

_BROADCAST = "a broadcast (Timer and max_time make one after every batch)"


class WorkerStrategy(LightningStrategy):
    """Makes the collectives of another strategy start with a sync point of all workers.

    A subclass also has that other strategy of Lightning as a base class, ``DDPStrategy`` or
    ``ModelParallelStrategy``.

    Workers that have different numbers of batches reach Lightning's barriers and reductions at
    different times. Each of these calls first waits until all workers have reached the same one; a
    worker that waits keeps taking part in the rounds of those that still train.

    ``checkpoints`` implements the hooks for checkpoints. ``group`` are the workers with a watchdog,
    so that errors name one of them, or None.
    """

    checkpoints: Checkpoints
    model: nn.Module | None
    timeout_s: float
    group: WorkerGroup | None = None
    _finished = False

    def _init_worker(
        self,
        ddp_arguments: Mapping[str, Any] | None = None,
        /,
        *,
        timeout_s: float = 600.0,
        summary: bool = True,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **unknown: Any,
    ) -> None:
        """Check and set the arguments of every strategy; see :class:`RoundArguments`.

        ``ddp_arguments`` are for DDP within a worker of several ranks. TypeError if an argument has
        an ``unknown`` name.
        """
        for name in unknown:
            known = argument_names(type(self))
            raise TypeError(
                f"{type(self).__name__} has no argument {name!r}.{suggestion(name, known)}"
            )
        check_common_arguments(timeout_s, start_method)
        parts = {
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            "precision_plugin": precision_plugin,
        }
        self._arguments = {
            "timeout_s": timeout_s,
            "summary": summary,
            "process_group_backend": process_group_backend,
            "start_method": start_method,
            **parts,
            **(ddp_arguments or {}),
        }
        self._init_base(
            parts,
            process_group_backend,
            timedelta(seconds=timeout_s),
            {"start_method": start_method, **(ddp_arguments or {})},
        )
        self.timeout_s, self.summary = timeout_s, summary
        self.statistics = Statistics()
        self._steps = LocalSteps(self)
        self._added = ExitStack()

    def _init_base(
        self,
        parts: dict[str, Any],
        backend: str | None,
        timeout: timedelta,
        ddp_arguments: Mapping[str, Any],
    ) -> None:
        """Call the constructor of Lightning's strategy.

        ``parts`` are the accelerator, the devices and the plugins.
        """
        super().__init__(**parts, process_group_backend=backend, timeout=timeout, **ddp_arguments)

    def __repr__(self) -> str:
        """Say where it belongs: Fabric's error for a strategy of the Trainer shows this."""
        name = type(self).__name__
        return (
            f"<{name} of lightning_loco, for Trainer(strategy=...); for Fabric: "
            f"lightning_loco.integrations.fabric.FabricLocoStrategy({name}(...))>"
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that this strategy has in common with others, as they were given."""
        return dict(self._arguments)

    @abstractmethod
    def _init_like(self, method: Any) -> None:
        """Initialize with the arguments of another strategy of the same family."""

    # ------------------------------------------------------------------- workers

    @property
    @abstractmethod
    def participant(self) -> Participant | None:
        """This worker's part in the training of all, during ``fit``; None at other times."""

    @abstractmethod
    def check_ranks(self) -> None:
        """Raise ValueError if the ranks cannot be divided into workers."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job, as its launcher says; those that serve are included."""
        environment = self.cluster_environment
        return 1 if environment is None else environment.world_size()

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of a node."""
        return max(1, self.num_ranks // self.num_nodes)

    @property
    def replica_size(self) -> int:
        """Number of ranks of a worker, which are consecutive."""
        return 1

    @property
    def num_workers(self) -> int:
        """Number of workers, each with its own copy of the model."""
        return self.world_size // self.replica_size

    @property
    def worker(self) -> int:
        """Number of the worker that this rank belongs to."""
        return self.global_rank // self.replica_size

    @property
    def place(self) -> int:
        """Index of this rank within its worker."""
        return self.global_rank % self.replica_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of samplers, which divide the data among the ranks that train."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def is_fitting(self) -> bool:
        """Whether the Trainer is in ``fit``, from before the setup to after the teardown."""
        return self._trainer.state.fn == TrainerFn.FITTING

    @property
    def is_connected(self) -> bool:
        """Whether sync points are possible: during ``fit``, unless this worker alone has failed."""
        return self.participant is not None and not self._is_alone

    @property
    def is_training(self) -> bool:
        """Whether other workers may be in a round or a step."""
        return self.is_connected and not self._finished

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank joins this rank's collectives, because it alone has failed."""
        return self._has_failed

    @property
    def _has_failed(self) -> bool:
        """Whether an error has ended this run here, other than a stop that all have agreed on."""
        module = self.lightning_module
        trainer = None if module is None else lightning_compat.trainer_of(module)
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        participant = self.participant
        return interrupted and (participant is None or participant.stop_agreed is None)

    # ------------------------------------------------------------- process group

    def set_world_ranks(self) -> None:
        """Set the ranks. Lightning calls it first when the Trainer is made."""
        self.check_launcher()
        super().set_world_ranks()

    def check_launcher(self) -> None:
        """Raise if the processes were not started in a way that this strategy works with.

        ValueError if mpirun has started several that Lightning does not know of, or if this is a
        worker of Ray Train.
        """
        if runs_on_ray():
            name = type(self).__name__
            raise ValueError(
                f"This is a worker of Ray Train, where {name} does not know its rank and device. "
                f"Use Trainer(strategy=RayLocoStrategy({name}(...)), plugins=["
                "RayLightningEnvironment()]), with RayLocoStrategy from lightning_loco.integrations"
                ".ray."
            )
        check_mpi(self.cluster_environment)
        lightning_compat.check_start_method(self)

    def setup_distributed(self) -> None:
        """Make the default process group; errors name ranks that are missing or do not fit."""
        self.set_world_ranks()
        self._init_default_group()
        super().setup_distributed()

    def _init_default_group(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        init_workers(
            lambda: (environment.main_address, environment.main_port),
            (self.global_rank, self.world_size),
            lightning_compat.backend_of(self),
            self.root_device,
            self.timeout_s,
            job_name(environment),
            self.replica_size,
        )

    # --------------------------------------------------------------- collectives

    def sync_point(self, purpose: str) -> None:
        """Wait until all workers have reached the same sync point; a no-op outside training.

        ``purpose`` says why, in words that are equal on all workers. SIGTERMException if the others
        have stopped at an agreed step before this one.
        """
        participant = self.participant
        if participant is not None and self.is_training:
            started_s = REAL_CLOCK.now()
            try:
                participant.sync_point(purpose)
            except StopAgreed as stop:
                raise SIGTERMException from stop
            self.statistics.record("sync point", started_s, REAL_CLOCK.now())

    def waiting_in(self, label: str) -> AbstractContextManager[object]:
        """Return a context in which an error names the worker that others wait for.

        Outside training all ranks gather before the context is entered: if one of them fails
        before that, the others get its error, and the default group can still be used.
        """
        if self.group is None:
            return nullcontext()
        if not self.is_training:
            self.group.gather_from_ranks(None, label)
        self.group.announce_wait(label)
        return ExplainErrors(self.group, label)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        label = f"barrier {args[0] if args else kwargs.get('name', '')}"
        self.sync_point(label)
        if not self._is_alone:
            with self.waiting_in(label):
                super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one rank to all."""
        self.sync_point(_BROADCAST)
        if self._is_alone:
            return obj
        with self.waiting_in(_BROADCAST):
            return super().broadcast(obj, src)

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce a tensor over all ranks."""
        if not isinstance(tensor, Tensor):
            return tensor
        self.sync_point("reduce")
        if self._is_alone:
            return tensor
        with self.waiting_in("reduce"):
            return super().reduce(tensor, group, reduce_op)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather a tensor from all ranks."""
        self.sync_point("all_gather")
        if self._is_alone:
            return tensor
        with self.waiting_in("all_gather"):
            return super().all_gather(tensor, group, sync_grads)

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Return the values of all ranks that train: text, numbers, None, lists and dictionaries.

        All of them must call it. RuntimeError, as in every collective, if one does not.
        """
        assert self.group is not None
        return self.group.gather_from_ranks(value, purpose)

    def _end_together(self, group: WorkerGroup | None) -> None:
        """Wait for all ranks before the teardown, so that one that was lost is named by all."""
        if group is not None and not self._has_failed:
            fn = self._trainer.state.fn
            group.end_together(f"the end of {fn.value if fn is not None else 'the run'}")

    # --------------------------------------------------------- data, checkpoints

    def process_dataloader(self, dataloader: object) -> object:
        """Set the epoch of the samplers before the first iterator is made."""
        lightning_compat.set_sampler_epoch(self._trainer, dataloader)
        return dataloader

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads files; the default one writes a file atomically."""
        lightning_compat.set_default_checkpoint_io(self, WholeFileIO())
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        Strategy.checkpoint_io.fset(self, io)  # type: ignore[attr-defined]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state for a checkpoint."""
        return self.checkpoints.model_state(super().lightning_module_state_dict)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint with the state of all workers."""
        self.checkpoints.save(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint and, to resume training, this worker's own state."""
        checkpoint_path = newest_requeued(checkpoint_path)
        # Older versions of Lightning do not have weights_only.
        options = {} if weights_only is None else {"weights_only": weights_only}
        read = partial(super().load_checkpoint, checkpoint_path, **options)
        return self.checkpoints.load(read, checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint with the state of all workers."""
        self.checkpoints.remove(filepath)


def worker_and_place(strategy: Strategy) -> tuple[int, int]:
    """Return the worker of this rank and its place; with another strategy, the rank and 0."""
    if isinstance(strategy, WorkerStrategy):
        return strategy.worker, strategy.place
    return (strategy.global_rank, 0) if isinstance(strategy, ParallelStrategy) else (0, 0)


def check_mpi(environment: ClusterEnvironment | None) -> None:
    """Raise ValueError if mpirun has started several processes, and each would start all ranks."""
    if not isinstance(environment, LightningEnvironment):
        return
    if environment.creates_processes_externally:
        return
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if (size := os.environ.get(name, "1")) != "1":
            raise ValueError(
                f"MPI has started {size} processes ({name}={size}), but Lightning recognizes them "
                "only if mpi4py is installed: each of them would start all ranks. Run `pip install "
                "mpi4py`, start the script with torchrun, or start it once without mpirun and let "
                "Trainer(devices=...) start the ranks."
            )


def runs_on_ray() -> bool:
    """Whether Ray Train has started this process, as one of its workers."""
    if (train := sys.modules.get("ray.train")) is not None:
        with suppress(Exception):  # of several types, everywhere else
            return isinstance(train.get_context().get_world_size(), int)
    return False


def job_name(environment: ClusterEnvironment) -> str:
    """Return a name that is the same on all ranks of a job; empty if the launcher gives none."""
    if isinstance(environment, SLURMEnvironment) and "SLURM_JOB_ID" in os.environ:
        step = os.environ.get("SLURM_STEP_ID")
        return f"SLURM job {os.environ['SLURM_JOB_ID']}" + (f", step {step}" if step else "")
    if isinstance(environment, TorchElasticEnvironment):
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's default without --rdzv-id
        return "" if name == "none" else f"torchrun's run {name!r}"
    return ""
