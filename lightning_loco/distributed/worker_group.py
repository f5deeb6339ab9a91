"""The ranks of a job: process groups, agreement on errors, and a watchdog.

Every engine makes its own groups, in the same order on all workers.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import logging
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.utils.data._utils import signal_handling as _signal_handling

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.fault_points import reach
from lightning_loco.distributed import json_messages
from lightning_loco.distributed.devices import CPU, backend_on, check_same_kind
from lightning_loco.distributed.job import Job
from lightning_loco.distributed.rendezvous import SHORTEST_POLL_INTERVAL_S, Rendezvous
from lightning_loco.distributed.store import TimeoutStore, connect_to_default_store, with_timeout
from lightning_loco.distributed.store_barrier import StoreBarrier
from lightning_loco.distributed.watchdog import (
    Watchdog,
    WorkerFailure,
    capitalized,
    rank_names,
    worker_names,
)

log = logging.getLogger(__name__)

_SETUP_LABEL = "the set-up of the groups"
_ABORT_TIMEOUT_S = 2.0
_LONGEST_PAUSE_S = 0.2
_BACKEND_TIMEOUT_MARGIN_S = 60.0
"""Added to the timeout of a backend whose own timeout would end the process, in seconds."""

_abort: Callable[..., None] = getattr(
    dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group
)


@dataclasses.dataclass
class WorkerGroup:
    """Ranks that work together, the number of this one, and their connections.

    These are the workers that train, which are all ranks of the default process group
    (:meth:`create`), or all ranks of a job, some of which serve the others (:meth:`of_job`).

    A worker may consist of several ranks, its *places*. The ranks of equal place in all workers are
    a *column*: they exchange with each other, and ``data`` and ``control`` are theirs. The
    ranks of a worker take its decisions together, by :meth:`agree`.

    Attributes:
        worker: Number of this worker, 0 to N - 1; with a job, of this rank.
        num_workers: Number of workers N; with a job, of ranks.
        names: Names of all of them, for messages. Default: worker 0, worker 1, ...
        place: Index of this rank within its worker.
        replica_size: Number of ranks of a worker.
        ranks: Global ranks of the column, by worker.
        inner: gloo group of the ranks of this worker; None for a worker of one rank.
        inside: Process groups of ranks of this worker for tensors, by their places, with the
            backend of ``data``; the group of all of them is included.
        data: Process group for messages (NCCL on GPUs, gloo on CPUs); None for a single worker.
        control: gloo group for the worker statuses and small values; None for a single worker, and
            with a job.
        watchdog: Detects failed workers; None for a single worker.
        store_barrier: Lets workers wait at a sync point while others have a round to run; None
            for a single worker, and with a job.
        timeout_s: Longest wait for another worker, in seconds.
        store: The job's key-value store, with keys of this group's own; None for a single worker.
        job: The job whose ranks these are; None for workers. Small values are gathered through its
            store in place of ``control``. Its owner closes it.
        waits_indefinitely: Whether this rank waits for the others to give such values without a
            timeout, as long as none has failed and all give signs of life.
        wait_blocks_host: Whether ``Work.wait`` blocks the host until the data have arrived, as with
            gloo. With NCCL only the device waits, so the host polls ``Work.is_completed``.
        clock: Clock for waits in exchanges; the watchdog has its own.
        failed: Whether an exchange or this worker has failed, so that pending collectives will
            never complete; set before :meth:`close`.
    """

    worker: int
    num_workers: int
    names: Sequence[str] = ()
    place: int = 0
    replica_size: int = 1
    ranks: Sequence[int] = ()
    inner: dist.ProcessGroup | None = None
    inside: dict[tuple[int, ...], dist.ProcessGroup] = dataclasses.field(default_factory=dict)
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    watchdog: Watchdog | None = None
    store_barrier: StoreBarrier | None = None
    timeout_s: float = 600.0
    store: TimeoutStore | None = None
    job: Job | None = None
    waits_indefinitely: bool = False
    wait_blocks_host: bool = True
    clock: Clock = REAL_CLOCK
    failed: bool = False
    _keys: str = dataclasses.field(default="", repr=False)
    _connected_inside: set[tuple[int, ...]] = dataclasses.field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        """Set the default names and ranks."""
        self.names = self.names or worker_names(self.num_workers)
        self.ranks = self.ranks or range(self.num_workers)

    @classmethod
    def create(
        cls,
        *,
        timeout_s: float = 600.0,
        device: torch.device = CPU,
        backend: str | None = None,
        replica_size: int = 1,
    ) -> WorkerGroup:
        """Make the groups over all ranks of the default process group; call it on every rank.

        Args:
            timeout_s: Longest wait for another worker, in seconds.
            device: Device of the parameters; of the same kind on all workers.
            backend: Backend for messages. Default: gloo on the CPU, and on other devices the
                backend of the default process group.
            replica_size: Number of consecutive ranks that are one worker.

        Raises:
            ValueError: If ``timeout_s`` is not positive, the number of ranks is no multiple of
                ``replica_size``, or, on all workers, if they are on different kinds of devices.
            RuntimeError: If a worker does not join; its message says which.
        """
        group = cls.start(timeout_s=timeout_s, replica_size=replica_size)
        try:
            group.connect(device, backend)
        except BaseException as error:
            group.close(error)
            raise
        return group

    @classmethod
    def start(cls, *, timeout_s: float = 600.0, replica_size: int = 1) -> WorkerGroup:
        """Do the first half of :meth:`create`: connect by gloo and start the watchdog."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is in seconds and must be positive, got {timeout_s}.")
        is_initialized = dist.is_available() and dist.is_initialized()
        num_ranks = dist.get_world_size() if is_initialized else 1
        if replica_size < 1 or num_ranks % replica_size:
            raise ValueError(
                f"replica_size={replica_size} does not divide the {num_ranks} ranks. Start a "
                "multiple of it."
            )
        if num_ranks == 1:
            return cls(worker=0, num_workers=1, timeout_s=timeout_s)
        worker, place = divmod(dist.get_rank(), replica_size)
        group = cls(
            worker,
            num_ranks // replica_size,
            place=place,
            replica_size=replica_size,
            ranks=range(place, num_ranks, replica_size),
            timeout_s=timeout_s,
        )
        store = connect_to_default_store(timeout_s)
        try:
            group._start(store)
        except BaseException:
            store.close()
            group.close()
            raise
        return group

    @classmethod
    def of_job(cls, job: Job, *, waits_indefinitely: bool = False) -> WorkerGroup:
        """Start the watchdog of a group of all ranks of a job; :meth:`connect` connects them.

        The default process group need not exist, and may hold only some of these ranks.

        Args:
            job: The job; all ranks make equally many groups of it.
            waits_indefinitely: As the attribute; for ranks that serve others.
        """
        group = cls(
            job.rank,
            len(job.names),
            job.names,
            timeout_s=job.timeout_s,
            job=job,
            waits_indefinitely=waits_indefinitely,
            _keys=job.next_keys("lightning_loco/group"),
        )
        group._watch(job.store.with_prefix(group._keys))
        return group

    def _watch(self, store: TimeoutStore) -> None:
        self.store = store
        self.watchdog = Watchdog(
            store.with_prefix("watchdog"),
            self._rank,
            self.num_workers * self.replica_size,
            self.rank_names,
            self.timeout_s,
            monitor=self.job is not None,
            replica_size=self.replica_size,
        )
        self.watchdog.start()

    @property
    def _rank(self) -> int:
        return self.worker * self.replica_size + self.place

    @property
    def rank_names(self) -> Sequence[str]:
        """Names of all ranks, for messages."""
        if self.replica_size == 1:
            return self.names
        return rank_names(self.num_workers, self.replica_size)

    def _start(self, store: TimeoutStore) -> None:
        rendezvous = Rendezvous(
            store.with_prefix("lightning_loco/rendezvous"),
            self._rank,
            self.rank_names,
            self.timeout_s,
        )
        # PyTorch names groups by counting them. An error between two groups of an earlier attempt
        # leaves the workers with different counts, and groups of different names never connect.
        world = dist.distributed_c10d._world
        world.group_count = max(map(int, rendezvous.all_gather(str(world.group_count))))
        try:
            self.control = self._new_column_group("gloo")
            self.inner = self.new_inner_group("gloo")
        except RuntimeError as error:
            raise WorkerFailure(rendezvous.explain()) from error
        store = store.with_prefix(f"lightning_loco/{rendezvous.attempt}")
        self._watch(store)
        if self.control is not None:
            barrier = "store_barrier" if self.place == 0 else f"store_barrier/{self.place}"
            self.store_barrier = StoreBarrier(
                store.with_prefix(barrier), self.worker, self.num_workers, self.clock
            )

    def connect(self, device: torch.device = CPU, backend: str | None = None) -> None:
        """Do the second half of :meth:`create`, once the device of the parameters is known.

        With a job, connect its ranks by gloo; ``device`` and ``backend`` are not used.

        Raises:
            RuntimeError: If a worker is missing or has failed; the message names it.
        """
        if self.job is not None:
            self._connect_job(self.job)
            return
        if self.control is None and self.inner is None:
            return
        # This call also reports errors of other workers since `start`; `new_group` would not.
        check_same_kind(self.rank_names, self.gather_from_ranks(device.type, _SETUP_LABEL))
        if backend is None and device.type == "cpu":
            backend = "gloo"
        self.wait_blocks_host = backend_on(device, backend) == "gloo"
        with ExplainErrors(self, _SETUP_LABEL):
            self.data = self._new_column_group(backend)
            if (inner := self.new_inner_group(backend)) is not None:
                self.inside[tuple(range(self.replica_size))] = inner

    def _connect_job(self, job: Job) -> None:
        self.raise_together(None, _SETUP_LABEL)  # names missing ranks, unlike gloo
        store = PrefixStore(f"{self._keys}/gloo", job.raw_store)
        timeout = timedelta(seconds=self.timeout_s)

        def connect() -> Any:
            reach("connecting the ranks")
            return dist.ProcessGroupGloo(store, self.worker, self.num_workers, timeout)

        with ExplainErrors(self, _SETUP_LABEL):
            self.data = with_timeout(connect, self.timeout_s + 1)

    def _new_column_group(self, backend: str | None) -> dist.ProcessGroup | None:
        """Make the groups of all columns, and return this column's; None for one worker."""
        if self.num_workers == 1:
            return None
        num_ranks, step = self.num_workers * self.replica_size, self.replica_size
        return self._new_groups([range(place, num_ranks, step) for place in range(step)], backend)

    def new_inner_group(
        self, backend: str | None, timeout_s: float | None = None
    ) -> dist.ProcessGroup | None:
        """Make the groups of all workers, and return this worker's; None for one rank.

        All ranks must call it, and the caller destroys the group. ``timeout_s`` is its longest
        wait, by default this group's.
        """
        size = self.replica_size
        if size == 1:
            return None
        starts = range(0, self.num_workers * size, size)
        groups = [range(start, start + size) for start in starts]
        return self._new_groups(groups, backend, timeout_s)

    @property
    def whole_inside(self) -> dist.ProcessGroup | None:
        """Process group of all ranks of this worker, for tensors; None for a worker of one rank."""
        return self.inside.get(tuple(range(self.replica_size)))

    def connect_inside(self, places: Sequence[tuple[int, ...]], label: str) -> None:
        """Make groups of some of the ranks of each worker, for tensors: entries of ``inside``.

        All ranks must call it.

        Args:
            places: Of the ranks of each group, this rank among them.
            label: The purpose, in words, for errors.

        Raises:
            RuntimeError: If a rank is missing or has failed; the message names it.
        """
        wanted = self.gather_inside([list(each) for each in places], label)
        starts = range(0, self.num_workers * self.replica_size, self.replica_size)
        started, everyone = self.clock.now(), tuple(range(self.replica_size))
        self._connected_inside.add(everyone)
        for each in sorted({tuple(each) for of_place in wanted for each in of_place}):
            if each not in self._connected_inside:
                self._connected_inside.add(each)
                ranks = [[start + place for place in each] for start in starts]
                with ExplainErrors(self, label, started):
                    made = self._new_groups(ranks, dist.get_backend(self.whole_inside))
                if made is not None:
                    self.inside[each] = made

    def _new_groups(
        self,
        groups: Sequence[Sequence[int]],
        backend: str | None,
        timeout_s: float | None = None,
    ) -> dist.ProcessGroup | None:
        """Make groups of ranks, none in two of them, and return the one of this rank, if any."""
        wait_blocks_host = backend == "gloo" or self.wait_blocks_host
        margin_s = 0.0 if wait_blocks_host else _BACKEND_TIMEOUT_MARGIN_S
        timeout, own = timedelta(seconds=(timeout_s or self.timeout_s) + margin_s), None

        def connect(ranks: Sequence[int]) -> dist.ProcessGroup:
            made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            return made

        for ranks in groups:
            if wait_blocks_host:
                made = with_timeout(functools.partial(connect, ranks), self.timeout_s + 1)
            else:
                made = connect(ranks)
            if self._rank in ranks:
                own = made
        return own

    def own_store(self, name: str) -> TimeoutStore:
        """Return the job's key-value store with a prefix of this group and this name.

        Raises:
            RuntimeError: If there is only one worker, or the group is closed.
        """
        if self.store is None:
            raise RuntimeError(
                "There is no key-value store: this is the only worker, or the group is closed."
            )
        return self.store.with_prefix(name)

    def announce_wait(self, label: str) -> None:
        """Publish that this worker is about to wait for the others.

        Args:
            label: The wait, in words: ``"round 12"``.
        """
        if self.watchdog is not None:
            self.watchdog.label = label
            self.watchdog.num_exchanges += 1

    def explain_error(
        self, error: RuntimeError, label: str, started: float, *, involves_all: bool = True
    ) -> RuntimeError:
        """Replace an error of a backend by one that names the worker that caused it.

        To find that worker, heartbeats are watched for up to 2.5 s. From now on the group counts as
        failed, so that closing it aborts its collectives. An error that names a worker already, or
        that a signal handler has raised during the wait, is returned unchanged.

        Args:
            error: The error of the backend.
            label: The wait, in words.
            started: When the wait started, by the group's clock.
            involves_all: Whether all workers take part in the wait. If not, those that are alive
                may rightly be elsewhere: the error is returned unchanged unless a worker has failed
                or gives no sign of life.
        """
        self.failed = True
        watchdog = self.watchdog
        if watchdog is None or isinstance(error, WorkerFailure) or is_of_a_signal(error):
            return error
        if not involves_all and not watchdog.silent() and watchdog.failure is None:
            return error
        return watchdog.blame(label, self.clock.now() - started)

    def raise_if_failed(self) -> None:
        """Raise WorkerFailure if another worker has reported an error, or the store is silent."""
        if self.watchdog is not None:
            self.watchdog.raise_if_failed()

    def agree(self, numbers: Sequence[float], label: str = "an agreement") -> list[list[float]]:
        """Collect numbers from the ranks of this worker, in order of the places.

        Decisions of a worker must not differ between its ranks, so they decide from all numbers.
        All ranks of the worker must call it. A worker of one rank gets its own numbers.

        Raises:
            RuntimeError: If a rank is missing or has failed; the message names it.
        """
        if self.inner is None:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        rows = [torch.empty_like(own) for _ in range(self.replica_size)]
        with ExplainErrors(self, label):
            dist.all_gather(rows, own, group=self.inner)
        return [row.tolist() for row in rows]

    def gather_objects(self, value: Any, label: str = "an agreement") -> list[Any]:
        """Collect a small value from every worker, in order.

        Args:
            value: Made of text, numbers, None, lists and dictionaries; tuples arrive as lists.
            label: Purpose of the exchange, in words, for errors.

        Raises:
            RuntimeError: If a worker is missing or has failed; the message names it.
        """
        if self.control is None and self.job is None:
            return [value]
        messages = self._all_gather(json_messages.write(value), label)
        pairs = zip(messages, self.names, strict=True)
        return [json_messages.read(message, capitalized(name)) for message, name in pairs]

    def gather_inside(self, value: Any, label: str = "an agreement") -> list[Any]:
        """Collect a small value, as :meth:`gather_objects`, from every rank of this worker."""
        if self.inner is None:
            return [value]
        messages = self._all_gather_inside(self.inner, json_messages.write(value), label)
        return [json_messages.read(*pair) for pair in zip(messages, self._place_names, strict=True)]

    def gather_states_inside(self, state: Any, label: str) -> list[Any]:
        """Collect plain values and tensors from every rank of this worker, in order.

        Raises:
            RuntimeError: If a rank is missing, has failed or has sent other objects; the message
                names it.
        """
        if self.inner is None:
            return [state]
        messages = self._all_gather_inside(self.inner, json_messages.write_state(state), label)
        found = []
        for message, name in zip(messages, self._place_names, strict=True):
            try:
                found.append(json_messages.read_state(message))
            except Exception as error:  # of torch.load, of several types
                raise RuntimeError(
                    f"{name} of worker {self.worker}, in {label}: {error}"
                ) from error
        return found

    @property
    def _place_names(self) -> list[str]:
        return [f"Place {place}" for place in range(self.replica_size)]

    def _all_gather_inside(
        self, inner: dist.ProcessGroup, message: bytes, label: str
    ) -> list[bytes]:
        with ExplainErrors(self, label):
            return json_messages.all_gather(message, inner, self._place_names)

    def gather_from_ranks(self, value: Any, label: str = "an agreement") -> list[Any]:
        """Collect a small value, as :meth:`gather_objects`, from every rank of all workers."""
        if self.inner is None:
            return self.gather_objects(value, label)
        workers = self.gather_objects(self.gather_inside(value, label), label)
        for name, places in zip(self.names, workers, strict=True):
            if not isinstance(places, list) or len(places) != self.replica_size:
                raise RuntimeError(
                    f"{capitalized(name)} has sent {str(places)[:200]!r} in {label}."
                )
        return [value for places in workers for value in places]

    def gather_states(self, state: Any, label: str) -> list[Any]:
        """Collect plain values and tensors from every worker, in order."""
        if self.control is None and self.job is None:
            return [state]
        messages = self._all_gather(json_messages.write_state(state), label)
        return [json_messages.read_state(message) for message in messages]

    def wait_for_all(self, label: str) -> None:
        """Wait without a timeout for all ranks of a job, unless one fails or gives no sign of life.

        Args:
            label: The purpose, in words, for errors.

        Raises:
            RuntimeError: If a rank has failed or gives no sign of life; the message names it.
        """
        assert self.job is not None
        self._all_gather(b"", label, waits_indefinitely=True)

    def end_together(self, label: str) -> None:
        """Wait for all ranks before this one ends, as long as all others give signs of life.

        A rank that ends alone would leave the loss of another one unseen. One that is asked to stop
        while it waits, by a signal, ends at once.

        Args:
            label: What ends here, in words, for errors; used once.

        Raises:
            RuntimeError: If a rank has failed or gives no sign of life; the message names it.
        """
        watchdog, store, clock = self.watchdog, self.store, self.clock
        if watchdog is None or store is None:
            return
        self.announce_wait(label)
        started, num_ranks = clock.now(), self.num_workers * self.replica_size
        asked_before = watchdog.stop_reason

        def set_and_wait(keys: TimeoutStore, waits: bool) -> None:
            keys.set(str(self._rank), "", self.timeout_s)
            pause_s = SHORTEST_POLL_INTERVAL_S
            while waits and not keys.check(list(map(str, range(num_ranks))), self.timeout_s):
                watchdog.raise_if_failed()
                if watchdog.stop_reason != asked_before:
                    return
                if watchdog.lost(self.timeout_s):
                    raise watchdog.blame(label, clock.now() - started)
                clock.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

        with ExplainErrors(self, label, started):
            set_and_wait(store.with_prefix(f"end/{label}"), True)
            # The store may end with rank 0, so that one waits until all others have seen all keys.
            set_and_wait(store.with_prefix(f"end_seen/{label}"), self._rank == 0)

    def _all_gather(
        self, message: bytes, label: str, *, waits_indefinitely: bool = False
    ) -> list[bytes]:
        self.announce_wait(label)
        with ExplainErrors(self, label):
            if self.job is not None:
                is_limited = not (waits_indefinitely or self.waits_indefinitely)
                limit_s = self.timeout_s if is_limited else math.inf
                return self._gather_in_store(self.job, message, label, limit_s)
            assert self.control is not None
            return json_messages.all_gather(
                message, self.control, list(map(capitalized, self.names))
            )

    def _gather_in_store(self, job: Job, message: bytes, label: str, limit_s: float) -> list[bytes]:
        watchdog = self.watchdog
        assert watchdog is not None

        def check(waited_s: float) -> None:
            watchdog.raise_if_failed()
            job.raise_if_refused()
            if waited_s > limit_s or watchdog.lost(self.timeout_s):
                raise watchdog.blame(label, waited_s)

        return job.gather(job.next_keys(f"{self._keys}/agreement"), message, check)

    def raise_together(self, error: Exception | None, label: str = "an agreement") -> None:
        """Raise an error on all ranks if any rank has one; all must call it.

        A rank with an ``error`` raises that. The others raise one with the type and text of the
        first error, which names its rank, so that none waits for a rank that has failed.
        """
        if isinstance(error, WorkerFailure):
            raise error
        try:
            values = self.gather_from_ranks(json_messages.write_error(error), label)
        except RuntimeError as missing:
            raise (error or missing) from missing
        if error is not None:
            raise error
        for name, value in zip(self.rank_names, values, strict=True):
            if (other := json_messages.read_error(value, capitalized(name))) is not None:
                raise other

    @contextmanager
    def errors_shared(self, label: str = "an agreement") -> Iterator[None]:
        """Raise on all workers the error that any worker raises inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.raise_together(error, label)

    def report_error(self, error: BaseException, hint: str = "") -> None:
        """Report to the other workers the error with which this worker ends.

        An error of a collective names no rank. It is logged and reported with the names of those
        that give no sign of life, which takes up to 2.5 s.

        Args:
            error: The error.
            hint: What to do about it.
        """
        self.failed = True
        if self.watchdog is None:
            return
        text = "".join(traceback.format_exception(error)) + hint
        silent = self.watchdog.silent() if is_of_collective(error) else []
        if self.watchdog.failure is not None and is_of_collective(error):
            log.error(self.watchdog.failure)
        if silent:
            text = f"No sign of life from {', '.join(silent)}.\n{text}"
            log.error(text.split("\n")[0])
        self.watchdog.report(text)

    def close(self, error: BaseException | None = None) -> None:
        """Stop the watchdog and destroy the groups; a second call does nothing.

        Destroying a group waits for its pending collectives. After a failure this may last until
        the backend's timeout, so the groups are aborted instead.

        Args:
            error: The error with which this worker ends; it is reported to the others.
        """
        if error is not None:
            self.report_error(error)
        if self.store is not None and self.job is None:
            self.store.close()
        if self.watchdog is not None:
            self.failed = self.failed or self.watchdog.failure is not None
            self.watchdog.end()
            self.watchdog = None
        # PyTorch does not know the group of a job, which ends with the last reference to it.
        is_known = self.job is None and dist.is_initialized()
        groups = [
            group
            for group in (self.data, self.control, self.inner, *self.inside.values())
            if group is not None and is_known
        ]
        self.inside.clear()
        self.data = self.control = self.inner = self.store_barrier = self.store = None
        if self.failed:
            abort_groups(groups)
        else:
            list(map(dist.destroy_process_group, groups))


class ExplainErrors:
    """A context that turns a RuntimeError of a backend into one that names the failed worker.

    ``label`` names the wait, e.g. ``"round 12"``. The wait ``started`` by the group's
    clock, by default when the context is entered. For ``involves_all`` see
    :meth:`WorkerGroup.explain_error`.
    """

    def __init__(
        self,
        group: WorkerGroup,
        label: str,
        started: float | None = None,
        *,
        involves_all: bool = True,
    ) -> None:
        self._group = group
        self._label = label
        self._started = started
        self._involves_all = involves_all

    def __enter__(self) -> None:
        if self._started is None:
            self._started = self._group.clock.now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and self._started is not None:
            explained = self._group.explain_error(
                error, self._label, self._started, involves_all=self._involves_all
            )
            if explained is not error:
                raise explained from error


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Set the longest wait in the collectives of a group that PyTorch has made.

    NCCL would end the process then, so that it gets more time than other waits.
    """
    margin_s = _BACKEND_TIMEOUT_MARGIN_S if _is_nccl(group) else 0.0
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s + margin_s), group)


