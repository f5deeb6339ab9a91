"""Four gloo processes that live as long as the test session.

Starting processes and importing torch and lightning takes most of the time of a distributed test.
The pool pays for it once: each call sends a module-level function to the workers, which run it
inside a fresh gloo process group and send its result back.

Example:
    def total(rank, world):
        value = torch.tensor(float(rank))
        dist.all_reduce(value)
        return value.item()

    def test_total(pool):
        assert pool.run(total, world=3) == [3.0, 3.0, 3.0]
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import Strategy

from tests.harness.pool_worker import Failure, Job, Success, serve, serve_store
from tests.harness.small_model import quiet_trainer

START_TIMEOUT_S = 120.0
# How long the other ranks may continue after one rank has failed, unless a test sets another time.
GRACE_S = 5.0
# How long a rank may take to close its process group and end its threads.
CLEAN_UP_S = 20.0
# How long a hanging rank may take to write its stacks.
DUMP_S = 0.3
LONGEST_DUMP_S = 5.0

PRELOADED = [
    "torch",
    "torch.distributed",
    "lightning.pytorch",
    "lightning_loco",
    "torchft",
    "pytest",
]
"""Modules to import before a process for a test is forked."""

Key = TypeVar("Key")

_processes = multiprocessing.get_context("forkserver")


class PoolError(Exception):
    """One or more ranks returned no result. The text names them; the fields are for tests.

    Args:
        text: The first failure with its traceback, then one paragraph for each other rank.
        failures: The error of each failing rank.
        missing: Ranks that exited or did not answer in time.
    """

    def __init__(self, text: str, failures: dict[int, Failure], missing: list[int]) -> None:
        super().__init__(text)
        self.failures = failures
        self.missing = missing


class Pool:
    """Processes 0 to size - 1, started by the first call; a call uses the first `world` of them."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._calls = 0

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world: int = 4,
        timeout_s: float = 60.0,
        grace_s: float = GRACE_S,
    ) -> list[Any]:
        """Call fn(rank, world, *args) on every rank inside a fresh gloo group.

        Args:
            fn: A module-level function. It sees this process's folder, environment and warning
                filters, has one thread, and the generators of Python, numpy and torch are seeded
                with its rank.
            *args: Sent by pickle.
            world: Number of ranks, 1 to `size`.
            timeout_s: Ranks that have not answered by then are killed and replaced.
            grace_s: How long the other ranks may continue after one rank has failed.

        Returns:
            The results by rank.

        Raises:
            PoolError: A rank raised, died, left something behind or did not answer.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world must be between 1 and {self.size}, got {world}.")
        call = pickle.dumps((fn, args))
        self._start()
        self._calls += 1
        try:
            for rank in range(world):
                job = self._job(rank, world, timeout_s, call)
                self._workers[rank].connection.send_bytes(pickle.dumps(job))
            results, failures, missing = self._collect(world, timeout_s, grace_s)
        except BaseException:
            self.close()  # results of an interrupted call are never read
            raise
        if failures or missing:
            text = _describe(f"{fn.__module__}.{fn.__qualname__}", world, failures, missing)
            raise PoolError(text, failures, sorted(missing))
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """End the processes. A closed pool starts again when it is used."""
        for worker in self._workers:
            worker.stop()
        if self._workers:
            self._workers = []
            self._store_connection.close()
            self._store_process.join()
            self._folder.cleanup()

    def _start(self) -> None:
        if self._workers:
            return
        _processes.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="pool")
        # The store's server has a separate process: forks of a process that hosts it can hang.
        self._store_connection, theirs = _processes.Pipe()
        self._store_process = _processes.Process(target=serve_store, args=(theirs,), daemon=True)
        self._store_process.start()
        theirs.close()
        self._port = pickle.loads(self._store_connection.recv_bytes())
        self._workers = [self._new_worker(rank) for rank in range(self.size)]
        for worker in self._workers:
            worker.wait_until_ready()

    def _new_worker(self, rank: int) -> _Worker:
        return _Worker(rank, self._port, Path(self._folder.name))

    def _replace(self, rank: int) -> None:
        self._workers[rank].kill()
        self._workers[rank] = self._new_worker(rank)
        self._workers[rank].wait_until_ready()

    def _job(self, rank: int, world: int, timeout_s: float, call: bytes) -> Job:
        return Job(
            prefix=f"call{self._calls}",
            rank=rank,
            world=world,
            timeout_s=timeout_s,
            folder=os.getcwd(),
            sys_path=list(sys.path),
            environ=dict(os.environ),
            warning_filters=_warning_filters(),
            call=call,
        )

    def _collect(
        self, world: int, timeout_s: float, grace_s: float
    ) -> tuple[dict[int, Any], dict[int, Failure], dict[int, str]]:
        """Return the answers by rank: results, errors, and why other ranks gave no answer."""
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        missing: dict[int, str] = {}
        waiting = set(range(world))
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := self._ready(waiting, deadline)):
            for rank in sorted(ready):
                waiting.discard(rank)
                try:
                    answer = self._workers[rank].receive()
                except EOFError:
                    missing[rank] = f"died with exit code {self._workers[rank].exit_code()}"
                else:
                    if isinstance(answer, Success):
                        results[rank] = answer.result
                    else:
                        failures[rank] = answer
            if failures or missing:
                deadline = min(deadline, time.monotonic() + grace_s)
        for rank in sorted(waiting):
            stacks = self._workers[rank].stacks()
            missing[rank] = f"did not answer and was killed. It was here:\n{stacks}"
        self._clean_up(sorted({*results, *failures}), failures)
        for rank in missing:
            self._replace(rank)
        return results, failures, missing

    def _ready(self, waiting: set[int], deadline: float) -> set[int]:
        """Return ranks that have answered or exited; empty when the deadline has passed."""
        handles: dict[Any, int] = {}
        for rank in waiting:
            handles[self._workers[rank].connection] = rank
            handles[self._workers[rank].process.sentinel] = rank
        ready = wait(list(handles), max(0.0, deadline - time.monotonic()))
        return {handles[handle] for handle in ready}

    def _clean_up(self, ranks: list[int], failures: dict[int, Failure]) -> None:
        """Let the ranks that answered close their groups; anything left behind is a failure."""
        for rank in ranks:
            self._workers[rank].connection.send_bytes(b"finish")
        for rank in ranks:
            worker = self._workers[rank]
            try:
                left = worker.receive(CLEAN_UP_S)
            except EOFError:
                left = [f"a process still busy after {CLEAN_UP_S:g} s\n{worker.stacks()}"]
            if left:
                text = "The job left behind: " + "; ".join(left)
                if rank in failures:
                    failures[rank].traceback += f"\n{text}"
                else:
                    failures[rank] = Failure(rank, "Leftover", text, text, time.monotonic())
                self._replace(rank)


class _Worker:
    """A handle to one process of the pool."""

    def __init__(self, rank: int, port: int, folder: Path) -> None:
        self.stack_file = folder / f"rank{rank}.stack"
        self.connection, theirs = _processes.Pipe()
        # Not a daemon, so that jobs may start child processes (data loader workers).
        self.process = _processes.Process(
            target=serve, args=(theirs, port, str(self.stack_file)), name=f"pool-rank{rank}"
        )
        self.process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        if not self.connection.poll(START_TIMEOUT_S):
            raise RuntimeError(f"{self.process.name} did not start within {START_TIMEOUT_S:g} s.")
        self.connection.recv_bytes()

    def receive(self, timeout_s: float = 0.0) -> Any:
        """Return the next message; raise EOFError if the process has exited or does not answer."""
        try:
            if self.connection.poll(timeout_s):
                return pickle.loads(self.connection.recv_bytes())
        except ConnectionError:
            pass
        raise EOFError

    def exit_code(self) -> int | None:
        self.process.join(timeout=2)
        return self.process.exitcode

    def stacks(self) -> str:
        """Return the stacks of all threads of a hanging process."""
        self.stack_file.write_text("")
        with suppress(ProcessLookupError):
            os.kill(self._pid(), signal.SIGUSR2)
            deadline = time.monotonic() + LONGEST_DUMP_S
            while not self.stack_file.read_text() and time.monotonic() < deadline:
                time.sleep(DUMP_S)
            time.sleep(DUMP_S)
        return self.stack_file.read_text().strip() or "(no stack was written)"

    def stop(self) -> None:
        with suppress(ConnectionError):
            self.connection.send_bytes(b"")
        self.process.join(timeout=2)
        self.kill()

    def kill(self) -> None:
        if self.process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self._pid(), signal.SIGKILL)
            self.process.kill()
        self.process.join()
        self.connection.close()

    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


class PoolEnvironment(ClusterEnvironment):
    """Gives a Lightning Trainer inside a pool job its ranks, whose processes already exist.

    Args:
        num_nodes: Number of machines to report.
    """

    def __init__(self, num_nodes: int = 1) -> None:
        super().__init__()
        self.num_nodes = num_nodes

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        raise RuntimeError("The pool has built the process group already; no port is needed.")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        if size != dist.get_world_size():
            raise ValueError(f"The job has {dist.get_world_size()} ranks, devices asks for {size}.")

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        if rank != dist.get_rank():
            raise ValueError(f"This is rank {dist.get_rank()} of the job, got {rank}.")

    def local_rank(self) -> int:
        return dist.get_rank() % (dist.get_world_size() // self.num_nodes)

    def node_rank(self) -> int:
        return dist.get_rank() // (dist.get_world_size() // self.num_nodes)


def make_trainer(strategy: Strategy | str, **settings: Any) -> Trainer:
    """Return a quiet CPU Trainer for a pool job; settings replace or add to the defaults."""
    devices = settings["devices"] if "devices" in settings else dist.get_world_size()
    defaults = {"devices": devices, "plugins": [PoolEnvironment()]}
    return quiet_trainer(strategy=strategy, **{**defaults, **settings})


def run_each(
    pool: Pool, fn: Callable[..., Any], rows: Mapping[Key, Sequence[Any]], **options: Any
) -> dict[Key, list[Any]]:
    """Return the results of ``fn(rank, world, *row)`` on every rank for each row, in one pool call.

    Args:
        pool: The processes.
        fn: A module-level function, for which the generator of torch is seeded with its rank.
        rows: Its further arguments, by name of the row.
        options: Options of ``pool.run``; the default timeout of all rows together is three minutes.
    """
    results = pool.run(_call_each, fn, dict(rows), **{"timeout_s": 180.0, **options})
    return {name: [found[name] for found in results] for name in rows}


def _call_each(
    rank: int, world: int, fn: Callable[..., Any], rows: dict[Key, Sequence[Any]]
) -> dict[Key, Any]:
    found = {}
    for name, row in rows.items():
        torch.manual_seed(rank)
        try:
            found[name] = fn(rank, world, *row)
        except Exception as error:
            raise RuntimeError(f"The row {name!r} failed: {error}") from error
    return found


def _describe(name: str, world: int, failures: dict[int, Failure], missing: dict[int, str]) -> str:
    """Describe the first failure in full, later ones in a line each, then the missing ranks."""
    lines = []
    for index, failure in enumerate(sorted(failures.values(), key=lambda one: one.raised_at_s)):
        who = f"rank {failure.rank} of {world}"
        if index == 0:
            lines.append(f"{who} failed in {name}:\n{failure.traceback}")
        else:
            first_line = failure.message.strip().split("\n")[0][:300]
            lines.append(f"{who} then failed: {failure.type_name}: {first_line}")
    for rank, why in sorted(missing.items()):
        lines.append(f"rank {rank} of {world} in {name} {why}")
    return "\n".join(lines)


def _warning_filters() -> list[tuple[str, str, type[Warning], str, int]]:
    """Return this process's filters, lowest priority first, for warnings.filterwarnings."""

    def pattern(regex: Any) -> str:
        return "" if regex is None else getattr(regex, "pattern", regex)

    return [
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in reversed(warnings.filters)
    ]
