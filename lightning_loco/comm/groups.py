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
from lightning_loco.comm.watchdog import Watchdog


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
    """

    worker: int
    num_workers: int
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    watchdog: Watchdog | None = None
    board: Board | None = None
    timeout_s: float = 600.0
    _run: str = ""

    @classmethod
    def create(cls, *, timeout_s: float = 600.0, device: torch.device | None = None) -> WorkerGroup:
        """Make the groups over all ranks of the default process group; call it on every rank.

        Args:
            timeout_s: Longest wait for another worker, in seconds.
            device: Where the parameters live; decides the backend. Default: CPU.

        Raises:
            ValueError: If ``timeout_s`` is not positive.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is in seconds and must be positive, got {timeout_s}.")
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(worker=0, num_workers=1)
        timeout = timedelta(seconds=timeout_s)
        on_cpu = device is None or device.type == "cpu"
        data = dist.new_group(timeout=timeout, backend="gloo" if on_cpu else None)
        control = dist.new_group(timeout=timeout, backend="gloo")
        worker, num_workers = dist.get_rank(), dist.get_world_size()
        group = cls(worker, num_workers, data, control, timeout_s=timeout_s)
        run = group.gather_objects(secrets.token_hex(4))[0]
        group._run = run
        group.watchdog = Watchdog(group.own_store("watchdog"), worker, num_workers)
        group.watchdog.start()
        group.board = Board(group.own_store("board"), worker, num_workers)
        return group

    def own_store(self, name: str) -> Store:
        """A connection to the job's key-value store for one thread, with keys of its own."""
        store = dist.distributed_c10d._get_default_store()
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
        """Stop the watchdog and destroy the groups; a second call does nothing."""
        if self.watchdog is not None:
            self.watchdog.end()
            self.watchdog = None
        for group in (self.data, self.control):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self.data = self.control = self.board = None