def is_of_collective(error: BaseException) -> bool:
    """Whether a backend has raised it, as far as its type and text say."""
    texts = ("gloo/", "caused pair closure")
    is_gloos = type(error) is RuntimeError and any(text in str(error) for text in texts)
    return is_gloos or isinstance(error, dist.DistError)


def is_of_a_signal(error: RuntimeError) -> bool:
    """Whether a signal handler of PyTorch has raised it: a process of a DataLoader was killed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == _signal_handling.__name__


def abort_groups(groups: list[dist.ProcessGroup]) -> None:
    """Abort process groups and clear the list; waits at most 2 s for pending collectives.

    gloo groups cannot be aborted: deleting the last reference waits for pending collectives, so a
    thread does it. It is not a daemon thread, because Python ends the process by a signal if a
    daemon thread is within a destructor at exit.

    References to NCCL groups are kept forever. Deleting the last one would wait for a thread of
    PyTorch that sleeps for a minute after an error and then ends the process by a signal, or for
    another one that sleeps for eight minutes. The same holds for the default group.
    """
    if any(map(_is_nccl, groups)):
        list(map(_keep_forever, filter(_is_nccl, groups)))
        atexit.register(_abort_default_nccl_group)
    list(map(_abort, groups))  # a local variable would keep a reference to a group
    thread = threading.Thread(target=groups.clear, name="loco-abandoned")
    thread.start()
    thread.join(_ABORT_TIMEOUT_S)


def _abort_default_nccl_group() -> None:
    if dist.is_initialized() and _is_nccl(dist.group.WORLD):
        _keep_forever(dist.group.WORLD)
        _abort()


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    return "nccl" in dist.get_backend_config(group)


def _keep_forever(value: object) -> None:
    """Leak a reference; one in a list of the module would be deleted when Python ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
