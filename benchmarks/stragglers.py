"""What one slow worker costs the others, and what averaging by the clock costs when all are equal.

Measured: local steps per second of the demo's byte-level GPT, with its batch size, on 4 workers, in
turns of some seconds each, in changing order, in the same processes with one thread each:

  alone     no communication: the rate to keep
  async     ClockEngine(interval_s=0.5): asynchronous model averaging
  pairwise  PairwiseAverage(1.0): every local step fetches from a random peer
  ddp       gradients are averaged in every step

once with worker 0 sleeping so long after each step that a step takes ten times as long, where the
rate is the other three's; and once with all workers equal.

How to read it: ``/ alone`` is the median of the ratios of a turn to the one without communication
next to it. With a straggler it should be at least 0.95 for async and pairwise; with equal workers
the time per step of async should be at most 1.05 of that alone. ``hidden`` is the share of an
averaging round, from the snapshot to the moved parameters, in which training went on: at least
0.95. With fewer cores than workers all are slower, alone and together, and ratios are noisy.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import harness
import torch
from harness import Worker, at_least, ratios, spread
from torch.nn.parallel import DistributedDataParallel

from lightning_loco import ClockEngine, PairwiseAverage, PairwiseEngine
from lightning_loco.app.demo.model import ByteGPT

NUM_WORKERS = 4
SLOWDOWN = 10
BATCH_SIZE = 8  # as in conf/
KINDS = ("alone", "async", "pairwise", "ddp")
BOUND_STRAGGLER = 0.95
BOUND_EQUAL = 1.05
BOUND_HIDDEN = 0.95


class Turn(NamedTuple):
    """The rate of one worker in one turn, its typical step, and how well its rounds were hidden."""

    rate: float
    step_s: float
    hidden: float | None
    exchanges: int


def run_turn(
    worker: Worker, kind: str, sizes: dict[str, int], seconds: float, delay_s: float
) -> Turn:
    """Train for some seconds, with a new model and a new engine."""
    torch.manual_seed(0)
    gpt = ByteGPT(**sizes)
    model: Any = DistributedDataParallel(gpt) if kind == "ddp" else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine: Any = None
    if kind == "async":
        engine = ClockEngine(gpt, interval_s=0.5)
    elif kind == "pairwise":
        engine = PairwiseEngine(gpt, PairwiseAverage(1.0))
    windows = torch.randint(256, (BATCH_SIZE, gpt.hparams["context"] + 1))
    began_round = 0.0
    at_boundary, in_rounds = 0.0, 0.0
    loss = torch.tensor(5.5)
    durations: list[float] = []
    worker.wait_for_all()
    started = now = time.perf_counter()
    while now < started + seconds:
        began_step = now
        if kind == "pairwise":
            engine.update_send(loss.item())
        logits = model(windows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(delay_s)
        if engine is not None:
            before = time.perf_counter()
            rounds = engine.statistics.rounds
            if engine.step():
                after = time.perf_counter()
                at_boundary += after - before
                if engine.statistics.rounds > rounds:
                    in_rounds += after - began_round
                else:
                    began_round = before
        now = time.perf_counter()
        durations.append(now - began_step)
        if kind == "ddp":  # all stop in the same step
            over = torch.tensor([float(now >= started + seconds)])
            torch.distributed.all_reduce(over, op=torch.distributed.ReduceOp.MAX)
            if over:
                break
    rate = len(durations) / (time.perf_counter() - started)
    worker.wait_for_all()
    exchanges = 0 if engine is None else engine.statistics.rounds
    if engine is not None:
        engine.finish()
        engine.close()
    hidden = 1 - at_boundary / in_rounds if kind == "async" and in_rounds else None
    return Turn(rate, statistics.median(durations), hidden, exchanges)


def run_turns(
    worker: Worker, sizes: dict[str, int], seconds: float, turns: int, straggling: bool
) -> dict[str, list[Turn]]:
    """All kinds in changing order, after a first turn that shows how long a step takes."""
    with worker.process_group():
        delay_s = 0.0
        first = run_turn(worker, "alone", sizes, seconds, 0.0)
        if straggling and worker.rank == 0:
            delay_s = (SLOWDOWN - 1) * first.step_s
        kinds = {kind: partial(run_turn, worker, kind, sizes, seconds, delay_s) for kind in KINDS}
        return harness.in_turns(kinds, turns, warm_up=0)


def main() -> None:
    quick = {"seconds": 0.7, "turns": 1}
    options = harness.parse(__doc__, seconds=8.0, turns=5, quick=quick)
    sizes = harness.QUICK_SIZES if options.quick else {}
    for straggling in (True, False):
        settings = (sizes, options.seconds, options.turns, straggling)
        counted = harness.run_workers(run_turns, NUM_WORKERS, *settings)[int(straggling) :]
        rates = {
            kind: [
                statistics.mean(r[kind][turn].rate for r in counted)
                for turn in range(options.turns)
            ]
            for kind in KINDS
        }
        rows = []
        for kind in KINDS:
            turns = [turn for r in counted for turn in r[kind]]
            of_alone = ratios(rates[kind], rates["alone"])
            lowest = {"async": BOUND_STRAGGLER, "pairwise": BOUND_STRAGGLER}.get(kind)
            if not straggling:
                lowest = 1 / BOUND_EQUAL if kind == "async" else None
            row = [kind, f"{statistics.median(rates[kind]):.2f}", spread(of_alone)]
            row += [at_least(statistics.median(of_alone), lowest) if lowest else ""]
            if hidden := [turn.hidden for turn in turns if turn.hidden is not None]:
                middle = statistics.median(hidden)
                row += [f"{middle:.3f}", at_least(middle, BOUND_HIDDEN)]
            else:
                row += ["-", ""]
            rows.append([*row, f"{statistics.mean(turn.exchanges for turn in turns):.0f}"])
        who = "3 fast workers, 1 ten times slower" if straggling else "4 equal workers"
        header = [who, "steps/s", "/ alone", "bound", "hidden", "bound", "exchanges"]
        harness.print_table(header, rows)


if __name__ == "__main__":
    main()
