"""The ranks of a job before any process group exists: who comes, and on what kind of device."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_loco.distributed.devices import check_device_here
from lightning_loco.distributed.rendezvous import Rendezvous
from lightning_loco.distributed.same_job import JobName, SameJob
from lightning_loco.distributed.store import StoreTimeout, TimeoutStore, with_timeout
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.distributed.worker_group import connect_to_default_store

_NOBODY_ELSE = 1
_stores: dict[tuple[str, int, int], Store] = {}


class Job:
    """Where the ranks of a job find each other, each wait with an end and an error with a name.

    Args:
        address: Of the machine of rank 0.
        port: A free one there.
        rank: This rank.
        names: What to call the ranks in messages.
        timeout_s: Longest wait, in seconds.
        launched: Who has started the job, and under which name: ``"SLURM job 17"``. A rank of a job
            with another name is refused.

    Attributes:
        rank: As given.
        names: As given.
        timeout_s: As given.
        raw_store: The job's key-value store, for PyTorch's own set-up.
        store: A connection of its own to it.

    Raises:
        WorkerFailure: If rank 0, which hosts the store, does not answer in time.
        RuntimeError: If the store is another job's.
        ValueError: If rank 0 counts another number of ranks.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        names: Sequence[str],
        timeout_s: float,
        launched: str = "",
    ) -> None:
        self.rank = rank
        self.names = names
        self.timeout_s = timeout_s
        self._place = f"{address}:{port}"
        key = (address, port, len(names))
        with self._named():
            if key not in _stores:
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
                timeout = timedelta(seconds=timeout_s)
                # Rank 0 would wait for all others here, and end the store without a name.
                meeting = rendezvous("env://", rank, _NOBODY_ELSE, timeout=timeout)
                _stores[key], _, _ = with_timeout(lambda: next(meeting), timeout_s + 1)
            self.raw_store = _stores[key]
            self.store = TimeoutStore.connected_to(self.raw_store, timeout_s)
        job = JobName(launched, len(names))
        self._same_job = SameJob(
            self.store.with_prefix("lightning_loco/same"), rank, job, timeout_s
        )
        try:
            with self._named():
                self._same_job.check(self._place, names[0])
        except BaseException:
            self.close()
            raise

    def init_default_group(self, ranks: Sequence[int], backend: str, device: torch.device) -> None:
        """Make the default process group of some ranks; the others must not call it.

        Args:
            ranks: Which, ascending.
            backend: What carries the messages.
            device: Where this rank computes.

        Raises:
            ValueError: On all of them, if some compute on a CPU and others on a GPU, say.
            RuntimeError: If there is one with other ranks, or a rank does not come in time.
        """
        if dist.is_initialized():
            if dist.get_world_size() != len(ranks):
                raise RuntimeError(
                    f"The default process group has {dist.get_world_size()} ranks already, but "
                    f"should have the {len(ranks)} that train. Do not initialise torch.distributed "
                    "before, and use one number of workers per process."
                )
            return
        own, keys = ranks.index(self.rank), f"lightning_loco/training{len(ranks)}"
        names = [self.names[rank] for rank in ranks]
        with self._named():
            came, look = self.store.with_prefix(f"{keys}/came"), self._same_job.raise_if_refused
            arrivals = Rendezvous(came, own, names, self.timeout_s, look)
            check_device_here(device, arrivals)
            store = PrefixStore(f"{keys}/{arrivals.attempt}", self.raw_store)

            def connect() -> None:
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=own,
                    world_size=len(ranks),
                    timeout=timedelta(seconds=self.timeout_s),
                    device_id=None if device.type == "cpu" else device,
                )

            try:
                with_timeout(connect, self.timeout_s + 1)
            except RuntimeError as error:
                reason = str(error).strip().split("\n")[0]
                raise WorkerFailure(f"{arrivals.explain()} PyTorch says: {reason}") from error
        if backend == "nccl":
            atexit.register(_destroy_default_group)

    def raise_if_refused(self) -> None:
        """End a wait for the others if one of them counts another number of ranks.

        Raises:
            ValueError: If one does.
        """
        self._same_job.raise_if_refused()

    def close(self) -> None:
        """Let go of the connection; twice does no harm."""
        self.store.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let a store that is silent or gone inside be an error that names its host."""
        try:
            yield
        except (StoreTimeout, dist.DistError) as error:
            if self.rank == 0 and not isinstance(error, StoreTimeout):
                raise  # it could not be opened: the port is taken, say
            raise WorkerFailure(
                f"No message in the set-up within {self.timeout_s:g} s from {self.names[0]}, "
                f"which hosts the job's key-value store at {self._place} and is unreachable. "
                "Check that it runs and that nothing holds it or the network to it up, or raise "
                "timeout_s."
            ) from error


def init_workers(
    place: Callable[[], tuple[str, int]],
    worker: tuple[int, int],
    backend: str,
    device: torch.device,
    timeout_s: float,
    launched: str = "",
) -> None:
    """Make the default process group of a job's workers, or check the one that there is.

    Args:
        place: Gives the address of the machine of worker 0, and a free port there.
        worker: This one's number, and how many there are; one alone needs no group.
        backend: What carries the messages.
        device: Where this worker computes.
        timeout_s: Longest wait for another worker, in seconds.
        launched: Who has started the job, and under which name, as in :class:`Job`.

    Raises:
        ValueError: On all workers, if some compute on a CPU and others on a GPU, say, or count
            another number of workers.
        RuntimeError: If the store at this place is another job's.
        WorkerFailure: If one does not come in time; the message says which.
    """
    if dist.is_initialized():
        _check_default_group(device, timeout_s)
        return
    number, num_workers = worker
    if num_workers > 1:
        job = Job(*place(), number, _names(num_workers), timeout_s, launched)
        try:
            job.init_default_group(range(num_workers), backend, device)
        finally:
            job.close()


def _check_default_group(device: torch.device, timeout_s: float) -> None:
    if (num_workers := dist.get_world_size()) == 1:
        return
    store = connect_to_default_store(timeout_s)
    came, names = store.with_prefix("lightning_loco/kind"), _names(num_workers)
    try:
        check_device_here(device, Rendezvous(came, dist.get_rank(), names, timeout_s))
    finally:
        store.close()


def _names(num_workers: int) -> list[str]:
    return [f"worker {number}" for number in range(num_workers)]


def _destroy_default_group() -> None:
    """PyTorch warns when NCCL's is left to the end of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
