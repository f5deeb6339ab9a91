"""What all benchmarks share: arguments, ranks, turns, medians and ratios, the printed table."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import itertools
import logging
import math
import multiprocessing
import multiprocessing.util
import os
import pickle
import platform
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

# One thread per process, here and in the ranks. torch reads it when imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ROOT / "outputs"
HOST = "127.0.0.1"
T = TypeVar("T")
QUICK_SIZES = {"num_layers": 1, "num_heads": 1, "width": 16, "context": 16}
"""A ByteGPT for ``--quick``."""
PRELOADED = (
    *("torch.profiler", "torch.distributed.fsdp", "lightning.pytorch"),
    *("lightning_loco.engine", "lightning_loco.strategies", "lightning_loco.app.demo.model"),
)
"""Modules that the fork server imports once for all ranks, if this process has imported them."""
LIMIT_S = 3600.0  # for the ranks of one call
OTHERS_S = 15.0  # for the other ranks, once one has failed
TIMEOUT_S = 300.0  # of a collective


# ---------------------------------------------------------------------------------- arguments


def parse(
    doc: str | None,
    *,
    quick: Mapping[str, Any],
    choices: Mapping[str, Any] | None = None,
    parts: Sequence[str] = (),
    device: Literal["", "cpu", "cuda"] = "",
    **settings: Any,
) -> argparse.Namespace:
    """Read the command line, and print a line about the machine.

    Args:
        doc: Printed by ``--help``.
        quick: Other defaults, for ``--quick``.
        choices: The possible values of some settings.
        parts: Possible values of the first argument, if there is one.
        device: The default of ``--device cpu`` or ``cuda``, if there is one.
        settings: Default of each setting, or its type if it has no default. A list takes several
            values.
    """
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=kind)
    text = "smallest size: shows that it runs, not what it costs"
    parser.add_argument("--quick", action="store_true", help=text)
    if parts:
        parser.add_argument("part", choices=parts)
    if device:
        text = "cuda: all ranks share the first GPU, and NCCL carries their messages"
        parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help=text)
    for name, default in settings.items():
        flag = f"--{name.replace('_', '-')}"
        more: dict[str, Any] = {"choices": (choices or {}).get(name), "metavar": name.upper()}
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, **more)
        elif isinstance(default, (list, tuple)):
            each, shown = type(default[0]) if default else str, " ".join(map(str, default))
            more |= {"nargs": "+", "help": f"default: {shown or 'none'}"}
            parser.add_argument(flag, type=each, default=list(default), **more)
        else:
            more["help"] = "default: %(default)s"
            parser.add_argument(flag, type=type(default), default=default, **more)
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(
        f"{cores} cores ({platform.machine()}), torch {torch.__version__}, one thread per process, "
        f"load before the start {load:.1f}"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        flush=True,
    )
    return options


# -------------------------------------------------------------------------------------- ranks


class Network(Protocol):
    """A network between ranks other than the loopback."""

    def enter(self, rank: int) -> str:
        """Put this process on the network; return its address there."""


class RankFailed(Exception):
    """A rank has raised an error, died, or not ended in time; the message says which and why."""


class Worker:
    """One of several ranks that call the same function at the same time.

    Attributes:
        rank: Number of this rank.
        num_workers: Number of ranks.
        device: ``"cpu"`` or ``"cuda"``.
        host: Address at which the other ranks find this one.
    """

    def __init__(self, rank: int, num_workers: int, device: str, folder: str, barrier: Any) -> None:
        self.rank, self.num_workers, self.device, self.host = rank, num_workers, device, HOST
        self._folder, self._barrier = Path(folder), barrier
        self._store: dist.Store | None = None
        self._gathers = self._groups = 0

    def wait_for_all(self) -> None:
        """Come out at the same time as all other ranks. No network is used."""
        self._barrier.wait()

    def wait_for_device(self) -> None:
        """Wait until a GPU has finished its work."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def gather(self, value: Any = None) -> list[Any]:
        """The values of all ranks. No network is used."""
        self._gathers += 1
        files = [self._folder / f"{self._gathers}-{rank}" for rank in range(self.num_workers)]
        files[self.rank].write_bytes(pickle.dumps(value))
        self.wait_for_all()
        return [pickle.loads(file.read_bytes()) for file in files]

    @contextlib.contextmanager
    def process_group(self, size: int | None = None) -> Iterator[None]:
        """A new default process group of all ranks: gloo, or NCCL on a GPU.

        ``size``: of this number of consecutive ranks instead. All ranks must make one at the same
        time.
        """
        if self._store is None:
            served = None
            if self.rank == 0:
                served = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
            host, port = self.gather(served and (self.host, served.port))[0]
            self._store = served or dist.TCPStore(host, port, wait_for_workers=False)
        self._groups += 1
        number, rank = divmod(self.rank, size or self.num_workers)
        dist.init_process_group(
            "nccl" if self.device == "cuda" else "gloo",
            store=dist.PrefixStore(f"group{self._groups}.{number}", self._store),
            rank=rank,
            world_size=size or self.num_workers,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        try:
            yield
            self.wait_for_all()  # closing early may cut off a message to a slower rank
        finally:
            dist.destroy_process_group()


def run_workers(
    fn: Callable[..., T],
    num_workers: int,
    *args: Any,
    device: str = "cpu",
    network: Network | None = None,
    environ: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> list[T]:
    """Call ``fn(worker, *args)`` on new ranks and return the results by rank.

    The ranks are forked from a server that has imported PyTorch, and are gone when this returns.
    Those that are still running at the limit print the stacks of their threads.

    Raises:
        RankFailed: If a rank has failed; the others have some seconds to fail, too.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *(name for name in PRELOADED if name in sys.modules)])
    barrier = context.Barrier(num_workers)
    deadline, answers, waiting = time.monotonic() + limit_s, dict[int, tuple[Any, str]](), {}
    processes = []
    with tempfile.TemporaryDirectory(prefix="loco-bench-") as folder:
        try:
            for rank in range(num_workers):
                ours, theirs = context.Pipe(duplex=False)
                worker = Worker(rank, num_workers, device, folder, barrier)
                call = (theirs, worker, dict(environ or {}), network, fn, args)
                processes.append(context.Process(target=_work, args=call))
                processes[-1].start()
                theirs.close()
                waiting[ours] = rank
            while waiting and (left_s := deadline - time.monotonic()) > 0:
                for connection in wait(list(waiting), left_s):
                    rank = waiting.pop(connection)
                    answers[rank] = _receive(connection, processes[rank])
                    if answers[rank][1]:
                        deadline = min(deadline, time.monotonic() + OTHERS_S)
            for rank in waiting.values():
                os.kill(processes[rank].pid, signal.SIGUSR1)
            if waiting:
                time.sleep(1.0)  # they print where they are
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # its own child processes, too
                process.kill()
                process.join()
    if errors := {rank: error for rank, (_, error) in answers.items() if error}:
        last_lines = {rank: error.strip().splitlines()[-1] for rank, error in errors.items()}
        print(next(iter(errors.values())), file=sys.stderr, flush=True)
        raise RankFailed("; ".join(f"rank {rank}: {line}" for rank, line in last_lines.items()))
    if waiting:
        late = ", ".join(map(str, waiting.values()))
        raise RankFailed(f"not done within {limit_s:g} s: rank {late}")
    return [answers[rank][0] for rank in range(num_workers)]


def _receive(connection: Any, process: Any) -> tuple[Any, str]:
    with connection:
        try:
            answer: tuple[Any, str] = connection.recv()
        except EOFError:
            process.join()
            return None, f"the process has ended with exit code {process.exitcode}"
    return answer


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _work(
    connection: Connection,
    worker: Worker,
    environ: Mapping[str, str],
    network: Network | None,
    fn: Callable[..., Any],
    args: Any,
) -> None:
    os.setsid()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # NCCL takes each rank for another machine: it refuses two ranks on one GPU.
    os.environ.update(NCCL_HOSTID=f"worker{worker.rank}", NCCL_SOCKET_IFNAME="lo")
    os.environ.update(NCCL_IB_DISABLE="1", **environ)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        if network is not None:
            worker.host = network.enter(worker.rank)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        worker.wait_for_all()  # some take long to start
        answer = fn(worker, *args), ""
    except BaseException:
        answer = None, traceback.format_exc()
    sys.stdout.flush()
    multiprocessing.util._run_finalizers()  # unlinks semaphores, such as tqdm's
    connection.send(answer)
    threading.Event().wait()  # the other ranks may need this one's store; all are killed together


def free_port(host: str = HOST) -> int:
    """A port that is free now."""
    with socket.socket() as here:
        here.bind((host, 0))
        return int(here.getsockname()[1])


def in_turns(
    kinds: Mapping[str, Callable[[], T]], turns: int, warm_up: int = 1
) -> dict[str, list[T]]:
    """Call each once a turn, and return the results of all turns but the first by name.

    The order changes from turn to turn, so that no kind is always the first, and is the same on
    all ranks.
    """
    order = random.Random(0)
    found: dict[str, list[T]] = {name: [] for name in kinds}
    for _ in range(warm_up + turns):
        for name in order.sample(list(kinds), len(kinds)):
            found[name].append(kinds[name]())
    return {name: values[warm_up:] for name, values in found.items()}


# ----------------------------------------------------------------------------------- numbers


def slowest(results: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return by name when the last rank was done in each turn.

    Example:
        >>> slowest([{"round": [1.0, 4.0]}, {"round": [2.0, 3.0]}])
        {'round': [2.0, 4.0]}
    """
    return {
        name: [max(values) for values in zip(*(r[name] for r in results), strict=True)]
        for name in results[0]
    }


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios turn by turn."""
    return [a / b for a, b in zip(values, others, strict=True)]


def ms(seconds: Sequence[float], digits: int = 1) -> str:
    """Return the median in milliseconds."""
    return f"{1000 * statistics.median(seconds):.{digits}f}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and quartiles: ``1.02 [0.99, 1.06]``.

    Example:
        >>> spread([1.0, 2.0, 3.0])
        '2.00 [1.00, 3.00]'
    """
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def mean_and_deviation(values: Sequence[float], digits: int) -> str:
    """``1.02 (0.03)``: mean and standard deviation; infinite losses are counted instead."""
    if infinite := sum(math.isinf(value) for value in values):
        return f"{infinite} of {len(values)} diverged"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ({statistics.stdev(values):.{digits}f})"


def paired_p(differences: Sequence[float]) -> float:
    """The share of all choices of signs whose sum is as far from zero as the one that is there.

    Example:
        >>> paired_p([1.0, 2.0, 3.0])
        0.25
    """
    total = abs(sum(differences))
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(value >= total * (1 - 1e-9) for value in sums) / len(sums)


# ----------------------------------------------------------------------------------- the table


def at_most(value: float, bound: float, digits: int = 2) -> str:
    """The bound, and whether a value keeps it.

    Example:
        >>> at_most(1.2, 1.1)
        '<= 1.10 MISSED'
    """
    return f"<= {bound:.{digits}f} {'ok' if value <= bound else 'MISSED'}"


def at_least(value: float, bound: float, digits: int = 2) -> str:
    """The lower bound, and whether a value keeps it.

    Example:
        >>> at_least(0.7, 0.8)
        '>= 0.80 MISSED'
    """
    return f">= {bound:.{digits}f} {'ok' if value >= bound else 'MISSED'}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under a header: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print()
    for row in [header, ["-" * width for width in widths], *rows]:
        first, *others = (
            f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())
    print(flush=True)


def with_tables(page: str, tables: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Return a Markdown page with these tables between its marks: of each the header and rows."""
    for name, (header, *rows) in tables.items():
        begin, end = f"<!-- {name}: written by the command -->", f"<!-- {name}: end -->"
        lines = [f"| {' | '.join(one)} |" for one in (header, ["---"] * len(header), *rows)]
        block = "\n".join([begin, "", *lines, "", end])
        pattern = f"{re.escape(begin)}.*{re.escape(end)}"
        page, count = re.subn(pattern, lambda _, block=block: block, page, flags=re.DOTALL)
        assert count == 1, f"The page has no marks of the table {name}."
    return page
