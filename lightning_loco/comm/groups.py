"""Who takes part: process groups of its own for every engine, made in one order on all workers."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lightning_loco.comm.board import Board
from lightning_loco.comm.devices import CPU, backend_on, check_same_kind, tell_kind
from lightning_loco.comm.watchdog import Watchdog

MARGIN_S = 60.0
"""By how much a backend whose failures end the process has more patience than we, in seconds."""


@dataclasses.dataclass
class WorkerGroup:
    """This worker's place among all workers, and the process groups that connect them.

    Attributes:
        worker: Number of this worker, 0 to N - 1.
        num_workers: Number of workers N.
        data: Group for messages (NCCL on GPUs, gloo on CPUs); None for a single worker.
        control: gloo group for the few numbers that accompany a round; None for a single worker.
        watchdog: Tells of failed workers; None for a single worker.
        board: Tells who makes a round and who waits; None for a single worker.
        timeout_s: Longest wait for another worker, in seconds.
        host_waits: Whether waiting for a message blocks the host until it is here, as with gloo;
            with NCCL only the device waits, and the host must look whether it has come.
        failed: Whether an exchange has failed or this worker has, so that nothing that is under way
            will end; set it before :meth:`close`.
    """

    worker: int
    num_workers: int
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    watchdog: Watchdog | None = None
    board: Board | None = None
    timeout_s: float = 600.0
    host_waits: bool = True
    failed: bool = False
    _run: str = ""

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
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is in seconds and must be positive, got {timeout_s}.")
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(worker=0, num_workers=1)
        control = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")
        worker, num_workers = dist.get_rank(), dist.get_world_size()
        group = cls(worker, num_workers, None, control, timeout_s=timeout_s)
        runs, kinds = zip(*group.gather_objects((secrets.token_hex(4), device.type)), strict=True)
        try:
            check_same_kind(kinds)
        except ValueError:
            group.close()
            raise
        if backend is None and device.type == "cpu":
            backend = "gloo"
        group.host_waits = backend_on(device, backend) == "gloo"
        longest_s = timeout_s if group.host_waits else timeout_s + MARGIN_S
        group.data = dist.new_group(timeout=timedelta(seconds=longest_s), backend=backend)
        group._run = runs[0]
        group.watchdog = Watchdog(group.own_store("watchdog"), worker, num_workers)
        group.watchdog.start()
        group.board = Board(group.own_store("board"), worker, num_workers)
        return group

    @staticmethod
    def check_device(device: torch.device, timeout_s: float) -> None:
        """Refuse workers on different kinds of devices, before a process group waits for them.

        All ranks of the default process group must call it, equally often.

        Args:
            device: Where this rank computes.
            timeout_s: Longest wait for another rank, in seconds.

        Raises:
            ValueError: On all ranks, if some are on a CPU and others on a GPU, say.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            check_same_kind(tell_kind(device, _job_store(), timeout_s))

    def own_store(self, name: str) -> Store:
        """A connection to the job's key-value store for one thread, with keys of its own."""
        store = _job_store()
        if hasattr(store, "clone"):
            store = store.clone()
        return PrefixStore(f"lightning_loco/{self._run}/{name}", store)

    def gather_objects(self, value: Any) -> list[Any]:
        """Collect one small picklable object from every worker, in order."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.num_workers
        dist.all_gather_object(values, value, group=self.control)
        return values

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every worker when any worker has found an error, so that none is left waiting.

        This worker's own ``error``, or else one of the first other one's type and text.
        """
        found = self.gather_objects(None if error is None else (type(error), str(error)))
        if error is not None:
            raise error
        for worker, item in enumerate(found):
            if item is not None:
                raise item[0](f"Worker {worker}: {item[1]}")

    @contextmanager
    def errors_shared(self) -> Iterator[None]:
        """Raise on every worker the ValueError, TypeError or OSError of any worker inside."""
        error: Exception | None = None
        try:
            yield
        except (ValueError, TypeError, OSError) as found:
            error = found
        self.raise_together(error)

    def close(self) -> None:
        """Stop the watchdog and destroy the groups; a second call does nothing.

        Where the host does not wait, destroying a group does: for all that is under way on the
        device. After a failure that would be for ever, so the group is aborted.
        """
        if self.watchdog is not None:
            self.failed = self.failed or self.watchdog.failure is not None
            self.watchdog.end()
            self.watchdog = None
        for group in (self.data, self.control):
            if group is None or not dist.is_initialized():
                continue
            if self.failed and group is self.data and not self.host_waits:
                _abort(group)
            else:
                dist.destroy_process_group(group)
        self.data = self.control = self.board = None


def _job_store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _abort(group: dist.ProcessGroup) -> None:
    """Destroy a group without waiting for what is under way; versions before 2.6 can only wait."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    abort(group)
