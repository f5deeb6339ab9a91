"""How long workers wait for a round when it travels behind the next local steps.

Measured: ``engine.statistics.wait_s``, the seconds a worker is blocked in exchanges, per round, of
AsyncDiLoCo (``overlap=True, warm_start=True``) and of blocking DiLoCo, in turns of several rounds
each, with the same model and the same ``sync_every``. A local step is a sleep, as if a GPU
computed while the CPU is free to communicate. It is made so long that a local phase takes
several times a blocking round. The first round of each turn is not counted: it fills the pipe.

How to read it: the ratio compares the waiting per round and should be at most 0.10. ``boundary`` is
the whole time spent at the end of a local phase, with packing and the outer step, which no overlap
hides on a CPU.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import harness
import torch
from harness import Worker, spread
from torch import nn

from lightning_loco import DiLoCo, StepEngine

BOUND = 0.10
SYNC_EVERY = 5
PHASE_IN_ROUNDS = 5.0
SHORTEST_PHASE_S = 0.05
KINDS = ("blocking", "overlap")
Waits = list[tuple[float, float]]
"""Seconds waited, and seconds at the boundary, of every counted round."""


def time_turns(worker: Worker, width: int, turns: int, rounds: int) -> dict[str, Waits]:
    """Time both kinds, with local phases that are several blocking rounds long."""
    with worker.process_group():
        blocking = run_turn(worker, "blocking", width, 5, 0.0)
        longest = torch.tensor([statistics.median(seconds for _, seconds in blocking)])
        torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX)
        phase_s = max(SHORTEST_PHASE_S, PHASE_IN_ROUNDS * longest.item())
        kinds = {kind: partial(run_turn, worker, kind, width, rounds, phase_s) for kind in KINDS}
        found = harness.in_turns(kinds, turns)
    return {kind: sum(values, []) for kind, values in found.items()}


def run_turn(worker: Worker, kind: str, width: int, rounds: int, phase_s: float) -> Waits:
    """Several rounds of one kind, with a new engine."""
    torch.manual_seed(0)
    engine = StepEngine(
        nn.Sequential(*(nn.Linear(width, width) for _ in range(20))),
        DiLoCo(outer_momentum=0.0),
        sync_every=SYNC_EVERY,
        overlap=kind == "overlap",
    )
    found = []
    worker.wait_for_all()
    for _ in range(rounds + 2):
        waited_s = engine.statistics.wait_s
        for _ in range(SYNC_EVERY):
            time.sleep(phase_s / SYNC_EVERY)
            started = time.perf_counter()
            engine.step()
        boundary_s = time.perf_counter() - started
        found.append((engine.statistics.wait_s - waited_s, boundary_s))
    engine.finish()
    engine.close()
    return found[2:]


def main() -> None:
    options = harness.parse(
        __doc__,
        workers=[2, 4],
        width=512,  # of 20 layers
        turns=4,
        rounds=10,  # counted in every turn
        quick={"workers": [2], "width": 128, "turns": 2, "rounds": 3},
    )
    rows = []
    for n in options.workers:
        settings = (options.width, options.turns, options.rounds)
        results = harness.run_workers(time_turns, n, *settings)
        waited, boundary = (
            [[1000 * pair[i] for r in results for pair in r[kind]] for kind in KINDS]
            for i in (0, 1)
        )
        ratio = statistics.mean(waited[1]) / statistics.mean(waited[0])
        row = [f"{20 * options.width * (options.width + 1) / 1e6:.1f}M, {n} workers"]
        row += [*map(spread, waited), *(spread(values, digits=1) for values in boundary)]
        rows.append([*row, f"{ratio:.3f}", harness.at_most(ratio, BOUND)])
        print(f"done: {row[0]}", flush=True)
    header = ["per round and worker"]
    header += [f"{kind}: {what} ms" for what in ("waited", "boundary") for kind in KINDS]
    harness.print_table([*header, "waited, ratio of means", "bound"], rows)


if __name__ == "__main__":
    main()
