"""Jobs whose worker 0 hosts the key-value store, like users' jobs and unlike those of the pool.

Example:
    def wait_for_ever(rank, world):
        if rank == 0:
            freeze()
        dist.barrier()

    with Job(wait_for_ever, world=3) as job:
        outcomes = job.outcomes([1, 2], limit_s=20)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import Self

from tests.harness.guards import check_may_start_processes
from tests.harness.pool import PRELOADED
from tests.harness.programs import free_ports

_processes = multiprocessing.get_context("forkserver")


class Outcome(NamedTuple):
    """The outcome of a worker.

    Attributes:
        result: Return value of its function; None if it has raised an error.
        error: Traceback of its error; None if it has returned.
        ended_at: Time when its process ended, by ``time.time()``.
    """

    result: Any
    error: str | None
    ended_at: float


class Start:
    """Processes that each call ``fn(rank, world, *args)``.

    Args:
        fn: A module-level function.
        *args: Further arguments.
        world: Number of processes.
    """

    def __init__(self, fn: Callable[..., Any], *args: Any, world: int) -> None:
        check_may_start_processes()
        _processes.set_forkserver_preload(PRELOADED)
        self.workers = []
        for rank in range(world):
            ours, theirs = _processes.Pipe()
            target = (theirs, rank, world, fn, args)
            process = _processes.Process(target=_run, args=target, name=f"job-rank{rank}")
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _connection in self.workers:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for process, connection in self.workers:
            process.join()
            connection.close()

    def outcomes(self, ranks: Sequence[int], limit_s: float) -> list[Outcome]:
        """Return the outcomes of these workers; raise AssertionError if one is still running."""
        deadline = time.monotonic() + limit_s
        outcomes = []
        for rank in ranks:
            process, connection = self.workers[rank]
            there = connection.poll(max(0.0, deadline - time.monotonic()))
            assert there, f"rank {rank} is still busy after {limit_s:g} s"
            try:
                result, error = connection.recv()
            except EOFError:
                result, error = None, "(the process has died)"
            process.join(max(0.1, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} has not ended: {error or result}"
            outcomes.append(Outcome(result, error, time.time()))
        return outcomes


class Job(Start):
    """Processes that each call ``fn(rank, world, *args)`` in a default process group of gloo.

    Args:
        fn: A module-level function.
        *args: Further arguments.
        world: Number of processes.
        group_timeout_s: Timeout of the default process group.
    """

    def __init__(
        self, fn: Callable[..., Any], *args: Any, world: int, group_timeout_s: float = 60.0
    ) -> None:
        (port,) = free_ports()
        super().__init__(_in_group, port, group_timeout_s, fn, args, world=world)


def _in_group(
    rank: int,
    world: int,
    port: int,
    group_timeout_s: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=group_timeout_s),
    )
    return fn(rank, world, *args)


def _run(
    connection: Connection, rank: int, world: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = fn(rank, world, *args), None
    except BaseException as error:
        answer = None, "".join(traceback.format_exception(error))
    connection.send(answer)
