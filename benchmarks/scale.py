"""What many workers cost on one machine: set-up, rounds, sync points and checkpoints by their
number.

The model is tiny (10 thousand parameters), so that what is left is the agreement between workers.
Workers are forked after all imports; worker 0 hosts the key-value store, as in a user's job.
Measured are the seconds from a common barrier until the last worker is done: medians over the
repetitions, which take everything once in random order, and over the jobs for the set-up.

  init         torch.distributed.init_process_group, which has connected all to the store
  connect      one more connection of each worker to the store: the set-up contains one, too
  groups       two process groups of gloo and nothing else: the set-up contains as many
  set-up       StepEngine(model, DiLoCo()): all of that, comparisons of the workers' settings and
               models, worker 0's parameters
  all-reduce   one of a flat vector of the same bytes
  round        a blocking round of DiLoCo: StepEngine.step() with sync_every=1
  ring         a blocking round of GASLoC on a ring: the number of workers should not matter
  one-peer     the same on the one-peer exponential graph
  gather       one all-gather of the rows that a sync point exchanges
  sync point      Engine.sync_point(), as before every validation
  checkpoint   a sync point, the consensus, and each worker's own state in a file

How to read it: there are more workers than cores, so everything waits for the processor, the raw
operations too. With 4 to 32 workers the set-up should take at most 2 s and a sync point at most 1.3
times as long as the gather. (Two workers gather by one message each way, within half a millisecond;
a sync point takes four of the store.)

When a client connects to PyTorch's store, both ask the name server for the name of the other. One
that loses answers to many questions holds up all workers for 5 s whenever they connect. So unless
RES_OPTIONS is set, they wait for 1 s here, and then ask no more.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from common import HOST, against, make_parser, print_machine, print_table
from torch import nn

from lightning_loco import DiLoCo, GASLoC, StepEngine
from lightning_loco.distributed.worker_status import WorkerStatus

SIZES = [2, 4, 8, 16, 32, 64]
WIDTH = 100
NUM_WARM_UP = 2
BOUND_SET_UP_S = 2.0
BOUND_SYNC_POINT = 1.3
BOUNDED = range(4, 33)

Seconds = dict[str, list[float]]

_processes = multiprocessing.get_context("fork")


class Clock:
    """Takes the time of what all workers begin together."""

    def __init__(self, wait_for_all: Callable[[], Any]) -> None:
        self._wait_for_all = wait_for_all
        self.seconds: Seconds = {}

    def take(self, name: str, work: Callable[[], Any]) -> Any:
        """Do it, and keep how long it has taken this worker."""
        self._wait_for_all()
        started = time.perf_counter()
        result = work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def measure(clock: Clock, rank: int, num_workers: int, port: int, repetitions: int) -> None:
    """Everything, on one worker."""
    options = {"init_method": f"tcp://{HOST}:{port}", "rank": rank, "world_size": num_workers}
    clock.take("init", lambda: dist.init_process_group("gloo", **options))
    store = dist.distributed_c10d._get_default_store()
    connection = clock.take("connect", store.clone)
    raw, rows = clock.take("groups", lambda: (dist.new_group(), dist.new_group()))
    model = make_model()
    engine = clock.take("set-up", lambda: StepEngine(model, DiLoCo(), sync_every=1))
    del connection
    gossips = [
        StepEngine(make_model(), GASLoC(), sync_every=1, topology=topology)
        for topology in ("ring", "one_peer_exponential")
    ]
    flat = torch.zeros(WIDTH * WIDTH + WIDTH)
    row = torch.zeros(WorkerStatus.width(0), dtype=torch.float64)
    table = [torch.empty_like(row) for _ in range(num_workers)]

    with tempfile.TemporaryFile() as file:

        def save() -> None:
            engine.show_consensus("checkpoint")
            engine.worker.show_local()
            file.seek(0)
            torch.save(engine.state_dict(), file)

        works: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda: dist.all_reduce(flat, group=raw),
            "round": engine.step,
            "ring": gossips[0].step,
            "one-peer": gossips[1].step,
            "gather": lambda: dist.all_gather(table, row, group=rows),
            "sync point": lambda: engine.sync_point("validation"),
            "checkpoint": save,
        }
        order = random.Random(0)  # the same on all workers
        for repetition in range(NUM_WARM_UP + repetitions):
            for name in order.sample(list(works), len(works)):
                clock.take(name, works[name])
                if repetition < NUM_WARM_UP:
                    clock.seconds[name].clear()
    for one in (engine, *gossips):
        clock.take("end", lambda: None)  # closing early may cut off a message to a slower worker
        one.close()


def run(connection: Connection, rank: int, num_workers: int, barrier: Any, *job: int) -> None:
    """What a worker's process does."""
    torch.set_num_threads(1)
    clock = Clock(barrier.wait)
    measure(clock, rank, num_workers, *job)
    connection.send(clock.seconds)
    barrier.wait()
    dist.destroy_process_group()


