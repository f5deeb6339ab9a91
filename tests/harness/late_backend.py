"""A backend with the host semantics of NCCL for CPU tensors.

Work is enqueued and executed later, as on the stream of a GPU: ``wait()`` returns at once and
never raises, received values arrive later, ``is_completed()`` reports completion, and sent
tensors are also read later. If a worker is missing, work never completes. Destroying the group
waits for all pending work; aborting it does not.

gloo transports the data, in separate threads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.devices import CPU

NAME = "late"
DELAY_S = 0.01


class LateWork(dist.Work):
    """One pending operation."""

    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class LateGroup(dist.ProcessGroup):
    """A process group of the backend; see the module docstring.

    Attributes:
        was_aborted: Whether it has been aborted.
        timeout: Timeout of the group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.was_aborted = False
        self.timeout = timeout
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._name = ""
        self._works: list[LateWork] = []
        self._waiters: list[threading.Thread] = []
        self._operations: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stream = threading.Thread(target=self._run, name="late-stream", daemon=True)
        self._stream.start()

    # -------------------------------------------------- methods called by torch.distributed

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    group_name = property(getGroupName)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> LateWork:
        return self._enqueue(
            tensors, lambda copy: self._gloo.allreduce([copy], dist.AllreduceOptions())
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None
    ) -> LateWork:
        rows, (own,) = outputs[0], inputs
        return self._enqueue(
            [*rows, own],
            lambda *copies: self._gloo.allgather([list(copies[:-1])], [copies[-1]]),
            len(rows),
        )

    def broadcast(self, tensors: list[Tensor], options: Any) -> LateWork:
        return self._enqueue(tensors, lambda copy: self._gloo.broadcast([copy], options))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> LateWork:
        return self._enqueue(tensors, lambda copy: self._gloo.send([copy], peer, tag), 0)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> LateWork:
        return self._enqueue(tensors, lambda copy: self._gloo.recv([copy], peer, tag))

    def shutdown(self) -> None:
        """Wait for all pending work, without a limit."""
        if self._stream.is_alive():
            self.synchronize()
            self._operations.put(None)
            for thread in (self._stream, *self._waiters):
                thread.join()

    def abort(self) -> None:
        """Return at once; pending work ends when a connection is closed."""
        self.was_aborted = True
        self._operations.put(None)
        self._stream.join()
        self._gloo.abort()

    # ------------------------------------------------------------------------- the stream

    def synchronize(self) -> None:
        """Wait for all pending work, like ``torch.cuda.synchronize``."""
        for work in self._works:
            work.done.wait()

    def _enqueue(
        self, tensors: list[Tensor], begin: Callable[..., dist.Work], received: int = 1
    ) -> LateWork:
        """Start an operation after a delay, in order; ``begin`` gets copies made at that time.

        The first ``received`` tensors are written when all messages have arrived.
        """
        work, due = LateWork(), time.monotonic() + DELAY_S
        self._works = [*(w for w in self._works if not w.is_completed()), work]

        def operation() -> None:
            time.sleep(max(0.0, due - time.monotonic()))
            copies = [tensor.detach().clone() for tensor in tensors]
            inner = begin(*copies)

            def finish_operation() -> None:
                try:
                    inner.wait()
                except RuntimeError:
                    return  # as with NCCL, the work never completes
                for tensor, copy in zip(tensors[:received], copies, strict=False):
                    tensor.detach().copy_(copy)
                work.done.set()

            self._waiters = [w for w in self._waiters if w.is_alive()]
            self._waiters.append(
                threading.Thread(target=finish_operation, name="late-work", daemon=True)
            )
            self._waiters[-1].start()

        self._operations.put(operation)
        return work

    def _run(self) -> None:
        while (operation := self._operations.get()) is not None:
            try:
                operation()
            except RuntimeError:
                return  # a connection is closed: later work never completes


def register() -> None:
    """Register the backend with ``torch.distributed``, once in a process."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, LateGroup, devices=["cpu"])


def late_group(timeout_s: float = 20.0) -> WorkerGroup:
    """Return the workers of the default process group, with messages that arrive late."""
    register()
    return WorkerGroup.create(timeout_s=timeout_s, backend=NAME)


@contextmanager
def late_messages() -> Iterator[None]:
    """Let this backend transport the messages of a Trainer's workers, instead of gloo.

    It is used where a GPU would use NCCL: when the workers' groups are connected.
    """
    register()
    connect = WorkerGroup.connect

    def connect_late(
        group: WorkerGroup, device: torch.device = CPU, backend: str | None = None
    ) -> None:
        connect(group, device, backend or NAME)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "connect", connect_late)
        yield
