"""What it costs the training steps of a worker to read from peers, and to publish for them.

Measured: seconds per local step of the demo's model, with its batch size, on one worker with one
thread, in turns:

  alone             nothing else
  fetching          one fetch of 200 MB after the other; the training thread has a core
                    of its own, all else shares the other cores, the peer that serves as well
  fetching, shared  the same without cores set apart: three busy threads beside the one that trains
  at a rate         125 MB/s are fetched, by this worker or from it, without cores set apart, with
                    and without a key file
  publishing        200 MB are copied for others to read before every step

How to read it: ``/ alone`` is the median of the ratios of a turn to the one without anything next
to it. A step should take at most 1.10 times as long while fetching on a machine with a free core,
which is the second row; and at a rate of 125 MB/s at most 1 / 0.95 times as long for the worker
that fetches (1 / 0.90 with a key file) and 1 / 0.97 times for the one that is read from.
``publishing`` has no bound: a worker publishes for at most 5 % of its time, however large its model
is, and here it does in every step.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import torch
from common import (
    QUICK_SIZES,
    Worker,
    against,
    make_parser,
    print_machine,
    print_table,
    run_workers,
    spread,
)
from fetch import fetch_once, free_ports, new_key_file, open_node

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.demo.model import ByteGPT
from lightning_loco.gossip import PeerNode

RATE = 125e6
BATCH_SIZE = 8  # as in conf/
STEPS_PER_TURN = 12
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
BOUNDS = {
    "alone": None,
    "fetching": 1.10,
    "fetching, shared": None,
    "fetching at a rate": 1 / 0.95,
    "fetching at a rate, key file": 1 / 0.90,
    "serving at a rate": 1 / 0.97,
    "serving at a rate, key file": 1 / 0.97,
    "publishing": None,
}
KINDS = tuple(BOUNDS)


def time_steps(
    worker: Worker,
    ports: list[int],
    key_file: str,
    num_bytes: int,
    turns: int,
    sizes: dict[str, int],
) -> dict[str, list[float]]:
    """Seconds per local step of worker 0 in every turn, by what else happens."""
    plain = open_node(worker, ports[:2], num_bytes // 4, {})
    secured = open_node(worker, ports[2:], num_bytes // 4, {"key_file": key_file})
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    flat = torch.ones(num_bytes // 4)
    if worker.rank == 0:
        for node in (plain, secured):
            node.publish(flat, Tag(1, 1))
    step = make_step(sizes)
    for turn in range(1 + turns):
        for kind in random.Random(turn).sample(KINDS, len(KINDS)):
            set_cores_apart(worker, kind == "fetching")
            node = secured if kind.endswith("key file") else plain
            fetcher = 1 if kind.startswith("serving") else 0
            period_s = num_bytes / RATE if "at a rate" in kind else 0.0
            is_fetched = kind not in ("alone", "publishing")
            worker.wait_for_all()
            fetches = Fetches(node, period_s) if is_fetched and worker.rank == fetcher else None
            if worker.rank == 0:
                seconds[kind].append(step_with(kind, node, flat, step))
            worker.wait_for_all()
            if fetches is not None:
                fetches.end()
            worker.wait_for_all()
    plain.close()
    secured.close()
    return {kind: values[1:] for kind, values in seconds.items()}


def set_cores_apart(worker: Worker, apart: bool) -> None:
    """Give the thread that trains a core of its own and all others the rest, or all to all."""
    if not hasattr(os, "sched_setaffinity") or len(CORES) < 2:
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        trains = worker.rank == 0 and thread == os.getpid()
        own = CORES[:1] if trains else CORES[1:]
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(thread, own if apart else CORES)


def make_step(sizes: dict[str, int]) -> Callable[[], None]:
    """One local step of the demo's model."""
    gpt = ByteGPT(**sizes)
    optimizer = torch.optim.AdamW(gpt.parameters())
    windows = torch.randint(256, (BATCH_SIZE, gpt.hparams["context"] + 1))

    def step() -> None:
        logits = gpt(windows[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def step_with(kind: str, node: PeerNode, flat: torch.Tensor, step: Callable[[], None]) -> float:
    """Mean seconds of a local step in one turn."""
    started = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        if kind == "publishing":
            node.publish(flat, Tag(1, 1))
        step()
    return (time.perf_counter() - started) / STEPS_PER_TURN


class Fetches(threading.Thread):
    """Starts a fetch whenever the one before has ended, or once in a period."""

    def __init__(self, node: PeerNode, period_s: float) -> None:
        super().__init__()
        self._node = node
        self._period_s = period_s
        self._ending = threading.Event()
        self.start()

    def run(self) -> None:
        due = time.perf_counter()
        while not self._ending.is_set():
            fetch_once(self._node)
            due += self._period_s
            self._ending.wait(max(0.0, due - time.perf_counter()))

    def end(self) -> None:
        self._ending.set()
        self.join()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="parameters, in millions")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    sizes: dict[str, int] = {}
    if options.quick:
        options.megabytes, options.turns = 8, 3
        sizes = QUICK_SIZES
    print_machine()
    num_bytes = options.megabytes * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        arguments = (free_ports(4), new_key_file(folder), num_bytes, options.turns, sizes)
        seconds = run_workers(time_steps, 2, *arguments)[0]
    rows = []
    for kind, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds["alone"], strict=True)]
        highest = BOUNDS[kind]
        bound = "-" if highest is None else against(statistics.median(ratios), highest)
        milliseconds = f"{1000 * statistics.median(values):.1f}"
        rows.append([kind, milliseconds, spread(ratios), bound])
    print_table(["one training step", "ms", "/ alone", "bound"], rows)


if __name__ == "__main__":
    main()