def one_job(num_workers: int, repetitions: int) -> Seconds:
    """Seconds of the slowest worker."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    barrier = _processes.Barrier(num_workers)
    workers = []
    for rank in range(num_workers):
        ours, theirs = _processes.Pipe(duplex=False)
        arguments = (theirs, rank, num_workers, barrier, port, repetitions)
        process = _processes.Process(target=run, args=arguments)
        process.start()
        theirs.close()
        workers.append((process, ours))
    results: list[Seconds] = [connection.recv() for _, connection in workers]
    for process, _ in workers:
        process.join()
    return {
        name: [max(values) for values in zip(*(r[name] for r in results), strict=True)]
        for name in results[0]
    }


def medians(num_workers: int, num_jobs: int, repetitions: int) -> dict[str, float]:
    """By name, over all jobs."""
    jobs = [one_job(num_workers, repetitions) for _ in range(num_jobs)]
    return {name: statistics.median(sum((j[name] for j in jobs), [])) for name in jobs[0]}


def bound(value: float, most: float, num_workers: int) -> str:
    return against(value, most) if num_workers in BOUNDED else "-"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=SIZES)
    parser.add_argument("--jobs", type=int, default=3, help="of each number of workers")
    parser.add_argument("--repetitions", type=int, default=20, help="in each job")
    options = parser.parse_args()
    if options.quick:
        options.workers, options.jobs, options.repetitions = [2, 4], 1, 3
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    print_machine()
    set_ups, rows = [], []
    for n in options.workers:
        found = medians(n, options.jobs, options.repetitions)
        ms = {name: f"{1000 * seconds:.1f}" for name, seconds in found.items()}
        ratio = {
            (name, raw): found[name] / found[raw]
            for name, raw in (("round", "all-reduce"), ("sync point", "gather"))
        }
        set_ups.append(
            [
                f"setting up {n} workers",
                *(f"{found[name]:.2f}" for name in ("init", "connect", "groups", "set-up")),
                bound(found["set-up"], BOUND_SET_UP_S, n),
            ]
        )
        rows.append(
            [
                f"{n} workers",
                *(ms["all-reduce"], ms["round"], f"{ratio['round', 'all-reduce']:.2f}"),
                *(ms["ring"], ms["one-peer"]),
                *(ms["gather"], ms["sync point"], f"{ratio['sync point', 'gather']:.2f}"),
                bound(ratio["sync point", "gather"], BOUND_SYNC_POINT, n),
                ms["checkpoint"],
            ]
        )
        print(f"done: {n} workers, load {os.getloadavg()[0]:.1f}", flush=True)
    print_table(["seconds", "init", "connect", "groups", "set-up", "bound"], set_ups)
    header = ["milliseconds", "all-reduce", "round", "round/all-reduce", "ring", "one-peer"]
    print_table(
        [*header, "gather", "sync point", "sync point/gather", "bound", "checkpoint"],
        rows,
    )


if __name__ == "__main__":
    main()
