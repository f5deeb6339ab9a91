"""A lighthouse of torchft and elastic workers, each in its own process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torchft.coordination import LighthouseServer

from tests.elastic import worker
from tests.harness.failing import is_frozen
from tests.harness.pool import PRELOADED
from tests.harness.programs import free_ports

_processes = multiprocessing.get_context("forkserver")
HEARTBEAT_TIMEOUT_S = 1.0
TIMEOUT_S = 180.0

Line = dict[str, Any]


class Lighthouse:
    """A lighthouse of torchft in a separate process."""

    def __init__(self, min_workers: int) -> None:
        (self.port,) = free_ports()
        self.address = f"127.0.0.1:{self.port}"
        self._min_workers = min_workers
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it listens."""
        _processes.set_forkserver_preload(PRELOADED)
        self.process = _processes.Process(
            target=run_lighthouse, args=(self.address, self._min_workers)
        )
        self.process.start()
        until(self._listens, "the lighthouse")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()


def run_lighthouse(address: str, min_workers: int) -> None:
    """Run a lighthouse until this process is killed."""
    lighthouse = LighthouseServer(
        bind=address,
        min_replicas=min_workers,
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * HEARTBEAT_TIMEOUT_S),
    )
    signal.pause()
    lighthouse.shutdown()


def until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
        time.sleep(0.02)


def lines_of(folder: Path, index: int) -> list[Line]:
    """Return the lines that a worker has logged so far."""
    path = folder / f"{index}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Cluster:
    """Workers that share a lighthouse.

    Args:
        lighthouse: The lighthouse.
        folder: Folder of the workers' logs.
        settings: Arguments of every worker.
        program: Main function of every worker.
        ranks: Number of processes of a worker; ``index // ranks`` is the worker of a process.
    """

    def __init__(
        self,
        lighthouse: Lighthouse,
        folder: Path,
        settings: list[str],
        program: Callable[[list[str]], None],
        ranks: int = 1,
    ) -> None:
        self.lighthouse = lighthouse
        self.ranks = ranks
        self.processes: dict[int, ForkServerProcess] = {}
        self._folder = folder
        self._settings = settings
        self._program = program

    def start(self, worker: int, *settings: str) -> None:
        """Start a worker; it appends to the log of an earlier one with this number."""
        port = free_ports()[0] if self.ranks > 1 else 0
        for place in range(self.ranks):
            self._start(worker * self.ranks + place, [*settings, f"--port={port}"])

    def _start(self, index: int, settings: list[str]) -> None:
        arguments = [
            f"--lighthouse={self.lighthouse.address}",
            f"--index={index}",
            f"--ranks={self.ranks}",
            f"--log={self._folder / f'{index}.jsonl'}",
            *self._settings,
            *settings,
        ]
        errors = str(self._folder / f"{index}.err")
        _processes.set_forkserver_preload(PRELOADED)
        self.processes[index] = _processes.Process(
            target=run_worker, args=(self._program, arguments, errors)
        )
        self.processes[index].start()

    def start_all(self, count: int, rounds: int = 3) -> None:
        """Start ``count`` workers, and wait until the last one has finished some rounds."""
        for index in range(count):
            self.start(index)
        self.wait_for_round(count - 1, rounds)

    def join(self, index: int, rounds: int) -> None:
        """Start another worker, and wait until it has finished more than ``rounds`` rounds."""
        self.start(index)
        until(lambda: len(self.lines(index)) > rounds, "rounds of the joining worker")

    def suspend_for_a_round(self, index: int, seen_by: int) -> None:
        """Suspend one of three workers until the other two have finished a round without it."""
        self.kill(index, signal.SIGSTOP)
        self.wait_for_members(seen_by, 2)
        time.sleep(1)
        self.kill(index, signal.SIGCONT)

    def wait_for_members(self, index: int, members: int) -> None:
        """Wait until the last round of a worker had this number of members."""
        until(
            lambda: [len(line["members"]) for line in self.lines(index)[-1:]] == [members],
            f"round of {members} with worker {index}",
        )

    def lines(self, index: int) -> list[Line]:
        """Return the lines that a worker has logged so far."""
        return lines_of(self._folder, index)

    def output(self, index: int) -> str:
        """Return what a worker has written to its standard streams."""
        path = self._folder / f"{index}.err"
        return path.read_text() if path.exists() else ""

    def wait_for_round(self, index: int, round_index: int) -> None:
        """Wait until a worker has reached a round."""

        def has_reached() -> bool:
            assert not self.processes[index].exitcode, self.output(index)
            lines = self.lines(index)
            return bool(lines) and lines[-1]["round"] >= round_index

        until(has_reached, f"round {round_index} of worker {index}")

    def kill(self, index: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal, and return the time."""
        os.kill(self._process_id(index), number)
        return time.time()

    def is_frozen(self, index: int) -> bool:
        """Whether a worker is suspended by a signal."""
        return is_frozen(self._process_id(index))

    def _process_id(self, index: int) -> int:
        process_id = self.processes[index].pid
        assert process_id is not None
        return process_id

    def run_to_completion(self, count: int) -> None:
        """Start ``count`` workers, the first one earlier, and wait until they have succeeded."""
        for index in range(count):
            self.start(index)
            time.sleep(0.5 if index == 0 else 0)
        self.wait_for_success(*range(count))

    def wait_for_success(self, *indices: int) -> None:
        """Wait until workers have ended with status 0."""
        for index in indices:
            assert self.exit_status(index) == 0, self.output(index)

    def exit_status(self, index: int) -> int | None:
        """Wait until a worker has ended, and return its exit status."""
        self.processes[index].join(TIMEOUT_S)
        return self.processes[index].exitcode

    def check_rounds(self) -> int:
        """Check that states are equal and no round is missing; return the number of rounds."""
        rounds = self.check_states()
        assert sorted(rounds) == list(range(min(rounds), max(rounds) + 1))
        return len(rounds)

    def check_states(self) -> set[int]:
        """Check that states were equal at the start and end of each round; return the rounds.

        Ranks are compared with ranks at the same place in the other workers.
        """
        states: dict[tuple[int, int, int], dict[int, int]] = {}
        for index in self.processes:
            for line in self.lines(index):
                at = line["round"], line.get("pending", 0)
                states.setdefault((*at, index % self.ranks), {})[index] = line["checksum"]
        for at, found in states.items():
            assert len(set(found.values())) == 1, (at, found)
        return {round_index for round_index, *_ in states}

    def close(self) -> None:
        """Kill the remaining processes."""
        for process in self.processes.values():
            process.kill()
            process.join()


def run_worker(program: Callable[[list[str]], None], arguments: list[str], errors: str) -> None:
    """Run a worker in this process, with its standard streams in a file."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    program(arguments)


@contextmanager
def cluster(
    folder: Path,
    *settings: str,
    min_workers: int = 2,
    lighthouse_min: int | None = None,
    program: Callable[[list[str]], None] = worker.main,
    ranks: int = 1,
) -> Iterator[Cluster]:
    """Yield a lighthouse and workers to start; ``lighthouse_min`` is the lighthouse's minimum."""
    lighthouse = Lighthouse(lighthouse_min or min_workers)
    settings = (*settings, f"--min-workers={min_workers}")
    workers = Cluster(lighthouse, folder, [*settings], program, ranks)
    try:
        yield workers
    finally:
        workers.close()
        lighthouse.stop()
