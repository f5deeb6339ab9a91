"""What it costs the training steps of a worker to read from peers, and to publish for them.

Measured: seconds per local step of the demo's model, with its batch size, on one worker with one
thread, in turns:

  alone             nothing else
  fetching          one fetch of 200 MB after the other; the training thread has a core
                    of its own, all else shares the other cores, the peer that serves as well
  fetching, shared  the same without cores set apart: four busy threads beside the one that trains
  publishing        200 MB are copied for others to read before every step

How to read it: ``/ alone`` is the median of the ratios of a turn to the one without anything next
to it. A step should take at most 1.10 times as long while fetching on a machine with a free core,
which is the second row. ``publishing`` has no bound: a worker publishes for at most 5 % of its
time, however large its model is, and here it does in every step.
"""

from __future__ import annotations

import os
import random
import statistics
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
from fetch import fetch_once, free_ports, open_node

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.demo.model import ByteGPT
from lightning_loco.peers import PeerNode

BOUND = 1.10
BATCH_SIZE = 8  # as in conf/
STEPS_PER_TURN = 12
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
KINDS = ("alone", "fetching", "fetching, shared", "publishing")


def time_steps(
    worker: Worker, ports: list[int], num_bytes: int, turns: int, sizes: dict[str, int]
) -> dict[str, list[float]]:
    """Seconds per local step of worker 0 in every turn, by what else it does."""
    node = open_node(worker, ports, num_bytes // 4, {})
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    flat = torch.ones(num_bytes // 4)
    step = make_step(sizes)
    for turn in range(1 + turns):
        for kind in random.Random(turn).sample(KINDS, len(KINDS)):
            set_cores_apart(worker, kind == "fetching")
            worker.wait_for_all()
            if worker.rank == 0:
                seconds[kind].append(step_with(kind, node, flat, step))
            worker.wait_for_all()
    node.close()
    return {kind: values[1:] for kind, values in seconds.items()}


def set_cores_apart(worker: Worker, apart: bool) -> None:
    """Give the thread that trains a core of its own and all others the rest, or all to all."""
    if not hasattr(os, "sched_setaffinity") or len(CORES) < 2:
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        trains = worker.rank == 0 and thread == os.getpid()
        own = CORES[:1] if trains else CORES[1:]
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
    fetches = Fetches(node) if kind.startswith("fetching") else None
    started = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        if kind == "publishing":
            node.publish(flat, Tag(1, 1))
        step()
    seconds = (time.perf_counter() - started) / STEPS_PER_TURN
    if fetches is not None:
        fetches.end()
    return seconds


class Fetches(threading.Thread):
    """Starts a fetch whenever the one before has ended."""

    def __init__(self, node: PeerNode) -> None:
        super().__init__()
        self._node = node
        self._ending = False
        self.start()

    def run(self) -> None:
        while not self._ending:
            fetch_once(self._node)

    def end(self) -> None:
        self._ending = True
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
    seconds = run_workers(time_steps, 2, free_ports(2), num_bytes, options.turns, sizes)[0]
    rows = []
    for kind, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds["alone"], strict=True)]
        bound = against(statistics.median(ratios), BOUND) if kind == "fetching" else "-"
        milliseconds = f"{1000 * statistics.median(values):.1f}"
        rows.append([kind, milliseconds, spread(ratios), bound])
    print_table(["one training step", "ms", "/ alone", "bound"], rows)


if __name__ == "__main__":
    main()
