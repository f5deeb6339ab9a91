"""What the training loop and a library's adapter know of each other."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

TIMEOUT_S = 300.0
"""Longest wait of a library for its other workers, where it takes one."""


@dataclass(frozen=True)
class Job:
    """One worker's part in one run.

    Attributes:
        entry: Key of the library in the table.
        rank: Number of this worker.
        num_workers: Number of workers.
        host: Under which the others reach this worker.
        interface: Of the network between them.
        shares_interface: Whether what all workers send passes this one interface.
        size: Arguments of ByteGPT.
        rounds: That are counted; one more comes before them.
        sync_every: Local steps of a round.
        batch_size: Windows of a local step.
        seed: Of the model and of the order of the data.
        outer_lr: DiLoCo's.
        outer_momentum: DiLoCo's, Nesterov's.
        folder: For files of this run.
        dpwa: A checkout of dpwa, or None.
    """

    entry: str
    rank: int
    num_workers: int
    host: str
    interface: str
    shares_interface: bool
    size: dict[str, int]
    rounds: int
    sync_every: int
    batch_size: int
    seed: int
    outer_lr: float
    outer_momentum: float
    folder: str
    dpwa: str | None


class Line:
    """A worker's line to the process that started it; it uses no network.

    Args:
        connection: To that process.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def gather(self, value: Any = None) -> list[Any]:
        """The values of all workers, by rank; all come out at the same time."""
        self._connection.send(("gather", value))
        return self._connection.recv()

    def report(self, result: Any) -> None:
        """Hand in the result."""
        self._connection.send(("result", result))


class Library(Protocol):
    """One library in one worker, from its set-up to the end of its training.

    An adapter is made as ``Adapter(job, line, model, optimizer)``, with a model and an AdamW that
    are equal on all workers. It has to use this optimizer for the local steps, because the loop
    takes the time with a hook of it.

    Attributes:
        module: What the loop calls to compute the logits: the model, or a wrapper of it.
        extra_steps: Local steps by which this library's first phase is longer than the others.
        every_step: Whether it communicates in every backward pass instead of in rounds.
    """

    module: nn.Module
    extra_steps: int
    every_step: bool

    def step(self, loss: float) -> None:
        """Take the local step with the present gradients, and run the round if one is due."""

    def close(self) -> None:
        """End what would keep the process from ending."""


class InRounds:
    """What most adapters have in common: rounds of the usual length on the bare model."""

    extra_steps = 0
    every_step = False

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def close(self) -> None:
        """Nothing: the process ends."""


def free_port(host: str) -> int:
    """A free TCP port of this worker."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def join_process_group(job: Job, line: Line) -> None:
    """Make the default process group (gloo) of all workers."""
    served = None
    if job.rank == 0:
        served = dist.TCPStore(job.host, 0, is_master=True, wait_for_workers=False)
    host, port = line.gather((job.host, served.port) if served is not None else None)[0]
    store = served or dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=job.rank,
        world_size=job.num_workers,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
