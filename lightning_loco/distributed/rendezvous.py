"""Rendezvous: how the ranks of a job find each other before any process group exists."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from lightning_loco.distributed.devices import check_same_kind
from lightning_loco.distributed.notes import read
from lightning_loco.distributed.store import (
    StoreTimeout,
    TimeoutStore,
    connect_to_default_store,
    store_host,
    with_timeout,
)
from lightning_loco.distributed.watchdog import WorkerFailure

_STORE_TIMEOUT_S = 1.0
_LEAVE_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.02
_SHORTEST_POLL_INTERVAL_S = 0.001
_JOB_KEY = "job"
_REFUSED_KEY = "refused"
_MAX_TEXT = 400
_stores: dict[tuple[str, int, int], Store] = {}


def init_workers(
    get_address: Callable[[], tuple[str, int]],
    worker: tuple[int, int],
    backend: str,
    device: torch.device,
    timeout_s: float,
    job_name: str = "",
) -> None:
    """Initialize the default process group of a job's workers, or check an existing one.

    Args:
        get_address: Returns the address of the host of worker 0, and a free port there.
        worker: Number of this worker, and the number of workers; a single one needs no group.
        backend: Backend of the process group.
        device: Device of this worker.
        timeout_s: Longest wait for another worker, in seconds.
        job_name: Launcher and name of the job, as in :class:`Job`.

    Raises:
        ValueError: On all workers, if their devices are of different kinds (CPU and GPU, say), or
            if they were started with different numbers of workers.
        RuntimeError: If the store at this address belongs to another job.
        WorkerFailure: If a worker does not join in time; the message says which.
    """
    if dist.is_initialized():
        _check_default_group(device, timeout_s)
        return
    number, num_workers = worker
    if num_workers > 1:
        job = Job(*get_address(), number, _worker_names(num_workers), timeout_s, job_name)
        try:
            job.init_default_group(range(num_workers), backend, device)
        finally:
            job.close()


def _check_default_group(device: torch.device, timeout_s: float) -> None:
    if (num_workers := dist.get_world_size()) == 1:
        return
    store = connect_to_default_store(timeout_s)
    keys, names = store.with_prefix("lightning_loco/device"), _worker_names(num_workers)
    try:
        Rendezvous(keys, dist.get_rank(), names, timeout_s).check_device(device)
    finally:
        store.close()


def _worker_names(num_workers: int) -> list[str]:
    return [f"worker {number}" for number in range(num_workers)]


class Job:
    """The ranks of a job, connected by its key-value store.

    Every wait has a timeout, and its error names the rank that is missing.

    Args:
        address: Address of the host of rank 0.
        port: A free port there.
        rank: This rank.
        names: Names of all ranks, for messages.
        timeout_s: Longest wait for another rank, in seconds.
        job_name: Launcher and name of the job: ``"SLURM job 17"``. A rank with another job name is
            refused.

    Attributes:
        rank: As given.
        names: As given.
        timeout_s: As given.
        raw_store: The job's key-value store, for the set-up of process groups by PyTorch.
        store: A separate connection to that store.

    Raises:
        WorkerFailure: If rank 0, which hosts the store, does not answer in time.
        RuntimeError: If the store belongs to another job.
        ValueError: If rank 0 was started with another number of ranks.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        names: Sequence[str],
        timeout_s: float,
        job_name: str = "",
    ) -> None:
        self.rank = rank
        self.names = names
        self.timeout_s = timeout_s
        self._job_name = job_name
        self._address = f"{address}:{port}"
        key = (address, port, len(names))
        with self._store_errors_named():
            if key not in _stores:
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
                timeout = timedelta(seconds=timeout_s)
                # With the true world size, rank 0 would wait here for all others, and its error
                # would not say which of them are missing.
                handler = torch_rendezvous("env://", rank, world_size=1, timeout=timeout)
                _stores[key], _, _ = with_timeout(lambda: next(handler), timeout_s + 1)
            self.raw_store = _stores[key]
            self.store = TimeoutStore.from_clone(self.raw_store, timeout_s)
        self._job_store = self.store.with_prefix("lightning_loco/job")
        try:
            with self._store_errors_named():
                self._check_same_job()
        except BaseException:
            self.close()
            raise

    def init_default_group(self, ranks: Sequence[int], backend: str, device: torch.device) -> None:
        """Initialize the default process group with some ranks; the others must not call it.

        Args:
            ranks: Ranks of the group, ascending.
            backend: Backend of the process group.
            device: Device of this rank.

        Raises:
            ValueError: On all these ranks, if their devices are of different kinds.
            RuntimeError: If there is a default group with other ranks, or a rank does not join in
                time.
        """
        if dist.is_initialized():
            if dist.get_world_size() != len(ranks):
                raise RuntimeError(
                    f"The default process group has {dist.get_world_size()} ranks already, but "
                    f"should have the {len(ranks)} that train. Do not initialise torch.distributed "
                    "before, and use one number of workers per process."
                )
            return
        prefix = f"lightning_loco/training{len(ranks)}"
        with self._store_errors_named():
            rendezvous = Rendezvous(
                self.store.with_prefix(f"{prefix}/rendezvous"),
                ranks.index(self.rank),
                [self.names[rank] for rank in ranks],
                self.timeout_s,
                self.raise_if_refused,
            )
            rendezvous.check_device(device)
            store = PrefixStore(f"{prefix}/{rendezvous.attempt}", self.raw_store)

            def connect() -> None:
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=ranks.index(self.rank),
                    world_size=len(ranks),
                    timeout=timedelta(seconds=self.timeout_s),
                    device_id=None if device.type == "cpu" else device,
                )

            try:
                with_timeout(connect, self.timeout_s + 1)
            except RuntimeError as error:
                reason = str(error).strip().split("\n")[0]
                raise WorkerFailure(f"{rendezvous.explain()} PyTorch says: {reason}") from error
        if backend == "nccl":
            atexit.register(_destroy_default_group)

    def _check_same_job(self) -> None:
        """Compare the job's name and number of ranks with those that rank 0 has published.

        Raises:
            WorkerFailure: If rank 0 does not publish them in time.
            RuntimeError: If the store belongs to another job, which continues.
            ValueError: If the numbers of ranks differ; the other ranks raise it as well.
        """
        num_ranks = len(self.names)
        if self.rank == 0:
            self._job_store.delete_key(_REFUSED_KEY, self.timeout_s)  # of an earlier attempt
            published = json.dumps([self._job_name, num_ranks])
            self._job_store.set(_JOB_KEY, published, self.timeout_s)
            return
        deadline = time.monotonic() + self.timeout_s
        while not self._job_store.check([_JOB_KEY], self.timeout_s):
            if time.monotonic() > deadline:
                raise WorkerFailure(_explain_missing(self.names[0], self.timeout_s))
            time.sleep(_POLL_INTERVAL_S)
        value = self._job_store.get(_JOB_KEY, self.timeout_s)
        match read(value, f"Rank 0 at {self._address}"):
            case [str(job_name_0), int(num_ranks_0)]:
                pass
            case other:
                raise RuntimeError(
                    f"The key-value store at {self._address} holds {str(other)[:100]!r}, which is "
                    "not of this program. Does another program use the port of this job?"
                )
        if job_name_0 != self._job_name:
            raise RuntimeError(
                f"This process belongs to {_describe_job(self._job_name)}, but rank 0 at "
                f"{self._address} to {_describe_job(job_name_0)}, which goes on without it. Give "
                "each job a MASTER_PORT of its own, and see that MASTER_ADDR is the machine of "
                "this job's rank 0."
            )
        if num_ranks_0 != num_ranks:
            text = (
                f"Rank {self.rank} counts {num_ranks} ranks in all, and rank 0 {num_ranks_0}. Use "
                "the same number of devices and of machines for all "
                "(Trainer(devices=..., num_nodes=...))."
            )
            self._job_store.set(_REFUSED_KEY, text, self.timeout_s)
            # The store answers this call only once it has read the value.
            self._job_store.check([_REFUSED_KEY], self.timeout_s)
            raise ValueError(text)

    def raise_if_refused(self) -> None:
        """Raise if a rank was refused, so that the ranks that wait for it end as well.

        Raises:
            ValueError: If a rank was started with another number of ranks than rank 0.
        """
        if self._job_store.check([_REFUSED_KEY], self.timeout_s):
            text = self._job_store.get(_REFUSED_KEY, self.timeout_s).decode(errors="replace")
            with suppress(RuntimeError):
                _wait_until_others_know(self._job_store, self.rank, len(self.names))
            raise ValueError(text[:_MAX_TEXT])

    def close(self) -> None:
        """Close this connection to the store; a second call does nothing."""
        self.store.close()

    @contextmanager
    def _store_errors_named(self) -> Iterator[None]:
        """Name the host of the store in errors of a store that is silent or has ended."""
        try:
            yield
        except (StoreTimeout, dist.DistError) as error:
            if self.rank == 0 and not isinstance(error, StoreTimeout):
                raise  # this rank could not open the store: the port is taken, for example
            raise WorkerFailure(
                f"No message in the set-up within {self.timeout_s:g} s from {self.names[0]}, "
                f"which hosts the job's key-value store at {self._address} and is unreachable. "
                "Check that it runs and that nothing holds it or the network to it up, or raise "
                "timeout_s."
            ) from error


