"""Processes that are the ranks of jobs, each of which has a limit in seconds.

Lightning and NCCL take each rank for another machine, so that all of them share the first GPU.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import multiprocessing
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple

import torch
from common import HOST, let_nccl_share_the_gpu

OTHERS_S = 15.0  # for the other ranks, once one has failed
PRELOADED = ["torch.distributed.fsdp", "lightning.pytorch", "lightning_loco.app.demo.model"]


class Rank(NamedTuple):
    """One rank of a job.

    Attributes:
        number: Of this rank in its job.
        num_ranks: Ranks of a job.
        job: Number of the job.
        device: ``"cuda"`` or ``"cpu"``.
        steps: Shared by all processes; each writes how many local steps it has made.
        barrier: Shared by all processes, which come out of it at the same time.
    """

    number: int
    num_ranks: int
    job: int
    device: str
    steps: Any
    barrier: Any

    @property
    def process(self) -> int:
        """Number of this process among the processes of all jobs."""
        return self.job * self.num_ranks + self.number


class RankFailed(Exception):
    """A rank has failed; the message says which and why."""


class Outcome(NamedTuple):
    """How a process has ended: its result or error, and when it was gone."""

    result: Any
    error: str
    ended_at: float


class Processes:
    """Starts processes, and ends those that are still running at a limit.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        deadline: The limit, by ``time.monotonic``.
    """

    def __init__(self, device: str, deadline: float) -> None:
        self.device = device
        self.deadline = deadline

    def results(
        self,
        fn: Callable[[Rank, Any], Any],
        settings: Any,
        num_ranks: int,
        num_jobs: int = 1,
        environ: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """What ``fn(rank, settings)`` returns on all ranks of all jobs; see :meth:`outcomes`.

        Raises:
            RankFailed: If a rank has raised an error, died, or not ended in time.
        """
        outcomes = self.outcomes(fn, settings, num_ranks, num_jobs, environ or {}, OTHERS_S)
        failed = [number for number, outcome in enumerate(outcomes) if outcome.error]
        if failed:
            first = min(failed, key=lambda number: outcomes[number].ended_at)
            print(outcomes[first].error, flush=True)
            ends = [f"rank {n}: {last_line(outcomes[n].error)}" for n in failed]
            raise RankFailed("; ".join(ends))
        return [outcome.result for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[[Rank, Any], Any],
        settings: Any,
        num_ranks: int,
        num_jobs: int,
        environ: Mapping[str, str],
        others_s: float,
        start_method: Literal["forkserver", "spawn"] = "forkserver",
    ) -> list[Outcome]:
        """How all ranks of all jobs end.

        Args:
            fn: A function of a module, called with the rank and ``settings``.
            settings: What else it is called with.
            num_ranks: Ranks of a job.
            num_jobs: Jobs at the same time.
            environ: Variables of the processes.
            others_s: How long the other ranks may run once one has failed, in seconds.
            start_method: How to start processes. Processes of a fork server start at once, and end
                without the handlers that a program has registered with ``atexit``.
        """
        context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        steps = context.Array("q", num_ranks * num_jobs, lock=False)
        barrier = context.Barrier(num_ranks * num_jobs)
        processes, waiting = [], {}
        deadline, answers, ended_at = self.deadline, dict[int, tuple[Any, str]](), {}
        try:
            for job in range(num_jobs):
                port = free_port()
                for number in range(num_ranks):
                    rank = Rank(number, num_ranks, job, self.device, steps, barrier)
                    ours, theirs = context.Pipe(duplex=False)
                    arguments = (theirs, rank, {**environ, **variables(rank, port)}, fn, settings)
                    process = context.Process(target=_work, args=arguments)
                    process.start()
                    theirs.close()
                    waiting[ours], waiting[process.sentinel] = rank.process, rank.process
                    processes.append(process)
            while waiting and (left_s := deadline - time.monotonic()) > 0:
                for handle in wait(list(waiting), left_s):
                    number = waiting.pop(handle)
                    if isinstance(handle, Connection):
                        answers[number] = _receive(handle)
                        if answers[number][1]:
                            deadline = min(deadline, time.monotonic() + others_s)
                    else:
                        ended_at[number] = time.monotonic()
            for number in set(waiting.values()):
                _, error = answers.get(number, (None, ""))
                text = f"{error}\nstill running at the limit, after {steps[number]} local steps"
                answers[number] = (None, text)
                with suppress(ProcessLookupError):
                    os.kill(processes[number].pid, signal.SIGUSR1)
            if waiting:
                time.sleep(1.0)  # they print where they are
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            Outcome(*answers[number], ended_at.get(number, math.inf))
            for number in range(len(processes))
        ]


def variables(rank: Rank, port: int) -> dict[str, str]:
    """Variables that make Lightning take each rank for another machine."""
    job = {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    return {**job, "NODE_RANK": str(rank.number), "LOCAL_RANK": "0"}


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as here:
        here.bind((HOST, 0))
        return int(here.getsockname()[1])


def last_line(error: str) -> str:
    """The last line of a traceback."""
    return error.strip().splitlines()[-1]


def _receive(connection: Connection) -> tuple[Any, str]:
    with connection:
        try:
            answer: tuple[Any, str] = connection.recv()
        except EOFError:
            return None, "the process has died"
    return answer


def _work(
    connection: Connection,
    rank: Rank,
    environ: Mapping[str, str],
    fn: Callable[[Rank, Any], Any],
    settings: Any,
) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(environ)
    let_nccl_share_the_gpu(rank.process)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rank.barrier.wait()  # some take long to start
    try:
        answer = fn(rank, settings), ""
    except BaseException:
        answer = None, traceback.format_exc()
    connection.send(answer)
