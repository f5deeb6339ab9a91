"""How the ranks of a job find each other, before any process group exists."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

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

_LOOK_S = 1.0
_FAREWELL_S = 2.0
_PAUSE_S = 0.02
_SHORT_PAUSE_S = 0.001
_JOB = "job"
_REFUSED = "refused"
_LONGEST = 400
_NOBODY_ELSE = 1
_stores: dict[tuple[str, int, int], Store] = {}


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


class Rendezvous:
    """Brings all workers to one attempt of the set-up, whatever became of the earlier ones.

    Worker 0 begins an attempt whenever it comes. The others join the newest attempt that they have
    not joined before, so an error that keeps one of them from an attempt does not matter later.

    Args:
        store: Key-value store shared by all workers.
        worker: Number of this worker; it has come.
        names: What to call the workers in messages.
        timeout_s: Longest wait for them, in seconds.
        look: Called again and again while this worker waits; it may raise why to end that.

    Attributes:
        attempt: Number of the attempt, the same on all workers after :meth:`exchange`.
    """

    def __init__(
        self,
        store: TimeoutStore,
        worker: int,
        names: Sequence[str],
        timeout_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._look = look
        self._worker = worker
        self._names = names
        self._timeout_s = timeout_s
        self._has_met_all = False
        self._last_joined = self.attempt = store.add(f"joined/{worker}", 0, timeout_s)
        store.set(f"waits/{worker}", "", timeout_s)
        if worker == 0:
            store.add("attempt", 1, timeout_s)

    def exchange(self, word: str) -> list[str]:
        """Tell all workers a word, once; returns those of all, in order.

        Raises:
            WorkerFailure: If one does not come in time; the message says which.
            Exception: What ``look`` raises.
        """
        began = time.monotonic()
        try:
            while not self._all_have_joined():
                self._join_newest(word)
                waited_s = time.monotonic() - began
                if waited_s > self._timeout_s:
                    raise WorkerFailure(self.explain())
                self._look()
                time.sleep(min(max(waited_s, _SHORT_PAUSE_S), _PAUSE_S))
            self._has_met_all = True
            self._store.delete_key(f"waits/{self._worker}", self._timeout_s)
            told = self._store.get_all(self._words(), self._timeout_s)
            return [item.decode() for item in told]
        except WorkerFailure:
            raise
        except RuntimeError as error:
            raise WorkerFailure(self.explain()) from error

    def _all_have_joined(self) -> bool:
        is_new = self.attempt > self._last_joined
        return is_new and self._store.check(self._words(), self._timeout_s)

    def _join_newest(self, word: str) -> None:
        newest = self._store.add("attempt", 0, self._timeout_s)
        if newest > self.attempt:
            self._store.add(f"joined/{self._worker}", newest - self.attempt, self._timeout_s)
            self.attempt = newest
            self._store.set(self._words()[self._worker], word, self._timeout_s)

    def _words(self) -> list[str]:
        return [f"{self.attempt}/{worker}" for worker in range(len(self._names))]

    def part(self) -> None:
        """Before an error that all workers raise: worker 0 hosts the store, and ends last."""
        parted = self._store.with_prefix(f"parted/{self.attempt}")
        with suppress(RuntimeError):
            wait_until_others_know(parted, self._worker, len(self._names))

    def explain(self) -> str:
        """Say who has not come."""
        return explain_missing(self._who(), self._timeout_s)

    def _who(self) -> str:
        try:
            waits = [self._store.check([f"waits/{w}"], _LOOK_S) for w in range(len(self._names))]
            pairs = zip(self._names, waits, strict=True)
            late = [name for name, waits in pairs if not (waits or self._has_met_all)]
            looked = self._store.with_prefix(f"looked/{self.attempt}")
            wait_until_others_know(looked, self._worker, len(self._names) - len(late))
        except RuntimeError as error:
            return explain_lost_store(self._names[0], error)
        return (
            ", ".join(late) or "any worker (all have come: one has ended since, or a network fault)"
        )


def check_device_here(device: torch.device, arrivals: Rendezvous) -> None:
    """As :func:`check_same_kind`, of all that arrive; before a process group waits for some.

    Args:
        device: Where this rank computes.
        arrivals: This one and all others.

    Raises:
        ValueError: On all ranks, if some are on a CPU and others on a GPU, say.
        WorkerFailure: If one does not come in time.
    """
    try:
        check_same_kind(arrivals.exchange(device.type))
    except ValueError:
        arrivals.part()
        raise


class JobName(NamedTuple):
    """What all ranks of a job have in common.

    Attributes:
        launched: Who has started it, and under which name: ``"SLURM job 17"``; empty if nobody
            says.
        num_ranks: How many ranks there are.
    """

    launched: str
    num_ranks: int


class SameJob:
    """Rank 0 writes its job's name down, and the others compare theirs.

    Args:
        store: The job's key-value store, with keys of its own for this.
        rank: This rank.
        job: Which it believes to belong to.
        timeout_s: Longest wait for rank 0, in seconds.
    """

    def __init__(self, store: TimeoutStore, rank: int, job: JobName, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._job = job
        self._timeout_s = timeout_s

    def check(self, place: str, host: str) -> None:
        """Compare this rank's job with that of rank 0.

        Args:
            place: Address and port of the store.
            host: What to call rank 0 in messages.

        Raises:
            WorkerFailure: If rank 0 does not come in time.
            RuntimeError: If the store is another job's, which goes on.
            ValueError: If the ranks of one job count differently; the others raise it as well.
        """
        if self._rank == 0:
            self._store.delete_key(_REFUSED, self._timeout_s)  # of an attempt before this one
            self._store.set(_JOB, json.dumps(self._job), self._timeout_s)
            return
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([_JOB], self._timeout_s):
            if time.monotonic() > deadline:
                raise WorkerFailure(explain_missing(host, self._timeout_s))
            time.sleep(_PAUSE_S)
        match read(self._store.get(_JOB, self._timeout_s), f"Rank 0 at {place}"):
            case [str(launched), int(num_ranks)]:
                there = JobName(launched[:_LONGEST], num_ranks)
            case other:
                raise RuntimeError(
                    f"What is in the key-value store at {place} is not of this program: "
                    f"{str(other)[:100]!r}. Does another program use the port of this job?"
                )
        if there.launched != self._job.launched:
            raise RuntimeError(
                f"This process belongs to {_words(self._job)}, but rank 0 at {place} to "
                f"{_words(there)}, which goes on without it. Give each job a MASTER_PORT of its "
                "own, and see that MASTER_ADDR is the machine of this job's rank 0."
            )
        if there.num_ranks != self._job.num_ranks:
            text = (
                f"Rank {self._rank} counts {self._job.num_ranks} ranks in all, and rank 0 "
                f"{there.num_ranks}. Use the same number of devices and of machines for all "
                "(Trainer(devices=..., num_nodes=...))."
            )
            self._store.set(_REFUSED, text, self._timeout_s)
            self._store.check([_REFUSED], self._timeout_s)  # it has been read by now
            raise ValueError(text)

    def raise_if_refused(self) -> None:
        """Tell this rank, which waits for others, that one of them has been refused.

        Raises:
            ValueError: If one has.
        """
        if self._store.check([_REFUSED], self._timeout_s):
            text = self._store.get(_REFUSED, self._timeout_s).decode(errors="replace")[:_LONGEST]
            with suppress(RuntimeError):
                wait_until_others_know(self._store, self._rank, self._job.num_ranks)
            raise ValueError(text)


def _words(job: JobName) -> str:
    return job.launched or "a job without a name"


def explain_missing(who: str, timeout_s: float) -> str:
    """The message for a set-up in which some have not come in time."""
    return (
        f"No message in the set-up within {timeout_s:.0f} s from {who}. Check that every worker "
        "runs the same script, or raise timeout_s."
    )


def wait_until_others_know(store: TimeoutStore, worker: int, present: int) -> None:
    """Say that this worker has seen who is missing, before it ends with an error.

    Worker 0, whose end is the end of the store, stays for a moment until the others have seen it.

    Args:
        store: Key-value store with keys of its own for this error.
        worker: Number of this worker.
        present: How many workers are not missing, this one included.
    """
    seen = store.add("seen", 1, _LOOK_S)
    deadline = time.monotonic() + _FAREWELL_S
    while worker == 0 and seen < present and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        seen = store.add("seen", 0, _LOOK_S)


def explain_lost_store(host: str, error: RuntimeError) -> str:
    """Whom to blame, in words, when the store has not answered at all.

    Args:
        host: Name of the worker that hosts it.
        error: What a call of the store has raised.
    """
    what = "is unreachable" if isinstance(error, StoreTimeout) else "has ended"
    return f"{store_host(host)}, which hosts the job's key-value store and {what}"
