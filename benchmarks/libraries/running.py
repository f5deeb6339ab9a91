"""Starts the workers of one run, serves their line, and leaves nothing of them behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from libraries.counters import marked
from libraries.library import Job
from libraries.links import Link

FOLDER = Path(__file__).resolve().parent.parent
MARK = "LOCO_BENCHMARK_RUN"
_LAST_WORDS_S = 10.0


class Failed(Exception):
    """A run that came to no result, with the last line of what a worker said."""


def run(jobs: Sequence[Job], link: Link, deadline_s: float) -> list[Any]:
    """The results of all workers, by rank.

    Raises:
        Failed: If a worker ends early, or not all are done by the deadline.
    """
    deadline = time.monotonic() + deadline_s
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(_started(jobs, link))
        for worker, job in zip(workers, jobs, strict=True):
            worker.line.send(job)
        return _serve(workers, deadline, deadline_s)


class _Started:
    """A worker's process, and this end of its line."""

    def __init__(self, job: Job, link: Link, mark: str) -> None:
        self.log = Path(job.folder, f"{job.entry}-{job.rank}.log")
        self.line, far = Pipe()
        words = [sys.executable, "-m", "libraries.worker", str(far.fileno())]
        paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
        more = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": job.interface,
            MARK: mark,
        }
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                link.command(job.rank, words),
                cwd=FOLDER,
                env={**os.environ, **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[far.fileno()],
            )
        far.close()

    def last_line(self) -> str:
        """Of what it printed."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "it said nothing")


@contextlib.contextmanager
def _started(jobs: Sequence[Job], link: Link) -> Iterator[list[_Started]]:
    mark = secrets.token_hex(8)
    workers: list[_Started] = []
    try:
        for job in jobs:
            workers.append(_Started(job, link, mark))
        yield workers
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
            worker.line.close()
        for process in marked(f"{MARK}={mark}"):  # those that have left the process group
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _serve(workers: list[_Started], deadline: float, deadline_s: float) -> list[Any]:
    by_line = {worker.line: rank for rank, worker in enumerate(workers)}
    gathered: dict[int, Any] = {}
    results: dict[int, Any] = {}
    while len(results) < len(workers):
        if time.monotonic() > deadline:
            missing = [rank for rank in range(len(workers)) if rank not in results]
            said = workers[missing[0]].last_line()
            raise Failed(f"not done within {deadline_s:g} s, last line: {said}")
        for rank, worker in enumerate(workers):
            if rank not in results and worker.process.poll() is not None and not worker.line.poll():
                raise Failed(_why(workers, rank))
        for line in wait(by_line, timeout=0.5):
            assert isinstance(line, Connection)
            rank = by_line[line]
            try:
                kind, value = line.recv()
            except (EOFError, ConnectionResetError):
                workers[rank].process.wait(_LAST_WORDS_S)
                raise Failed(_why(workers, rank)) from None
            if kind == "result":
                results[rank] = value
                del by_line[line]
                continue
            gathered[rank] = value
            if len(gathered) == len(workers):
                values = [gathered[one] for one in range(len(workers))]
                gathered.clear()
                for worker in workers:
                    with contextlib.suppress(BrokenPipeError):
                        worker.line.send(values)
    return [results[rank] for rank in range(len(workers))]


def _why(workers: list[_Started], rank: int) -> str:
    code = workers[rank].process.returncode
    return f"worker {rank} ended by signal {-code}" if code < 0 else workers[rank].last_line()
