"""A strategy of which some ranks train, in the default process group, and the others serve them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_loco.distributed.rendezvous import Job
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.distributed.worker_group import WorkerGroup, abort_default_group, abort_groups
from lightning_loco.parameter_server import RemoteOptimizer, Tiers
from lightning_loco.parameter_server.service_group import AllRanks, ServiceGroup
from lightning_loco.parameter_server.tiers import new_replica_group
from lightning_loco.parameters.replica import ParameterOwners
from lightning_loco.parameters.schema import check_same_tensors
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.base import WorkerStrategy, job_name
from lightning_loco.strategies.external_updates import averaged_models, share_complete_averages
from lightning_loco.strategies.lightning_compat import add_hooks
from lightning_loco.strategies.local_training import LocalModel

log = logging.getLogger(__name__)


class ServedStrategy(WorkerStrategy):
    """Shows Lightning the ranks that train; its collectives do nothing on those that serve.

    Attributes:
        counts: ``(num_workers, num_servers, replica_size)``; no number of workers means 2 tiers.
        timeout_s: Longest wait for another rank, in seconds.
        remote: A worker's connection to the servers, during ``fit``.
        service: All ranks, connected, during ``fit``.
        replica_group: The ranks of this worker, if there are several, during ``fit``.
    """

    counts: tuple[int | None, int, int]
    timeout_s: float
    remote: RemoteOptimizer | None = None
    service: ServiceGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    _gradients_group: dist.ProcessGroup | None = None
    _all_ranks: AllRanks | None = None
    _present: tuple[int, ...] = ()
    _added: ExitStack
    _places: ParameterOwners | None = None

    @property
    def synchronizer(self) -> RemoteOptimizer | None:
        """The connection to the servers: they let the workers meet."""
        return self.remote

    @property
    def tiers(self) -> Tiers:
        """The roles of all ranks."""
        return self.detect_tiers()

    def detect_tiers(self) -> Tiers:
        """Tell the roles from the number of ranks.

        Raises:
            ValueError: If it does not fit.
        """
        return Tiers.detect(self.num_nodes * self.num_processes, *self.counts)

    @property
    def serves(self) -> bool:
        """Whether this rank serves the others instead of training."""
        return self.global_rank >= self.tiers.num_training

    @property
    def world_size(self) -> int:
        """Ranks that train and are left."""
        return len(self._present) or self.tiers.num_training

    @property
    def num_workers(self) -> int:
        """Number of workers, those that are gone included."""
        return self.tiers.num_workers

    @property
    def worker(self) -> int:
        """Number of the worker that this rank belongs to."""
        return self.global_rank // self.tiers.replica_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data is shared among the ranks that train."""
        last = self.tiers.num_training - 1
        return {"num_replicas": last + 1, "rank": min(self.global_rank, last)}

    def setup_distributed(self) -> None:
        """Let all ranks find each other, and put those that train into the default group."""
        self.set_world_ranks()
        self._leave_ranks()
        self._all_ranks = self._find_ranks()
        if not self.serves:
            self._present = self._present or tuple(range(self.tiers.num_training))
            super().setup_distributed()

    def _find_ranks(self) -> AllRanks:
        tiers, place = self.tiers, self.cluster_environment
        assert place is not None
        names = [tiers.name(rank) for rank in range(tiers.world_size)]
        job = Job(
            place.main_address,
            place.main_port,
            self.global_rank,
            names,
            self.timeout_s,
            job_name(place),
        )
        return AllRanks(job)

    def _init_default_group(self) -> None:
        assert self._all_ranks is not None
        backend = lightning_compat.backend_of(self)
        self._all_ranks.init_default_group(self._present, backend, self.root_device)

    def setup_environment(self) -> None:
        """Connect the ranks; from here on those of a ``fit`` watch over each other."""
        self._finished = False
        super().setup_environment()
        if self.is_fitting:
            assert self._all_ranks is not None
            self.service = self._all_ranks.new_group(is_patient=self.serves)

    def setup(self, trainer: pl.Trainer) -> None:
        """Ranks that serve only make the model and its optimizer; outside ``fit``, nothing."""
        if not self.serves:
            super().setup(trainer)
            if self.is_fitting:
                self._added = add_hooks(
                    trainer,
                    end=self._all_at_the_end,
                    saving=self._saving,
                    sync_point=self.sync_point,
                    validation_start=self._begin_validation,
                )
                self._places = self._find_places()
        elif self.is_fitting:
            assert self.accelerator is not None
            assert self.lightning_module is not None
            self.accelerator.setup(trainer)
            self.model = self.precision_plugin.convert_module(self.lightning_module)
            self.model_to_device()
            self.setup_optimizers(trainer)
        else:
            lightning_compat.replace_loops(trainer, lambda: None)

    def _find_places(self) -> ParameterOwners:
        """Where the parameters are that the optimizers have, of those that require gradients."""
        assert self.lightning_module is not None
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        optimized = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        named = [(n, p) for n, p in self.lightning_module.named_parameters() if id(p) in optimized]
        return ParameterOwners(self.lightning_module, [n for n, _ in named], [p for _, p in named])

    def check_same_models(self, service: ServiceGroup) -> None:
        """Raise ValueError on all ranks if those that train have different models."""
        assert self.lightning_module is not None
        training = slice(self.tiers.num_training)
        check_same_tensors(self.lightning_module, lambda value, _: service.gather(value)[training])

    @contextmanager
    def _all_at_the_end(self) -> Iterator[None]:
        """Meet before all hooks of the end."""
        self._catch_up("end of training")
        yield

    @contextmanager
    def _saving(self) -> Iterator[None]:
        if averaged_models(self._trainer):
            self._catch_up("checkpoint")
        yield

    def _begin_validation(self) -> None:
        """Validate with the buffers of worker 0, as DDP does."""
        if self.is_training and self.world_size > 1:
            self._catch_up("validation")
            assert self.lightning_module is not None
            with self.waiting_in("validation"):
                for buffer in self.lightning_module.buffers():
                    dist.broadcast(buffer, 0)

    def _catch_up(self, purpose: str) -> None:
        """Meet: workers with less data have old parameters until then, and old averages of them."""
        self.sync_point(purpose)
        if self.is_training and averaged_models(self._trainer):
            with self.waiting_in(purpose):
                share_complete_averages(self._trainer, self.present_workers())

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks of a ``fit`` that this one has failed."""
        hint = None
        is_own = not isinstance(error, WorkerFailure)
        if self.serves and is_own and "process group" in str(error):
            hint = (
                "A rank that serves is in no process group: leave collectives of your own before "
                "training, in setup() for instance, to ranks with `not trainer.strategy.serves`."
            )
            log.error(hint)
        if self.service is not None:
            self.service.report_failure(error, hint)
        elif self._all_ranks is not None and self.is_fitting:
            self._all_ranks.report(error)

    def configure_ddp(self) -> None:
        """Put the model into a shell with DDP's names; into DDP if a worker has several ranks."""
        assert self.lightning_module is not None
        if self.tiers.replica_size == 1:
            self.model = LocalModel(self.lightning_module)
        else:
            self.replica_group = new_replica_group(self.tiers, self.global_rank, "gloo")
            self._gradients_group = new_replica_group(self.tiers, self.global_rank)
            lightning_compat.average_gradients_in(self, self._gradients_group)
            super().configure_ddp()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End soon when another rank has failed, or a parameter is another object."""
        assert self.service is not None
        assert self._places is not None
        self.service.watchdog.raise_if_failed()
        self._places.check()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; called by the user's script, ranks that serve wait for the file."""
        if self.service is not None or not self._trainer.state.status.stopped:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        error: BaseException | None = None
        with closing(self._find_ranks()) as ranks:
            if self.serves:
                ranks.wait_until_written()
                return
            try:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            except BaseException as found:
                error = found
                raise
            finally:
                if self.is_global_zero:
                    ranks.say_written(error)

    def teardown(self) -> None:
        """Close the connections."""
        self._added.close()
        self._places = None
        self._leave_ranks()  # first: nobody waits any more for a store that is silent
        if self.service is not None:
            self.service.close()
            self.service = None
        if isinstance(self.model, LocalModel):
            self.model = self.lightning_module
        super().teardown()
        self._leave_replica_groups()

    def _leave_replica_groups(self) -> None:
        if self.replica_group is None:
            return
        lightning_compat.average_gradients_in(self, None)
        groups = [group for group in (self.replica_group, self._gradients_group) if group]
        self.replica_group = self._gradients_group = None
        if self._trainer.state.status == TrainerStatus.INTERRUPTED:
            abort_groups(groups)
        else:
            list(map(dist.destroy_process_group, groups))

    def _leave_ranks(self) -> None:
        if self._all_ranks is not None:
            self._all_ranks.close()
            self._all_ranks = None

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the ranks that train; before ``setup`` for all that still prepare data."""
        name = args[0] if args else kwargs.get("name")
        if self.service is not None and name == lightning_compat.BEFORE_SETUP:
            self.service.wait_for_all()
        super().barrier(*args, **kwargs)

    @property
    def _is_alone(self) -> bool:
        """Whether nobody else comes to this rank's collectives: it serves, or has failed."""
        return self.serves or super()._is_alone

    def waiting_in(self, place: str) -> AbstractContextManager[object]:
        """Let an error inside name the rank that has not come to this place."""
        return nullcontext() if self.service is None else self.service.naming(place)

    def present_workers(self) -> WorkerGroup:
        """The ranks that train and are left, as a group of their collectives."""
        group = dist.group.WORLD if self.world_size > 1 else None
        own = self._present.index(self.global_rank)
        return WorkerGroup(own, self.world_size, data=group, control=group)

    def sync_point(self, purpose: str) -> None:
        """Wait until all workers have come to the same place; go on with those that are left."""
        if not self.is_training:
            return
        assert self.remote is not None
        stopped = self.remote.stop_agreed
        super().sync_point(purpose)
        if self.remote.present is not None:  # never set on ranks that do not lead a worker
            size = self.tiers.replica_size
            present = self.remote.present
            left = tuple(rank for rank in self._present if rank - rank % size in present)
            if len(left) < len(self._present):
                self._go_on_without_others(left)
        if self.remote.stop_agreed and not stopped:
            raise SIGTERMException

    def _go_on_without_others(self, present: tuple[int, ...]) -> None:
        """Make a new default group of the workers that are left; all of them are here."""
        gone = [rank for rank in self._present if rank not in present]
        names = ", ".join(map(self.tiers.name, gone))
        rank_zero_warn(f"Going on without {names}; their share of the data is lost.")
        self._present = present
        assert self.service is not None
        self.service.watchdog.forget(gone)
        self.service.wait_for_store()
        abort_default_group()
        self._init_default_group()
