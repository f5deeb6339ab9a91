"""The ranks of a job, connected by its key-value store before any process group exists."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from lightning_loco.distributed import json_messages
from lightning_loco.distributed.rendezvous import (
    POLL_INTERVAL_S,
    Rendezvous,
    explain_lost_store,
    explain_missing,
    wait_until_others_know,
)
from lightning_loco.distributed.store import (
    StoreTimeout,
    TimeoutStore,
    connect_to_default_store,
    publish,
    with_timeout,
)
from lightning_loco.distributed.watchdog import WorkerFailure, capitalized, rank_names

log = logging.getLogger(__name__)

_JOB_KEY = "job"
_REFUSED_KEY = "refused"
_ENDED_KEY = "lightning_loco/rank 0 has ended"
_MAX_TEXT = 400
_LONGEST_PAUSE_S = 0.1


@dataclass
class _KeptStore:
    """The key-value store of a job, which all jobs at its address use until the process ends.

    Attributes:
        store: The store.
        id: What rank 0 has called it; empty if that is not known yet.
        num_keys: How many keys :meth:`Job.next_keys` has returned for each prefix.
        tells_end: Whether this rank sets ``_ENDED_KEY`` when its process ends.
    """

    store: Store
    id: str = ""
    num_keys: Counter[str] = field(default_factory=Counter)
    tells_end: bool = False


_stores: dict[tuple[str, int, int], _KeptStore] = {}
"""By address, port and number of ranks."""


def init_workers(
    get_address: Callable[[], tuple[str, int]],
    rank: tuple[int, int],
    backend: str,
    device: torch.device,
    timeout_s: float,
    job_name: str = "",
    replica_size: int = 1,
) -> None:
    """Initialize the default process group of a job's workers, or check an existing one.

    Args:
        get_address: Returns the address of the host of rank 0, and a free port there.
        rank: This rank, and the number of ranks; a single one needs no group.
        backend: Backend of the process group.
        device: Device of this rank.
        timeout_s: Longest wait for another rank, in seconds.
        job_name: Launcher and name of the job, as in :class:`Job`.
        replica_size: Number of consecutive ranks that are a worker.

    Raises:
        ValueError: On all ranks, if their devices are of different kinds (CPU and GPU, say), or
            if they were started with different numbers of ranks.
        RuntimeError: If the store at this address belongs to another job.
        WorkerFailure: If a rank does not join in time; the message says which.
    """
    if dist.is_initialized():
        _check_default_group(device, timeout_s, replica_size)
        return
    number, num_ranks = rank
    if num_ranks > 1:
        names = rank_names(num_ranks // replica_size, replica_size)
        job = Job(*get_address(), number, names, timeout_s, job_name)
        try:
            job.init_default_group(num_ranks, backend, device)
        finally:
            job.close()


def _check_default_group(device: torch.device, timeout_s: float, replica_size: int) -> None:
    if (num_ranks := dist.get_world_size()) == 1:
        return
    store = connect_to_default_store(timeout_s)
    keys = store.with_prefix("lightning_loco/device")
    names = rank_names(num_ranks // replica_size, replica_size)
    try:
        Rendezvous(keys, dist.get_rank(), names, timeout_s).check_device(device)
    finally:
        store.close()


class Job:
    """The ranks of a job, connected by its key-value store.

    Waits have a timeout, except in :meth:`gather` and :meth:`wait_until_written`. An error
    names the rank that is missing.

    Args:
        address: Address of the host of rank 0.
        port: A free port there.
        rank: This rank.
        names: Names of all ranks, for messages.
        timeout_s: Longest wait for another rank, in seconds.
        job_name: Launcher and name of the job: ``"SLURM job 17"``. A rank with another job name is
            refused.

    Attributes:
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
        if not self._connect(key):
            # Another process is rank 0 now, at the same port as in an earlier job.
            del _stores[key]
            self._connect(key)

    def _connect(self, key: tuple[str, int, int]) -> bool:
        """Connect to the store; return False if earlier jobs had another one."""
        address, port, _ = key
        with self._store_errors_named():
            if key not in _stores:
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
                timeout = timedelta(seconds=self.timeout_s)
                # With the true world size, rank 0 would wait here for all others, and its error
                # would not say which of them are missing.
                handler = torch_rendezvous("env://", self.rank, world_size=1, timeout=timeout)
                store, _, _ = with_timeout(lambda: next(handler), self.timeout_s + 1)
                _stores[key] = _KeptStore(store)
            self._kept = _stores[key]
            self.raw_store = self._kept.store
            self.store = TimeoutStore.from_clone(self.raw_store, self.timeout_s)
        self._job_store = self.store.with_prefix("lightning_loco/job")
        try:
            with self._store_errors_named():
                store_id = self._check_same_job()
        except BaseException:
            self.close()
            raise
        if self._kept.id in ("", store_id):
            self._kept.id = store_id
            return True
        self.close()
        return False

    def init_default_group(self, num_ranks: int, backend: str, device: torch.device) -> None:
        """Initialize the default process group with the first ranks; the others must not call it.

        Args:
            num_ranks: How many.
            backend: Backend of the process group.
            device: Device of this rank.

        Raises:
            ValueError: On all these ranks, if their devices are of different kinds.
            RuntimeError: If there is a default group with other ranks, or a rank does not join in
                time.
        """
        if dist.is_initialized():
            if dist.get_world_size() != num_ranks:
                raise RuntimeError(
                    f"The default process group has {dist.get_world_size()} ranks already, but "
                    f"should have the {num_ranks} that train. Do not initialise torch.distributed "
                    "before, and use one number of workers per process."
                )
            return
        prefix = f"lightning_loco/training{num_ranks}"
        with self._store_errors_named():
            rendezvous = Rendezvous(
                self.store.with_prefix(f"{prefix}/rendezvous"),
                self.rank,
                self.names[:num_ranks],
                self.timeout_s,
                self.raise_if_refused,
            )
            rendezvous.check_device(device)
            store = PrefixStore(f"{prefix}/{rendezvous.attempt}", self.raw_store)

            def connect() -> None:
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=self.rank,
                    world_size=num_ranks,
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

    def _check_same_job(self) -> str:
        """Compare the job's name and number of ranks with those that rank 0 has published.

        Returns:
            The id that rank 0 has given to its store.

        Raises:
            WorkerFailure: If rank 0 does not publish them in time.
            RuntimeError: If the store belongs to another job, which continues.
            ValueError: If the numbers of ranks differ; the other ranks raise it as well.
        """
        num_ranks = len(self.names)
        if self.rank == 0:
            self._job_store.delete_key(_REFUSED_KEY, self.timeout_s)  # of an earlier attempt
            self._kept.id = self._kept.id or uuid.uuid4().hex
            published = json.dumps([self._job_name, num_ranks, self._kept.id])
            self._job_store.set(_JOB_KEY, published, self.timeout_s)
            return self._kept.id
        deadline = time.monotonic() + self.timeout_s
        while not self._job_store.check([_JOB_KEY], self.timeout_s):
            if time.monotonic() > deadline:
                raise WorkerFailure(explain_missing(self.names[0], self.timeout_s))
            time.sleep(POLL_INTERVAL_S)
        value = self._job_store.get(_JOB_KEY, self.timeout_s)
        match json_messages.read(value, f"Rank 0 at {self._address}"):
            case [str(job_name_0), int(num_ranks_0), str(store_id)]:
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
        return store_id

    def raise_if_refused(self) -> None:
        """Raise if a rank was refused, so that the ranks that wait for it end as well.

        Raises:
            ValueError: If a rank was started with another number of ranks than rank 0.
        """
        if self._job_store.check([_REFUSED_KEY], self.timeout_s):
            text = self._job_store.get(_REFUSED_KEY, self.timeout_s).decode(errors="replace")
            with suppress(RuntimeError):
                wait_until_others_know(self._job_store, self.rank, len(self.names))
            raise ValueError(text[:_MAX_TEXT])

    def next_keys(self, prefix: str) -> str:
        """Return a longer prefix, for keys in the store that nothing else in this job uses.

        Args:
            prefix: Purpose of the keys; all ranks call it equally often with the same one.
        """
        self._kept.num_keys[prefix] += 1
        return f"{prefix}{self._kept.num_keys[prefix]}"

    def gather(self, keys: str, message: bytes, poll: Callable[[float], object]) -> list[bytes]:
        """Return a message of every rank, in order; all must call it.

        It takes milliseconds, a collective of gloo less. But gloo always has a timeout, after which
        it closes all connections, signal handlers do not run while it waits, and it does not say
        which rank is missing while it connects.

        Args:
            keys: Prefix of the keys in the store for this call alone, as of :meth:`next_keys`.
            message: Message of this rank.
            poll: Called repeatedly with the seconds waited so far; it may raise to end the wait,
                which has no other limit.

        Raises:
            RuntimeError: If the store does not answer within ``timeout_s``.
            Exception: Any error that ``poll`` raises.
        """
        key_of_each = [f"{keys}/{rank}" for rank in range(len(self.names))]
        self.store.set(key_of_each[self.rank], message, self.timeout_s)
        return self._wait_for(key_of_each, poll)

    def _wait_for(self, keys: Sequence[str], poll: Callable[[float], object]) -> list[bytes]:
        """Return the values of keys once they exist; they are set by the first ranks, in order."""
        started, pause_s, warn_after_s = time.monotonic(), POLL_INTERVAL_S, self.timeout_s
        while not self.store.check(keys, self.timeout_s):
            waited_s = time.monotonic() - started
            poll(waited_s)
            if waited_s > warn_after_s:
                warn_after_s = math.inf
                pairs = zip(self.names, keys, strict=False)
                missing = [name for name, key in pairs if not self.store.check([key])]
                log.warning("Still waiting for %s, after %.0f s.", ", ".join(missing), waited_s)
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)
        return self.store.get_all(keys, self.timeout_s)

    def publish_end(self) -> None:
        """Let rank 0 publish when its process ends, for ranks in :meth:`wait_until_written`.

        A store that torchrun hosts outlives rank 0.
        """
        if self.rank == 0 and not self._kept.tells_end:
            self._kept.tells_end = True
            atexit.register(_publish_ends)

    def report_written(self, error: BaseException | None) -> None:
        """End the :meth:`wait_until_written` of all other ranks; rank 0 calls it as often as they.

        Args:
            error: Why the file could not be written, or None.
        """
        text = json_messages.write(json_messages.write_error(error)).decode()
        with suppress(RuntimeError):
            publish(self.store, self.next_keys("lightning_loco/file"), text)

    def wait_until_written(self) -> None:
        """Wait, without a timeout, until rank 0 has written a file.

        Raises:
            WorkerFailure: If rank 0 ends first (and has called :meth:`publish_end`), or the store
                does not answer.
            Exception: Rank 0's error, if it could not write the file.
        """
        key, name = self.next_keys("lightning_loco/file"), self.names[0]

        def check_rank_0(_: float) -> None:
            has_ended = self.store.check([_ENDED_KEY], self.timeout_s)
            if has_ended and not self.store.check([key], self.timeout_s):
                raise WorkerFailure(
                    f"{name} has ended without a checkpoint that this rank waits for. Call "
                    "trainer.save_checkpoint on all ranks, or on none."
                )

        try:
            (value,) = self._wait_for([key], check_rank_0)
        except WorkerFailure:
            raise
        except RuntimeError as error:
            text = f"No checkpoint was saved by {explain_lost_store(name, error)}."
            raise WorkerFailure(text) from error
        found = json_messages.read_error(json_messages.read(value, name), capitalized(name))
        if found is not None:
            raise found

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


def _publish_ends() -> None:
    for kept in _stores.values():
        if kept.tells_end:
            with suppress(RuntimeError):
                kept.store.set(_ENDED_KEY, "")


def _describe_job(job_name: str) -> str:
    return job_name[:_MAX_TEXT] or "a job without a name"


def _destroy_default_group() -> None:
    """Destroy the default group when Python ends: PyTorch warns if one of NCCL is left."""
    if dist.is_initialized():
        dist.destroy_process_group()
