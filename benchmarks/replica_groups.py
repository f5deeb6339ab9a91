"""What workers of several ranks cost: 2 workers of 2 ranks, against what they replace.

Three comparisons, each in one run on the same 4 processes, in turns that change their order:

  local step    the demo's GPT in a Trainer, between rounds: DiLoCoStrategy(replica_size=2) against
                two jobs of plain DDP with 2 ranks each that run at the same time. Its CPU time is
                that of all threads of a rank, and its time is from batch to batch
  FSDP2 round   a blocking round of DiLoCo of 2 x 2 ranks that hold shards, against one of 2 workers
                of one rank with as many parameters in all; there are no local steps
  DDP round     a round of 2 x 2 ranks with DDP inside across an emulated link, with what the ranks
                of a worker share afterwards, against one of 4 workers of one rank. Each worker has
                one link, which its ranks share, so the link of 2 x 2 is used by twice as many ranks

A round is over when the last rank is done, from a common barrier on.

How to read it: times are medians over all turns. A ratio is the median over the turns of the ratio
of the two medians of a turn, with quartiles in brackets. A local step should take at most 1.10
times as long, an FSDP2 round 1.25 times, and a DDP round across a slow link 0.60 times. If only the
bandwidth counted, the last one would be 4 P bytes on each link against 6 P, which is 0.67; if only
the latency counted, 2 latencies against 6.

On a machine that is busy with other programs, only the CPU time of a local step says what the
rounds add to it. A rank waits for a core most of the time there, and for how long depends on all of
its threads: plain DDP waits less if its ranks have more threads that sleep and wake up, as the
ranks of a worker do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

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
from lightning.pytorch.strategies import DDPStrategy
from local_phase import make_model, shard
from local_step import time_fit

from lightning_loco import DiLoCo, DiLoCoStrategy, Link
from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.links import as_links
from lightning_loco.schedules import EverySteps

NUM_RANKS, SIZE = 4, 2
DROPPED_STEPS, DROPPED_ROUNDS = 5, 2
BOUND_STEP, BOUND_SHARDS, BOUND_LINK = 1.10, 1.25, 0.60
LINKS: dict[str, str | Link] = {"wan": "wan", "50 Mbit/s": Link(50, latency_s=0.001)}

Pair = tuple[float, float]
"""Seconds of 2 x 2 ranks, and of what it is compared with, in one turn."""


# ------------------------------------------------------------------ local steps


def time_steps(
    worker: Worker, sizes: dict[str, int], steps: int, turns: int
) -> list[tuple[Pair, Pair]]:
    """Seconds and CPU seconds of a local step of one rank, by turn; the first turn is dropped."""
    found = []
    for turn in range(1 + turns):
        pairs = {
            is_loco: time_step(worker, is_loco, sizes, steps)
            for is_loco in in_turn((True, False), turn)
        }
        (large_s, large_cpu_s), (other_s, other_cpu_s) = pairs[True], pairs[False]
        found.append(((large_s, other_s), (large_cpu_s, other_cpu_s)))
    return found[1:]


def time_step(
    worker: Worker, is_loco: bool, sizes: dict[str, int], steps: int
) -> tuple[float, float]:
    """Median seconds and mean CPU seconds of the local steps of one fit, without the first ones."""
    if is_loco:
        strategy = DiLoCoStrategy(sync_every=10**6, replica_size=SIZE)
        clock = time_fit(worker, strategy, NUM_RANKS, sizes, steps)
    else:
        clock = time_fit(worker, DDPStrategy(), SIZE, sizes, steps)
    seconds, cpu = clock.seconds[DROPPED_STEPS:], clock.cpu_seconds[DROPPED_STEPS:]
    return statistics.median(seconds), statistics.mean(cpu)


# ----------------------------------------------------------------------- rounds


def time_rounds(
    worker: Worker, width: int, rounds: int, turns: int, link: str | Link | None
) -> list[tuple[list[float], list[float]]]:
    """Seconds of this rank in every round of 2 x 2 ranks and of workers of one rank, by turn.

    Without a link the ranks of a worker hold shards, and there are two workers of one rank; with
    one the ranks hold the whole model, and each of four is also a worker.
    """
    found = []
    for turn in range(turns):
        seconds = {
            is_large: make_rounds(worker, is_large, width, rounds, link)
            for is_large in in_turn((True, False), turn)
        }
        found.append((seconds[True], seconds[False]))
    return found


def make_rounds(
    worker: Worker, is_large: bool, width: int, rounds: int, link: str | Link | None
) -> list[float]:
    """Seconds of this rank in every round; none if it does not take part."""
    num_ranks = SIZE if link is None and not is_large else NUM_RANKS
    seconds = []
    with worker.process_group(num_ranks):
        takes_part = worker.rank < num_ranks
        if takes_part:
            model = make_model(width)
            if link is None and is_large:
                shard(model, NUM_RANKS, SIZE)
            group = WorkerGroup.create(replica_size=SIZE if is_large else 1)
            links = None if link is None else as_links(link)
            settings = RoundSettings(DiLoCo(), EverySteps(1), link=links)
            engine = Engine.from_settings(model, settings, group)
        for _ in range(DROPPED_ROUNDS + rounds):
            worker.wait_for_all()
            started = time.perf_counter()
            if takes_part:
                engine.step()
                seconds.append(time.perf_counter() - started)
        if takes_part:
            engine.close()
    return seconds[DROPPED_ROUNDS:]


def in_turn(kinds: tuple[bool, bool], turn: int) -> tuple[bool, ...]:
    """The kinds, in an order that changes from turn to turn."""
    return kinds if turn % 2 else kinds[::-1]


def medians_of(results: list[list[tuple[list[float], list[float]]]]) -> list[Pair]:
    """By turn, the median times until the last rank is done."""
    return [
        (
            statistics.median(map(max, zip(*[pair[0] for pair in turn if pair[0]], strict=True))),
            statistics.median(map(max, zip(*[pair[1] for pair in turn if pair[1]], strict=True))),
        )
        for turn in zip(*results, strict=True)
    ]


# ------------------------------------------------------------------------ table


def row(name: str, pairs: Sequence[Pair], bound: float) -> list[str]:
    """One comparison."""
    ratios = [large / other for large, other in pairs]
    return [
        name,
        *(f"{1000 * statistics.median(pair[index] for pair in pairs):.1f}" for index in (0, 1)),
        spread(ratios),
        against(statistics.median(ratios), bound),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help="local steps in every turn")
    parser.add_argument("--rounds", type=int, default=15, help="counted in every turn")
    parser.add_argument("--width", type=int, default=512, help="20 layers of width x width")
    options = parser.parse_args()
    sizes: dict[str, int] = {}
    if options.quick:
        options.turns, options.steps, options.rounds, options.width = 2, 10, 3, 64
        sizes = QUICK_SIZES
    print_machine()
    steps = run_workers(time_steps, NUM_RANKS, sizes, options.steps, options.turns)
    rows = [
        row(name, [turn[index] for found in steps for turn in found], BOUND_STEP)
        for index, name in enumerate(("local step, DDP inside", "local step, CPU time"))
    ]
    print("done: local step", flush=True)
    rounds, turns = options.rounds, options.turns
    for name, width, link, bound in (
        ("round, FSDP2 inside", options.width, None, BOUND_SHARDS),
        *(
            (f"round, DDP inside, {name}", options.width // 2, link, BOUND_LINK)
            for name, link in LINKS.items()
        ),
    ):
        if link is not None:  # most of the time is sleep, which varies little
            rounds, turns = min(options.rounds, 5), min(options.turns, 4)
        results = run_workers(time_rounds, NUM_RANKS, width, rounds, turns, link)
        millions = 20 * width * (width + 1) / 1e6
        rows.append(row(f"{name}, {millions:.1f}M", medians_of(results), bound))
        print(f"done: {rows[-1][0]}", flush=True)
    print_table(["2 x 2 ranks", "2 x 2 ms", "other ms", "ratio", "bound"], rows)


if __name__ == "__main__":
    main()
