"""What it costs that workers may come and go: rounds of elastic members beside those of ranks.

Measured: the seconds at the end of a local phase, of DiLoCo with ``membership=Elastic(...)`` and of
DiLoCo in a process group, in turns of several rounds each, with the same model; blocking, and with
a round that travels during the next local steps. Then one more worker joins, and the longest round
from its coming until it takes part is compared with the median of those after it. A local step is a
sleep, as if a GPU computed while the CPU is free to communicate.

How to read it: the difference should be at most 25 ms for blocking rounds of 5M parameters, and 1
ms with overlap; a join should hold up the others for at most 1.5 rounds more than a usual one, in
the median of several joins, each of a run of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common import (
    HOST,
    Worker,
    against,
    make_parser,
    print_machine,
    print_table,
    run_workers,
    spread,
)
from local_phase import SYNC_EVERY, make_model, make_round

from lightning_loco import DiLoCo, Elastic, StepEngine

BOUNDS_MS = {"blocking": 25.0, "overlap": 1.0}
BOUND_JOIN = 1.5
JOINS_AFTER_S = 2.0
ROUNDS = 20


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """A lighthouse; its address."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        address = f"{HOST}:{probe.getsockname()[1]}"
    program = Path(sys.executable).with_name("torchft_lighthouse")
    settings = [f"--bind={address}", "--min_replicas=1", "--quorum_tick_ms=20"]
    process = subprocess.Popen(
        [program, *settings, "--heartbeat_timeout_ms=2000"], stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(0.5)
        yield address
    finally:
        process.kill()
        process.wait()


def make_engine(width: int, membership: Elastic | None, overlap: bool) -> StepEngine:
    """An engine of a new model."""
    return StepEngine(
        make_model(width),
        DiLoCo(outer_momentum=0.0),
        sync_every=SYNC_EVERY,
        overlap=overlap,
        membership=membership,
    )


def time_turns(
    worker: Worker, address: str, width: int, overlap: bool, turns: int, rounds: int, phase_s: float
) -> dict[str, list[float]]:
    """Milliseconds of every round, in both kinds of group."""
    found: dict[str, list[float]] = {"ranks": [], "elastic": []}
    for turn in range(turns):
        for kind in ("ranks", "elastic") if turn % 2 else ("elastic", "ranks"):
            membership = Elastic(address, min_workers=worker.num_workers, host=HOST)
            with contextlib.ExitStack() as stack:
                if kind == "ranks":
                    stack.enter_context(worker.process_group())
                engine = make_engine(width, membership if kind == "elastic" else None, overlap)
                engine.join()
                worker.wait_for_all()
                seconds = [make_round(engine, phase_s) for _ in range(rounds + 2)]
                engine.finish()
                worker.wait_for_all()
                engine.close()
            found[kind] += [1000 * one for one in seconds[2:]]
    return found


def time_join(worker: Worker, address: str, width: int) -> list[float]:
    """The longest round during the join, and the median of those after it, in milliseconds."""
    newcomer = worker.rank == worker.num_workers - 1
    engine = make_engine(
        width, Elastic(address, min_workers=worker.num_workers - 1, host=HOST), False
    )
    worker.wait_for_all()
    if newcomer:
        time.sleep(JOINS_AFTER_S)
    engine.join()
    found = []
    while engine.worker.round_index < ROUNDS:
        took = make_round(engine, 0.25)
        found.append((engine.statistics.members, 1000 * took))
    engine.finish()
    engine.close()
    if newcomer:
        return []
    first = sum(members < worker.num_workers for members, _ in found)
    seconds = [took for _, took in found]
    return [max(seconds[max(0, first - 2) : first + 3]), statistics.median(seconds[first + 3 :])]


def time_joins(count: int, address: str, millions: float, options: argparse.Namespace) -> list[str]:
    """One line of the table of joins."""
    usual, longest = [], []
    for _ in range(options.joins):
        results = run_workers(time_join, count + 1, address, options.width)
        longest.append(max(result[0] for result in results if result))
        usual.append(statistics.median(result[1] for result in results if result))
    more = [slow / round_ms - 1 for slow, round_ms in zip(longest, usual, strict=True)]
    return [
        f"{millions:.1f}M, {count} workers and one more",
        spread(usual, 1),
        spread(longest, 1),
        spread(more),
        against(statistics.median(more), BOUND_JOIN),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--width", type=int, default=512, help="20 layers of width x width")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="counted in every turn")
    parser.add_argument("--joins", type=int, default=7)
    options = parser.parse_args()
    if options.quick:
        options.workers, options.width, options.turns, options.rounds = [2], 128, 2, 3
        options.joins = 1
    print_machine()
    millions = 20 * options.width * (options.width + 1) / 1e6
    rows, joins = [], []
    with lighthouse() as address:
        for count in options.workers:
            for kind, bound in BOUNDS_MS.items():
                overlap = kind == "overlap"
                results = run_workers(
                    time_turns, count, address, options.width, overlap, options.turns,
                    options.rounds, 0.5 if overlap else 0.1,
                )  # fmt: skip
                ranks, elastic = (
                    [ms for result in results for ms in result[group]]
                    for group in ("ranks", "elastic")
                )
                more = statistics.median(elastic) - statistics.median(ranks)
                rows.append(
                    [
                        f"{millions:.1f}M, {count} workers, {kind}",
                        spread(ranks, 1),
                        spread(elastic, 1),
                        f"{more:.1f}",
                        against(more, bound, 1),
                    ]
                )
                print(f"done: {rows[-1][0]}", flush=True)
            joins.append(time_joins(count, address, millions, options))
            print(f"done: {joins[-1][0]}", flush=True)
    print_table(["a round, ms", "ranks", "elastic", "more", "bound"], rows)
    print_table(["a join, ms", "usual round", "longest", "more, in rounds", "bound"], joins)


if __name__ == "__main__":
    main()
