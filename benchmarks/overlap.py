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

import torch
from common import Worker, against, make_parser, print_machine, print_table, run_workers, spread
from local_phase import SYNC_EVERY, make_model, make_round

from lightning_loco import DiLoCo, StepEngine

BOUND = 0.10
PHASE_IN_ROUNDS = 5.0
SHORTEST_PHASE_S = 0.05
KINDS = ("blocking", "overlap")


def time_turns(
    worker: Worker, width: int, turns: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(seconds waited, seconds at the boundary) of every counted round, for both kinds."""
    measured: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with worker.process_group():
        phase_s = SHORTEST_PHASE_S
        for turn in range(turns):
            for kind in KINDS if turn % 2 else KINDS[::-1]:
                found = run_turn(worker, kind, width, rounds, phase_s)
                if turn:  # the first turn only shows how long a round takes
                    measured[kind] += found
            if turn == 0:
                round_s = statistics.median(s for _, s in run_turn(worker, "blocking", width, 5, 0))
                phase_s = max(SHORTEST_PHASE_S, PHASE_IN_ROUNDS * share(worker, round_s))
    return measured


def share(worker: Worker, seconds: float) -> float:
    """The largest of the workers' numbers."""
    longest = torch.tensor([seconds])
    torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX)
    return longest.item()


def run_turn(
    worker: Worker, kind: str, width: int, rounds: int, phase_s: float
) -> list[tuple[float, float]]:
    """Several rounds of one kind, from a new engine on."""
    engine = StepEngine(
        make_model(width),
        DiLoCo(outer_momentum=0.0),
        sync_every=SYNC_EVERY,
        overlap=kind == "overlap",
    )
    found = []
    worker.wait_for_all()
    for _ in range(rounds + 2):
        waited_s = engine.statistics.wait_s
        boundary_s = make_round(engine, phase_s)
        found.append((engine.statistics.wait_s - waited_s, boundary_s))
    engine.finish()
    engine.close()
    return found[2:]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--width", type=int, default=512, help="20 layers of width x width")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="counted in every turn")
    options = parser.parse_args()
    if options.quick:
        options.workers, options.width, options.turns, options.rounds = [2], 128, 2, 3
    print_machine()
    rows = []
    for num_workers in options.workers:
        results = run_workers(
            time_turns, num_workers, options.width, 1 + options.turns, options.rounds
        )
        waited_ms, boundary_ms = (
            {
                kind: [1000 * pair[index] for result in results for pair in result[kind]]
                for kind in KINDS
            }
            for index in (0, 1)
        )
        ratio = statistics.mean(waited_ms["overlap"]) / statistics.mean(waited_ms["blocking"])
        num_millions = 20 * options.width * (options.width + 1) / 1e6
        rows.append(
            [
                f"{num_millions:.1f}M, {num_workers} workers",
                *(spread(waited_ms[kind]) for kind in KINDS),
                *(spread(boundary_ms[kind], digits=1) for kind in KINDS),
                f"{ratio:.3f}",
                against(ratio, BOUND),
            ]
        )
        print(f"done: {rows[-1][0]}", flush=True)
    print_table(
        [
            "per round and worker",
            *(f"{kind}: waited ms" for kind in KINDS),
            *(f"{kind}: boundary ms" for kind in KINDS),
            *("waited, ratio of means", "bound"),
        ],
        rows,
    )


if __name__ == "__main__":
    main()