def _describe_job(job_name: str) -> str:
    return job_name[:_MAX_TEXT] or "a job without a name"


def _destroy_default_group() -> None:
    """Destroy the default group when Python ends: PyTorch warns if one of NCCL is left."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Rendezvous:
    """An attempt of the set-up that all workers join, and in which they exchange one value.

    Worker 0 starts an attempt whenever it constructs a rendezvous. The others join the newest
    attempt that they have not joined before. So it does no harm if an error has kept one of them
    from an earlier attempt.

    Args:
        store: Key-value store shared by all workers.
        worker: Number of this worker.
        names: Names of all workers, for messages.
        timeout_s: Longest wait for the others, in seconds.
        poll: Called repeatedly while this worker waits; it may raise an error to end the wait.

    Attributes:
        attempt: Number of the attempt, the same on all workers after :meth:`all_gather`.
    """

    def __init__(
        self,
        store: TimeoutStore,
        worker: int,
        names: Sequence[str],
        timeout_s: float,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._poll = poll
        self._worker = worker
        self._names = names
        self._timeout_s = timeout_s
        self._is_complete = False
        self._last_attempt = self.attempt = store.add(f"joined/{worker}", 0, timeout_s)
        store.set(f"waiting/{worker}", "", timeout_s)
        if worker == 0:
            store.add("attempt", 1, timeout_s)

    def check_device(self, device: torch.device) -> None:
        """Check that the devices of all workers are of one kind; all must call it.

        Args:
            device: Device of this worker.

        Raises:
            ValueError: On all workers, if some are on a CPU and others on a GPU, say.
            WorkerFailure: If a worker does not join in time.
        """
        try:
            check_same_kind(self.all_gather(device.type))
        except ValueError:
            self._wait_before_common_error()
            raise

    def all_gather(self, value: str) -> list[str]:
        """Join an attempt and exchange a value with all workers; to be called once.

        Returns:
            The values of all workers, in order.

        Raises:
            WorkerFailure: If a worker does not join in time; the message says which.
            Exception: Any error that ``poll`` raises.
        """
        started = time.monotonic()
        try:
            while not self._have_all_joined():
                self._join_newest_attempt(value)
                waited_s = time.monotonic() - started
                if waited_s > self._timeout_s:
                    raise WorkerFailure(self.explain())
                self._poll()
                time.sleep(min(max(waited_s, _SHORTEST_POLL_INTERVAL_S), _POLL_INTERVAL_S))
            self._is_complete = True
            self._store.delete_key(f"waiting/{self._worker}", self._timeout_s)
            values = self._store.get_all(self._value_keys(), self._timeout_s)
            return [item.decode() for item in values]
        except WorkerFailure:
            raise
        except RuntimeError as error:
            raise WorkerFailure(self.explain()) from error

    def _have_all_joined(self) -> bool:
        is_new = self.attempt > self._last_attempt
        return is_new and self._store.check(self._value_keys(), self._timeout_s)

    def _join_newest_attempt(self, value: str) -> None:
        newest = self._store.add("attempt", 0, self._timeout_s)
        if newest > self.attempt:
            self._store.add(f"joined/{self._worker}", newest - self.attempt, self._timeout_s)
            self.attempt = newest
            self._store.set(self._value_keys()[self._worker], value, self._timeout_s)

    def _value_keys(self) -> list[str]:
        return [f"{self.attempt}/{worker}" for worker in range(len(self._names))]

    def _wait_before_common_error(self) -> None:
        """Let worker 0, which may host the store, raise an error of all workers last."""
        store = self._store.with_prefix(f"leaving/{self.attempt}")
        with suppress(RuntimeError):
            _wait_until_others_know(store, self._worker, len(self._names))

    def explain(self) -> str:
        """Return an error message that names the workers that have not joined."""
        return _explain_missing(self._find_missing(), self._timeout_s)

    def _find_missing(self) -> str:
        workers = range(len(self._names))
        try:
            waiting = [self._store.check([f"waiting/{w}"], _STORE_TIMEOUT_S) for w in workers]
            pairs = zip(self._names, waiting, strict=True)
            missing = [name for name, waits in pairs if not (waits or self._is_complete)]
            store = self._store.with_prefix(f"missing/{self.attempt}")
            _wait_until_others_know(store, self._worker, len(self._names) - len(missing))
        except RuntimeError as error:
            return explain_lost_store(self._names[0], error)
        return (
            ", ".join(missing)
            or "any worker (all have joined: one has ended since, or a network fault)"
        )


def explain_lost_store(host: str, error: RuntimeError) -> str:
    """Name the host of a store that does not answer at all, and say what has happened to it.

    Args:
        host: Name of the worker that hosts the store.
        error: The error of a call of the store.
    """
    what = "is unreachable" if isinstance(error, StoreTimeout) else "has ended"
    return f"{store_host(host)}, which hosts the job's key-value store and {what}"


def _explain_missing(names: str, timeout_s: float) -> str:
    return (
        f"No message in the set-up within {timeout_s:.0f} s from {names}. Check that every worker "
        "runs the same script, or raise timeout_s."
    )


def _wait_until_others_know(store: TimeoutStore, worker: int, num_present: int) -> None:
    """Record that this worker knows of an error, before it ends with that error.

    Worker 0 waits up to 2 seconds until the others know, since the store may end with it.

    Args:
        store: Key-value store with keys of its own for this error.
        worker: Number of this worker.
        num_present: How many workers are not missing, including this one.
    """
    num_informed = store.add("informed", 1, _STORE_TIMEOUT_S)
    deadline = time.monotonic() + _LEAVE_TIMEOUT_S
    while worker == 0 and num_informed < num_present and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        num_informed = store.add("informed", 0, _STORE_TIMEOUT_S)
