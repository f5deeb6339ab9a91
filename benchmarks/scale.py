"""What many workers cost on one machine: set-up, rounds, sync points and checkpoints by their
number.

The model is tiny (10 thousand parameters), so that what is left is the agreement between workers.
Workers are forked after the imports. Measured are the seconds from a common barrier until the last
worker is done: medians over the repetitions, which take everything once in random order, and over
the jobs for the set-up.

  groups       two process groups of gloo and nothing else: the set-up contains as many
  set-up       StepEngine(model, DiLoCo()): these, one more connection to the store, comparisons of
               the workers' settings and models, worker 0's parameters
  all-reduce   one of a flat vector of the same bytes
  round        a blocking round of DiLoCo: StepEngine.step() with sync_every=1
  ring         a blocking round of GASLoC on a ring: the number of workers should not matter
  one-peer     the same on the one-peer exponential graph
  gather       one all-gather of the rows that a sync point exchanges
  sync point   Engine.sync_point(), as before every validation
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

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Worker, at_most, ms
from torch import nn

from lightning_loco import DiLoCo, GASLoC, StepEngine
from lightning_loco.distributed.worker_status import WorkerStatus

SIZES = [2, 4, 8, 16, 32, 64]
WIDTH = 100
NUM_WARM_UP = 2
BOUND_SET_UP_S = 2.0
BOUND_SYNC_POINT = 1.3
BOUNDED = range(4, 33)
TIMES = ("all-reduce", "round", "ring", "one-peer", "gather", "sync point", "checkpoint")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def measure(worker: Worker, repetitions: int) -> dict[str, list[float]]:
    """Seconds of everything, on one worker."""

    def timed(work: Callable[[], Any]) -> float:
        worker.wait_for_all()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    made: list[Any] = []
    with worker.process_group(), tempfile.TemporaryFile() as file:
        found = {
            "groups": [timed(lambda: made.extend((dist.new_group(), dist.new_group())))],
            "set-up": [
                timed(lambda: made.append(StepEngine(make_model(), DiLoCo(), sync_every=1)))
            ],
        }
        raw, rows, engine = made
        ring, one_peer = (
            StepEngine(make_model(), GASLoC(), sync_every=1, topology=topology)
            for topology in ("ring", "one_peer_exponential")
        )
        flat = torch.zeros(WIDTH * WIDTH + WIDTH)
        row = torch.zeros(WorkerStatus.width(0), dtype=torch.float64)
        table = [torch.empty_like(row) for _ in range(worker.num_workers)]

        def save() -> None:
            engine.show_consensus("checkpoint")
            engine.worker.show_local()
            file.seek(0)
            torch.save(engine.state_dict(), file)

        works: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda: dist.all_reduce(flat, group=raw),
            "round": engine.step,
            "ring": ring.step,
            "one-peer": one_peer.step,
            "gather": lambda: dist.all_gather(table, row, group=rows),
            "sync point": lambda: engine.sync_point("validation"),
            "checkpoint": save,
        }
        kinds = {name: partial(timed, work) for name, work in works.items()}
        found |= harness.in_turns(kinds, repetitions, NUM_WARM_UP)
        for one in (engine, ring, one_peer):
            worker.wait_for_all()  # closing early may cut off a message to a slower worker
            one.close()
    return found


def main() -> None:
    options = harness.parse(
        __doc__,
        workers=SIZES,
        jobs=3,  # of each number of workers
        repetitions=20,  # in each job
        quick={"workers": [2, 4], "jobs": 1, "repetitions": 3},
    )
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    set_ups, rows = [], []
    for n in options.workers:
        jobs = [
            harness.slowest(harness.run_workers(measure, n, options.repetitions))
            for _ in range(options.jobs)
        ]
        found = {name: [s for job in jobs for s in job[name]] for name in jobs[0]}
        set_up_s = statistics.median(found["set-up"])
        to_gather = statistics.median(found["sync point"]) / statistics.median(found["gather"])
        bounds = ("-", "-")
        if n in BOUNDED:
            bounds = (at_most(set_up_s, BOUND_SET_UP_S), at_most(to_gather, BOUND_SYNC_POINT))
        groups_s = statistics.median(found["groups"])
        set_ups.append([f"setting up {n} workers", f"{groups_s:.2f}", f"{set_up_s:.2f}", bounds[0]])
        row = [f"{n} workers", *(ms(found[name]) for name in TIMES[:-1])]
        rows.append([*row, f"{to_gather:.2f}", bounds[1], ms(found["checkpoint"])])
        print(f"done: {n} workers, load {os.getloadavg()[0]:.1f}", flush=True)
    harness.print_table(["seconds", "groups", "set-up", "bound"], set_ups)
    header = ["milliseconds", *TIMES[:-1], "sync point/gather", "bound", "checkpoint"]
    harness.print_table(header, rows)


if __name__ == "__main__":
    main()
