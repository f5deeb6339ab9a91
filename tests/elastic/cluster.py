"""A real lighthouse and elastic workers, each in a process of its own."""

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
from tests.frozen import is_frozen
from tests.pool import PRELOADED
from tests.programs import free_ports

_processes = multiprocessing.get_context("forkserver")
HEARTBEAT_TIMEOUT_S = 1.0
PATIENCE_S = 180.0

Line = dict[str, Any]


class Lighthouse:
    """A lighthouse of torchft, in a process of its own."""

    def __init__(self, min_workers: int) -> None:
        (self.port,) = free_ports()
        self.address = f"127.0.0.1:{self.port}"
        self._min_workers = min_workers
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        _processes.set_forkserver_preload(PRELOADED)
        self.process = _processes.Process(target=shine, args=(self.address, self._min_workers))
        self.process.start()
        until(self._listens, "the lighthouse")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()


def shine(address: str, min_workers: int) -> None:
    """Be a lighthouse, until this process is killed."""
    lighthouse = LighthouseServer(
        bind=address,
        min_replicas=min_workers,
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * HEARTBEAT_TIMEOUT_S),
    )
    signal.pause()
    lighthouse.shutdown()


def until(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for something."""
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} within {patience_s:g} s"
        time.sleep(0.02)


def lines_of(folder: Path, index: int) -> list[Line]:
    """What a worker has written so far."""
    path = folder / f"{index}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Cluster:
    """Workers that share a lighthouse.

    Args:
        lighthouse: Theirs.
        folder: Where they write.
        settings: Arguments of every worker.
        program: What every worker runs.
    """

    def __init__(
        self,
        lighthouse: Lighthouse,
        folder: Path,
        settings: list[str],
        program: Callable[[list[str]], None],
    ) -> None:
        self.lighthouse = lighthouse
        self.processes: dict[int, ForkServerProcess] = {}
        self._folder = folder
        self._settings = settings
        self._program = program

    def start(self, index: int, *settings: str) -> None:
        """Start a worker; its log goes on if there was one of this index."""
        arguments = [
            f"--lighthouse={self.lighthouse.address}",
            f"--index={index}",
            f"--log={self._folder / f'{index}.jsonl'}",
            *self._settings,
            *settings,
        ]
        errors = str(self._folder / f"{index}.err")
        _processes.set_forkserver_preload(PRELOADED)
        self.processes[index] = _processes.Process(
            target=work, args=(self._program, arguments, errors)
        )
        self.processes[index].start()

    def start_all(self, count: int, rounds: int = 3) -> None:
        """Start so many workers, and wait for some rounds of theirs."""
        for index in range(count):
            self.start(index)
        self.wait_for_round(count - 1, rounds)

    def join(self, index: int, rounds: int) -> None:
        """Start one more, and wait until it has made more than so many rounds."""
        self.start(index)
        until(lambda: len(self.lines(index)) > rounds, "rounds of the newcomer")

    def suspend_for_a_round(self, index: int, seen_by: int) -> None:
        """Stop one of three workers until the other two have made a round without it."""
        self.kill(index, signal.SIGSTOP)
        self.wait_for_members(seen_by, 2)
        time.sleep(1)
        self.kill(index, signal.SIGCONT)

    def wait_for_members(self, index: int, members: int) -> None:
        """Wait until the last round of a worker was one of so many members."""
        until(
            lambda: [len(line["members"]) for line in self.lines(index)[-1:]] == [members],
            f"round of {members} with worker {index}",
        )

    def lines(self, index: int) -> list[Line]:
        """What a worker has written so far."""
        return lines_of(self._folder, index)

    def output(self, index: int) -> str:
        """What it has said."""
        path = self._folder / f"{index}.err"
        return path.read_text() if path.exists() else ""

    def wait_for_round(self, index: int, round_index: int) -> None:
        """Wait until a worker has made so many rounds."""

        def is_there() -> bool:
            assert not self.processes[index].exitcode, self.output(index)
            lines = self.lines(index)
            return bool(lines) and lines[-1]["round"] >= round_index

        until(is_there, f"round {round_index} of worker {index}")

    def kill(self, index: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal; the time."""
        os.kill(self._process_id(index), number)
        return time.time()

    def is_frozen(self, index: int) -> bool:
        """Whether a worker has been stopped by a signal and not been woken."""
        return is_frozen(self._process_id(index))

    def _process_id(self, index: int) -> int:
        process_id = self.processes[index].pid
        assert process_id is not None
        return process_id

    def run_to_completion(self, count: int) -> None:
        """Start so many workers, the first one first, and wait until they have ended well."""
        for index in range(count):
            self.start(index)
            time.sleep(0.5 if index == 0 else 0)
        self.wait_for_success(*range(count))

    def wait_for_success(self, *indices: int) -> None:
        """Wait until workers have ended well."""
        for index in indices:
            assert self.exit_status(index) == 0, self.output(index)

    def exit_status(self, index: int) -> int | None:
        """Wait for the end of a worker."""
        self.processes[index].join(PATIENCE_S)
        return self.processes[index].exitcode

    def check_rounds(self) -> int:
        """Check that states are the same and that no round is lost; how many rounds."""
        rounds = self.check_states()
        assert sorted(rounds) == list(range(min(rounds), max(rounds) + 1))
        return len(rounds)

    def check_states(self) -> set[int]:
        """Check that all who have begun or ended a round had the same state then; those rounds."""
        states: dict[tuple[int, int], dict[int, int]] = {}
        for index in self.processes:
            for line in self.lines(index):
                at = line["round"], line.get("under_way", 0)
                states.setdefault(at, {})[index] = line["checksum"]
        for at, found in states.items():
            assert len(set(found.values())) == 1, (at, found)
        return {round_index for round_index, _ in states}

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes.values():
            process.kill()
            process.join()


def work(program: Callable[[list[str]], None], arguments: list[str], errors: str) -> None:
    """Be a worker, in a process of its own whose words go into a file."""
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
    least: int | None = None,
    program: Callable[[list[str]], None] = worker.main,
) -> Iterator[Cluster]:
    """A lighthouse, and workers to start; ``least`` is what the lighthouse wants, by itself."""
    lighthouse = Lighthouse(least or min_workers)
    workers = Cluster(lighthouse, folder, [*settings, f"--min-workers={min_workers}"], program)
    try:
        yield workers
    finally:
        workers.close()
        lighthouse.stop()
