"""Who takes part: process groups of its own for every engine, made in one order on all workers."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data._utils import signal_handling as _signal_handling

from lightning_loco.clock import REAL_CLOCK, Clock
from lightning_loco.distributed import notes
from lightning_loco.distributed.devices import CPU, backend_on, check_same_kind
from lightning_loco.distributed.rendezvous import Rendezvous
from lightning_loco.distributed.store import TimeoutStore, connect_to_default_store, with_timeout
from lightning_loco.distributed.store_barrier import StoreBarrier
from lightning_loco.distributed.watchdog import Watchdog, WorkerFailure

_PARTING_S = 2.0
_SET_UP = "the set-up of the groups"

_abort: Callable[..., None] = getattr(
    dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group
)

MARGIN_S = 60.0
"""By how much a backend whose failures end the process has more patience than we, in seconds."""


def _is_of_a_signal(error: RuntimeError) -> bool:
    """Whether it comes from where PyTorch is told that a process of a DataLoader was killed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == _signal_handling.__name__


def _give_groups_the_same_names(arrivals: Rendezvous) -> None:
    """Let the next process group have the same name on all workers.

    PyTorch names groups by counting them. An error between two groups of an earlier attempt leaves
    the workers with different counts, and groups of different names never meet.
    """
    world = dist.distributed_c10d._world
    world.group_count = max(int(count) for count in arrivals.exchange(str(world.group_count)))


