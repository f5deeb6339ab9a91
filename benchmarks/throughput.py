"""Whether rounds that stay under way keep the pace of training, by the clock on the wall.

Workers exchange a model across a link that is shaped to 100 Mbit/s (a token bucket in network
namespaces: Linux, as root; elsewhere it is the loopback, which shows little). Local steps are
sleeps, as if a GPU computed while the CPU communicates. First the blocking rounds show
how long an exchange takes; a local phase is then 1.2 times as long.

Measured: the wall time of several whole phases with their rounds, from the first local step of one
to the first of another, whatever the time was spent on; against the same sleeps without rounds.

How to read it: overlapped and streaming rounds should keep 95 % of the pace; blocking ones have
1.2 / 2.2 of it, 55 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from common import at_least, make_parser, print_machine, print_table
from libraries.links import Link, Unavailable
from local_phase import make_model
from peers import open_link

from lightning_loco.algorithms import DiLoCo, Mix
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import EverySteps, Schedule, Staggered

BOUND = 0.95
PHASE = 1.2
PORT = 29471
WAYS = {
    "blocking": lambda every: RoundSettings(DiLoCo(), EverySteps(every)),
    "overlap": lambda every: late(EverySteps(every, overlap=True)),
    "2 fragments": lambda every: late(Staggered(every, 2, every // 2), Mix(0.5)),
    "4 fragments": lambda every: late(Staggered(every, 4, every // 4), Mix(0.5)),
}


def late(schedule: Schedule, merge_policy: Mix | None = None) -> RoundSettings:
    """Rounds that stay under way."""
    return RoundSettings(DiLoCo(0.7, 0.0), schedule, merge_policy=merge_policy)


def make_phases(engine: Engine | None, steps: int, step_s: float) -> float:
    """Seconds that so many local steps take, with the rounds that are due."""
    started = time.perf_counter()
    for _ in range(steps):
        time.sleep(step_s)
        if engine is not None:
            engine.step()
    return time.perf_counter() - started


def work(options: argparse.Namespace) -> None:
    """One worker: print the seconds of all counted phases with rounds, and without."""
    os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options.host}:{PORT}",
        rank=options.rank,
        world_size=options.workers,
    )
    every, step_s = options.sync_every, options.phase_s / options.sync_every
    engine = Engine.from_settings(make_model(options.width), WAYS[options.way](every))
    make_phases(engine, 2 * every, step_s)
    with_rounds = make_phases(engine, options.rounds * every, step_s)
    engine.finish()
    engine.close()
    alone = make_phases(None, options.rounds * every, step_s)
    dist.destroy_process_group()
    print(json.dumps([with_rounds, alone]), flush=True)


def run(way: str, phase_s: float, link: Link, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of the slowest worker, with rounds and without."""
    words = [sys.executable, str(Path(__file__).resolve()), "--way", way, "--host", link.host(0)]
    words += ["--phase-s", str(phase_s), "--interface", link.interface]
    for name in ("workers", "width", "rounds", "sync_every"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    link.command(rank, [*words, "--rank", str(rank)]), stdout=subprocess.PIPE
                )
            )
            for rank in range(options.workers)
        ]
        said = [process.communicate(timeout=options.deadline)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"A worker of {way} has failed; see above.")
    seconds = [json.loads(text.splitlines()[-1]) for text in said]
    return max(s for s, _ in seconds), statistics.mean(alone for _, alone in seconds)


@contextlib.contextmanager
def any_link(folder: Path, options: argparse.Namespace) -> Iterator[Link]:
    """The shaped link, or the loopback where there is none."""
    with contextlib.ExitStack() as stack:
        try:
            name = "loopback" if options.quick else "shaped"
            link = stack.enter_context(open_link(name, folder, options.workers, options.rate))
        except Unavailable as error:
            print(f"shaped: skipped: {error}")
            link = stack.enter_context(open_link("loopback", folder, options.workers, ""))
        yield link


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="20 layers of width x width")
    parser.add_argument("--rounds", type=int, default=6, help="counted in every run")
    parser.add_argument("--sync-every", type=int, default=20, help="local steps of a round")
    parser.add_argument("--rate", default="100mbit", help="of the shaped link, as tc writes it")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="ROUNDS")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for one run")
    for name in ("--way", "--host", "--interface"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--phase-s", type=float, default=0.2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    if options.quick:
        options.width, options.rounds, options.only = 64, 2, ["4 fragments"]
    print_machine()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="loco-bench-") as folder,
        any_link(Path(folder), options) as link,
    ):
        with_rounds, alone = run("blocking", options.phase_s, link, options)
        exchange_s = (with_rounds - alone) / options.rounds
        phase_s = max(PHASE * exchange_s, 0.02 * options.sync_every)
        for way in options.only:
            with_rounds, alone = run(way, phase_s, link, options)
            pace = alone / with_rounds
            bound = "-" if way == "blocking" else at_least(pace, BOUND, 3)
            seconds = (f"{with_rounds / options.rounds:.3f}", f"{alone / options.rounds:.3f}")
            rows.append([f"{link.name}, {options.workers}, {way}", *seconds, f"{pace:.3f}", bound])
            print(f"done: {way}", flush=True)
    millions = 20 * options.width * (options.width + 1) / 1e6
    print(f"An exchange of {millions:.1f}M parameters takes {exchange_s:.3f} s.")
    header = ["link, workers, rounds", "s a phase", "s without", "pace", "bound"]
    print_table(header, rows)


if __name__ == "__main__":
    main()
