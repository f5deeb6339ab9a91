"""Lightning's collectives as sync points: who arrives early goes on serving the others' rounds."""

from __future__ import annotations

import os
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_loco.distributed.graceful_stop import StopAgreed
from lightning_loco.distributed.job import init_workers
from lightning_loco.distributed.work import ExplainErrors
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.parameter_server import RemoteOptimizer
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO
from lightning_loco.strategies.checkpoint.reader import complete_one
from lightning_loco.strategies.driven import Engine

if TYPE_CHECKING:
    from lightning_loco.strategies.checkpoint.remote import RemoteCheckpoints
    from lightning_loco.strategies.checkpoint.workers import WorkerCheckpoints

_BROADCAST = "a broadcast (Timer and max_time make one after every batch)"


SyncPoints = Engine | RemoteOptimizer
"""What brings all workers to the same place of the program."""


class SyncPointStrategy(DDPStrategy):
    """A ``DDPStrategy`` whose collectives never meet a round of another worker by mistake.

    Workers that have different numbers of batches reach Lightning's barriers and reductions at
    different times. Each of these calls first waits, at the :attr:`sync_points`, until all
    workers have come to the same one; rounds of those still training are served meanwhile.

    Attributes:
        checkpoints: Does the work of the hooks for checkpoints.
        timeout_s: Longest wait for another worker, in seconds.
        group: Workers that watch over each other, so that errors name one of them; or None.
    """

    checkpoints: WorkerCheckpoints | RemoteCheckpoints
    timeout_s: float
    group: WorkerGroup | None = None
    _finished = False

    @property
    @abstractmethod
    def sync_points(self) -> SyncPoints | None:
        """Where the workers meet during ``fit``; None at other times."""

    def setup_distributed(self) -> None:
        """Make the default process group; who does not come, or has another device, is named."""
        self.set_world_ranks()
        self._init_default_group()
        super().setup_distributed()

    def _init_default_group(self) -> None:
        place = self.cluster_environment
        assert place is not None
        init_workers(
            lambda: (place.main_address, place.main_port),
            (self.global_rank, self.world_size),
            lightning_compat.backend_of(self),
            self.root_device,
            self.timeout_s,
            launched_as(place),
        )

    @property
    def num_workers(self) -> int:
        """Number of independently moving copies of the model."""
        return self.world_size

    @property
    def worker(self) -> int:
        """Number of this process' copy of the model."""
        return self.global_rank

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _is_alone(self) -> bool:
        """Whether nobody else comes to this rank's collectives: it has failed by itself."""
        module = self.lightning_module
        trainer = None if module is None else lightning_compat.trainer_of(module)
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        place = self.sync_points
        return interrupted and (place is None or place.stop_agreed is None)

    @property
    def is_fitting(self) -> bool:
        """Whether the Trainer is in ``fit``, from before the setup to after the teardown."""
        return self._trainer.state.fn == TrainerFn.FITTING

    @property
    def has_company(self) -> bool:
        """Whether the other workers can be met: during ``fit``, unless this one fails by itself."""
        return self.sync_points is not None and not self._is_alone

    @property
    def is_training(self) -> bool:
        """Whether the other workers may be making rounds or steps."""
        return self.has_company and not self._finished

    def sync_point(self, purpose: str) -> None:
        """Wait until all workers have come to the same place; does nothing outside training.

        Args:
            purpose: The place in words, equal on all workers.

        Raises:
            SIGTERMException: If the others have stopped, as agreed, somewhere else.
        """
        place = self.sync_points
        if place is not None and self.is_training:
            try:
                place.sync_point(purpose)
            except StopAgreed as stop:
                raise SIGTERMException from stop

    def waiting_in(self, place: str) -> AbstractContextManager[object]:
        """Let an error inside name the worker that has not come to this place.

        Outside training all come together before what is inside begins: an error that keeps a
        worker away ends the waiting of the others, and leaves the default group as it was.
        """
        if self.group is None:
            return nullcontext()
        if not self.is_training:
            self.group.gather_objects(None, place)
        self.group.announce_wait(place)
        return ExplainErrors(self.group, place)

    def process_dataloader(self, dataloader: object) -> object:
        """Tell samplers the present epoch before the first iterator is made."""
        lightning_compat.set_present_epoch(self._trainer, dataloader)
        return dataloader

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers."""
        place = f"barrier {args[0] if args else kwargs.get('name', '')}"
        self.sync_point(place)
        if not self._is_alone:
            with self.waiting_in(place):
                super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one worker to all."""
        self.sync_point(_BROADCAST)
        if self._is_alone:
            return obj
        with self.waiting_in(_BROADCAST):
            return super().broadcast(obj, src)

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce a tensor over all workers."""
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
        """Collect a tensor from all workers."""
        self.sync_point("all_gather")
        if self._is_alone:
            return tensor
        with self.waiting_in("all_gather"):
            return super().all_gather(tensor, group, sync_grads)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """How files are written and read; by default as a whole or not at all."""
        lightning_compat.write_files_by(self, WholeFileIO())
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        DDPStrategy.checkpoint_io.fset(self, io)  # type: ignore[attr-defined]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state for a checkpoint."""
        return self.checkpoints.model_state(super().lightning_module_state_dict)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint with all that belongs to it."""
        self.checkpoints.save(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint and, to resume training, this worker's own part."""
        checkpoint_path = complete_one(checkpoint_path)
        # Older versions of Lightning know no weights_only.
        options = {} if weights_only is None else {"weights_only": weights_only}
        read = partial(super().load_checkpoint, checkpoint_path, **options)
        return self.checkpoints.load(read, checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint with all that belongs to it."""
        self.checkpoints.remove(filepath)


def launched_as(environment: ClusterEnvironment) -> str:
    """A name that is the same on all ranks of a job; empty where nobody gives it one."""
    if isinstance(environment, SLURMEnvironment) and "SLURM_JOB_ID" in os.environ:
        step = os.environ.get("SLURM_STEP_ID")
        return f"SLURM job {os.environ['SLURM_JOB_ID']}" + (f", step {step}" if step else "")
    if isinstance(environment, TorchElasticEnvironment):
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # what torchrun calls all without one
        return "" if name == "none" else f"torchrun's run {name!r}"
    return ""