@dataclasses.dataclass
class WorkerGroup:
    """This worker's place among all workers, and the process groups that connect them.

    Attributes:
        worker: Number of this worker, 0 to N - 1.
        num_workers: Number of workers N.
        data: Group for messages (NCCL on GPUs, gloo on CPUs); None for a single worker.
        control: gloo group for the few numbers that accompany a round; None for a single worker.
        watchdog: Tells of failed workers; None for a single worker.
        store_barrier: Tells who makes a round and who waits; None for a single worker.
        timeout_s: Longest wait for another worker, in seconds.
        store: The job's key-value store, with keys of this group's own; None for a single worker.
        wait_blocks_host: Whether waiting for a message blocks the host until it is here, as with
            gloo; with NCCL only the device waits, and the host must look whether it has come.
        clock: What exchanges are waited for by; the watchdog has its own.
        failed: Whether an exchange has failed or this worker has, so that nothing that is under way
            will end; set it before :meth:`close`.
    """

    worker: int
    num_workers: int
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    watchdog: Watchdog | None = None
    store_barrier: StoreBarrier | None = None
    timeout_s: float = 600.0
    store: TimeoutStore | None = None
    wait_blocks_host: bool = True
    clock: Clock = REAL_CLOCK
    failed: bool = False

    @classmethod
    def create(
        cls,
        *,
        timeout_s: float = 600.0,
        device: torch.device = CPU,
        backend: str | None = None,
    ) -> WorkerGroup:
        """Make the groups over all ranks of the default process group; call it on every rank.

        Args:
            timeout_s: Longest wait for another worker, in seconds.
            device: Where the parameters live; of the same kind on all workers.
            backend: What carries the messages. Default: gloo on the CPU, and on other devices that
                of the default process group.

        Raises:
            ValueError: If ``timeout_s`` is not positive, or, on all workers, if they are on
                different kinds of devices.
            RuntimeError: If a worker does not come; its message says which.
        """
        group = cls.begin(timeout_s=timeout_s)
        try:
            group.connect(device, backend)
        except BaseException as error:
            group.close(error)
            raise
        return group

    @classmethod
    def begin(cls, *, timeout_s: float = 600.0) -> WorkerGroup:
        """The first half of :meth:`create`: from now on all workers watch over each other."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is in seconds and must be positive, got {timeout_s}.")
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(worker=0, num_workers=1)
        worker, num_workers = dist.get_rank(), dist.get_world_size()
        group = cls(worker, num_workers, timeout_s=timeout_s)
        store = connect_to_default_store(timeout_s)
        try:
            group._begin(store)
        except BaseException:
            store.close()
            group.close()
            raise
        return group

    def _begin(self, store: TimeoutStore) -> None:
        names = [f"worker {worker}" for worker in range(self.num_workers)]
        came = store.with_prefix("lightning_loco/arrivals")
        arrivals = Rendezvous(came, self.worker, names, self.timeout_s)
        _give_groups_the_same_names(arrivals)
        try:
            self.control = self._connected_by_gloo()
        except RuntimeError as error:
            raise WorkerFailure(arrivals.explain()) from error
        self.store = store.with_prefix(f"lightning_loco/{arrivals.attempt}")
        dog = self.store.with_prefix("watchdog")
        self.watchdog = Watchdog(dog, self.worker, self.num_workers, timeout_s=self.timeout_s)
        self.watchdog.start()
        self.store_barrier = StoreBarrier(
            self.store.with_prefix("store_barrier"), self.worker, self.num_workers
        )

    def connect(self, device: torch.device = CPU, backend: str | None = None) -> None:
        """The second half of :meth:`create`, once it is known where the parameters live."""
        if self.control is None:
            return
        # It is also where all learn of an error since `begin`: what follows waits without looking.
        check_same_kind(self.gather_objects(device.type, _SET_UP))
        if backend is None and device.type == "cpu":
            backend = "gloo"
        self.wait_blocks_host = backend_on(device, backend) == "gloo"
        began = self.clock.now()
        try:
            if self.wait_blocks_host:
                self.data = self._connected_by_gloo(backend)
            else:
                longest = timedelta(seconds=self.timeout_s + MARGIN_S)
                self.data = dist.new_group(timeout=longest, backend=backend)
        except RuntimeError as error:
            raise self.explained(error, _SET_UP, began) from error

    def _connected_by_gloo(self, backend: str | None = "gloo") -> dist.ProcessGroup:
        timeout = timedelta(seconds=self.timeout_s)
        group: dist.ProcessGroup = with_timeout(
            lambda: dist.new_group(timeout=timeout, backend=backend), self.timeout_s + 1
        )
        return group

    def own_store(self, name: str) -> TimeoutStore:
        """The job's key-value store, with keys of its own for this group and this purpose.

        Raises:
            RuntimeError: If this worker is alone, or the group is closed.
        """
        if self.store is None:
            raise RuntimeError("There is no key-value store: one worker alone, or a closed group.")
        return self.store.with_prefix(name)

    # ----------------------------------------------------------------- waiting

    def announce_wait(self, label: str) -> None:
        """Say that this worker is about to wait for the others, and where, in words."""
        if self.watchdog is not None:
            self.watchdog.label = label
            self.watchdog.meetings += 1

    def explained(self, error: RuntimeError, label: str, began: float) -> RuntimeError:
        """What to raise instead of a backend's error: one that names the worker to blame.

        Args:
            error: Of the backend; or one that names somebody already, or that a signal handler has
                raised during the wait, which stays as it is.
            label: What was being waited for, in words.
            began: Since when, by the group's clock.
        """
        self.failed = True
        if self.watchdog is None or isinstance(error, WorkerFailure) or _is_of_a_signal(error):
            return error
        return self.watchdog.blame(label, self.clock.now() - began)

    def gather_objects(self, value: Any, label: str = "an agreement") -> list[Any]:
        """Collect a small value from every worker, in order.

        Args:
            value: Of text, numbers, None, lists and dictionaries; tuples arrive as lists.
            label: What it is for, in words.

        Raises:
            RuntimeError: If a worker is missing or has failed; the message names it.
        """
        if self.control is None:
            return [value]
        found = self._gather(notes.write(value), label)
        return [notes.read(m, self._name(w)) for w, m in enumerate(found)]

    def gather_states(self, state: Any, label: str) -> list[Any]:
        """Collect plain values and tensors from every worker, in order."""
        if self.control is None:
            return [state]
        found = self._gather(notes.write_state(state), label)
        return [notes.read_state(message) for message in found]

    def _gather(self, message: bytes, label: str) -> list[bytes]:
        assert self.control is not None
        self.announce_wait(label)
        began = self.clock.now()
        names = [self._name(worker) for worker in range(self.num_workers)]
        try:
            return notes.gather(message, self.control, names)
        except RuntimeError as error:
            raise self.explained(error, label, began) from error

    def _name(self, worker: int) -> str:
        return f"Worker {worker}"

    def raise_together(self, error: Exception | None, label: str = "an agreement") -> None:
        """Raise on every worker when any worker has found an error, so that none is left waiting.

        This worker's own ``error``, or else one of the first other one's type and text.
        """
        if isinstance(error, WorkerFailure):
            raise error
        try:
            found = self.gather_objects(notes.write_error(error), label)
        except RuntimeError as missing:
            raise (error or missing) from missing
        if error is not None:
            raise error
        for worker, item in enumerate(found):
            if (other := notes.read_error(item, self._name(worker))) is not None:
                raise other

    @contextmanager
    def errors_shared(self, label: str = "an agreement") -> Iterator[None]:
        """Raise on every worker the error of any worker inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        self.raise_together(error, label)

    def report_error(self, error: BaseException) -> None:
        """Let the others know of an error that this worker ends with."""
        self.failed = True
        if self.watchdog is not None:
            self.watchdog.report("".join(traceback.format_exception(error)))

    def close(self, error: BaseException | None = None) -> None:
        """Stop the watchdog and destroy the groups; a second call does nothing.

        Destroying a group waits for all that is under way in it. After a failure that may take
        until the backend's own timeout, so the groups are aborted and left to end by themselves.

        Args:
            error: What this worker ends with, for the others to know.
        """
        if error is not None:
            self.report_error(error)
        if self.store is not None:
            self.store.close()
        if self.watchdog is not None:
            self.failed = self.failed or self.watchdog.failure is not None
            self.watchdog.end()
            self.watchdog = None
        groups = [g for g in (self.data, self.control) if g is not None and dist.is_initialized()]
        self.data = self.control = self.store_barrier = self.store = None
        if self.failed:
            abandon(groups)
        else:
            list(map(dist.destroy_process_group, groups))


