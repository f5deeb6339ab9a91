"""What all benchmarks share: processes, turns, medians and ratios, arguments, the printed table."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import pickle
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

# One thread per process, here and in the processes started below. torch reads it when imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing

HOST = "127.0.0.1"
T = TypeVar("T")
QUICK_SIZES = {"num_layers": 1, "num_heads": 1, "width": 16, "context": 16}
"""A ByteGPT for ``--quick``."""


class Worker:
    """One of several processes that run the same function at the same time.

    Args:
        rank: Number of this process.
        num_workers: Number of processes.
        store: Key-value store of all of them.
        barrier: Shared by all of them; it uses no network.
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(
        self, rank: int, num_workers: int, store: dist.Store, barrier: Any, device: str
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.device = device
        self._store = store
        self._barrier = barrier
        self._groups = 0

    def wait_for_all(self) -> None:
        """Come out at the same time as all other workers."""
        self._barrier.wait()

    def wait_for_device(self) -> None:
        """Wait until a GPU has finished its work."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def process_group(self, size: int | None = None) -> Iterator[None]:
        """A new default process group of all workers: gloo, or NCCL on a GPU.

        ``size``: of this number of consecutive workers instead. All workers must make one at the
        same time.
        """
        self._groups += 1
        size = size or self.num_workers
        number, rank = divmod(self.rank, size)
        dist.init_process_group(
            "nccl" if self.device == "cuda" else "gloo",
            store=dist.PrefixStore(f"group{self._groups}.{number}", self._store),
            rank=rank,
            world_size=size,
        )
        try:
            yield
            self.wait_for_all()  # closing early may cut off a message to a slower worker
        finally:
            dist.destroy_process_group()


def run_workers(
    fn: Callable[..., Any],
    num_workers: int,
    *args: Any,
    device: str = "cpu",
    start_method: Literal["spawn", "fork"] = "spawn",
) -> list[Any]:
    """Call ``fn(worker, *args)`` in ``num_workers`` new processes and return the results by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: With the traceback of the first that failed;
            the others are ended.
    """
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    barrier = multiprocessing.get_context(start_method).Barrier(num_workers)
    torch.multiprocessing.start_processes(
        _work,
        args=(num_workers, store.port, barrier, device, fn, args),
        nprocs=num_workers,
        start_method=start_method,
    )
    return [pickle.loads(store.get(f"result{rank}")) for rank in range(num_workers)]


def _work(
    rank: int,
    num_workers: int,
    port: int,
    barrier: Any,
    device: str,
    fn: Callable[..., Any],
    args: Any,
) -> None:
    torch.set_num_threads(1)
    let_nccl_share_the_gpu(rank)
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    result = fn(Worker(rank, num_workers, store, barrier, device), *args)
    store.set(f"result{rank}", pickle.dumps(result))


def let_nccl_share_the_gpu(rank: int) -> None:
    """Let NCCL take this process for another machine: it refuses two ranks on one GPU."""
    os.environ.update(NCCL_HOSTID=f"worker{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def in_turns(
    kinds: Mapping[str, Callable[[], T]], turns: int, warm_up: int = 1
) -> dict[str, list[T]]:
    """Call each once a turn, and return the results of all turns but the first by name.

    The order changes from turn to turn, so that no kind is always the first, and is the same on
    all workers.
    """
    order = random.Random(0)
    found: dict[str, list[T]] = {name: [] for name in kinds}
    for _ in range(warm_up + turns):
        for name in order.sample(list(kinds), len(kinds)):
            found[name].append(kinds[name]())
    return {name: values[warm_up:] for name, values in found.items()}


def slowest(results: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return by name when the last worker was done in each turn.

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


def make_parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's docstring, with ``--quick``."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="smallest size: shows that it runs, not what it costs"
    )
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """Give a parser ``--device``."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: all workers share the first GPU, and NCCL carries their messages",
    )


def print_machine() -> None:
    """One line that says where the numbers come from, and how busy this machine already is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(
        f"{cores} cores ({platform.machine()}), torch {torch.__version__}, one thread per process, "
        f"load before the start {load:.1f}"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        flush=True,
    )


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


def mean_and_deviation(values: Sequence[float], digits: int) -> str:
    """``1.02 (0.03)``: mean and standard deviation; infinite losses are counted instead."""
    if infinite := sum(math.isinf(value) for value in values):
        return f"{infinite} of {len(values)} diverged"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ({statistics.stdev(values):.{digits}f})"


def against(value: float, bound: float, digits: int = 2) -> str:
    """The bound, and whether a value keeps it: ``<= 1.10 ok``.

    Example:
        >>> against(1.2, 1.1)
        '<= 1.10 MISSED'
    """
    return f"<= {bound:.{digits}f} {'ok' if value <= bound else 'MISSED'}"


def at_least(value: float, bound: float, digits: int = 2) -> str:
    """The lower bound, and whether a value keeps it: ``>= 0.80 ok``.

    Example:
        >>> at_least(0.7, 0.8)
        '>= 0.80 MISSED'
    """
    return f">= {bound:.{digits}f} {'ok' if value >= bound else 'MISSED'}"