def abandon(groups: list[dist.ProcessGroup]) -> None:
    """Abort the groups and empty the list, hardly waiting for what is under way.

    gloo cannot be aborted: the last reference to its group waits, so it goes in a thread. That is
    no daemon: one that Python cuts off within a destructor ends the process by a signal.

    NCCL's last reference waits for a watchdog of PyTorch's that sleeps for a minute after an error
    and then ends the process by a signal, or for another that sleeps for eight. So it never goes,
    and that of the default group does not either.
    """
    if any(map(_is_nccl, groups)):
        list(map(_keep_for_ever, filter(_is_nccl, groups)))
        atexit.register(_abandon_nccl_at_the_end)
    list(map(_abort, groups))  # no name here may hold a group
    thread = threading.Thread(target=groups.clear, name="loco-abandoned")
    thread.start()
    thread.join(_PARTING_S)


def abandon_default_group() -> None:
    """Destroy the default group, from which a rank has gone; NCCL's is aborted and kept."""
    if _is_nccl(dist.group.WORLD):
        _keep_for_ever(dist.group.WORLD)
        _abort()
    else:
        dist.destroy_process_group()


def _abandon_nccl_at_the_end() -> None:
    if dist.is_initialized() and _is_nccl(dist.group.WORLD):
        abandon_default_group()


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    return "nccl" in dist.get_backend_config(group)


def _keep_for_ever(thing: object) -> None:
    """Never let the last reference go; a list would be emptied when Python ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
