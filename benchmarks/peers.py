"""DiLoCo beside other libraries: the same model, data, seeds and local steps.

Every run trains the demo's GPT on the demo's text with its own worker processes, and the libraries
follow each other in turn, forwards and then backwards. All share one training loop
(``libraries/training.py``); each has one small adapter beside it. Libraries that are not installed
are listed as absent, and a run that fails or is not done by the deadline says so.

  no library   the local steps alone: what the other columns are compared with
  blocking     what the library does after the last local step of a phase, and elsewhere outside of
               the local steps, until the last worker is done. The workers wait for each other
               before, over a pipe and off the clock. DDP has no rounds: its steps minus the same
               number of steps of workers alone
  waited       of that, how long the training thread had no processor: it waited for the network, a
               lock or another process (or for a core, on a busy machine)
  sent         bytes on the interface for each worker and round, with headers and acknowledgements
  more         a local step that ends no phase, minus one of workers alone (whose time stands there)
  memory       highest resident memory of a worker and its child processes, minus a worker alone
  val loss     of the workers' own models at the end, mean over the workers. The DiLoCos should have
               the same; PostLocalSGD averages without an outer step, DDP averages gradients, dpwa
               gossips
  wall         seconds of all counted rounds with their local steps

The loopback is in its own network namespace, the shaped link joins a namespace for each
worker at a switch behind a token bucket (Linux, as root); without namespaces the loopback counts
the bytes of all processes, and the shaped link is skipped.

How to read it: times are medians over all rounds of all repetitions, with quartiles. ``ours / it``
is the ratio of the medians of one repetition, and should be at most 0.5 to torchft's bucketised
DiLoCo and at most 0.2 to its DiLoCo with one all-reduce per parameter, on the loopback. On the
shaped link the bytes decide. Use an idle machine with as many cores as workers.

  python benchmarks/peers.py --png peers.png
  python benchmarks/peers.py --workers 2 4 --models 0.8M 5M --dpwa ../dpwa
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import QUICK_SIZES, make_parser, print_machine, print_table
from libraries.library import Job
from libraries.links import Link, Unavailable, loopback, shaped
from libraries.picture import draw
from libraries.running import Failed, run
from libraries.summary import HEADER, Runs, row, summarise
from libraries.table import ALONE, ENTRIES, found

SIZES = {
    "0.8M": {"num_layers": 4, "num_heads": 4, "width": 128, "context": 128},
    "5M": {"num_layers": 6, "num_heads": 4, "width": 256, "context": 128},
    "tiny": QUICK_SIZES,
}
LINKS = ("loopback", "shaped")


@contextlib.contextmanager
def open_link(name: str, folder: Path, workers: int, rate: str) -> Iterator[Link]:
    """One of the networks; Unavailable where it cannot be."""
    with loopback(folder) if name == "loopback" else shaped(folder, workers, rate) as link:
        yield link


def make_jobs(
    key: str, link: Link, size: str, workers: int, folder: Path, options: argparse.Namespace
) -> list[Job]:
    """What each worker of one run has to do."""
    return [
        Job(
            entry=key,
            rank=rank,
            num_workers=workers,
            host=link.host(rank),
            interface=link.interface,
            shares_interface=link.shared,
            size=SIZES[size],
            rounds=options.rounds,
            sync_every=options.sync_every,
            batch_size=options.batch_size,
            seed=options.seed,
            outer_lr=options.outer_lr,
            outer_momentum=options.outer_momentum,
            folder=str(folder),
            dpwa=options.dpwa and str(Path(options.dpwa).resolve()),
        )
        for rank in range(workers)
    ]


def measure(
    link: Link, size: str, workers: int, folder: Path, present: list[str],
    options: argparse.Namespace,
) -> tuple[Runs, dict[str, str]]:  # fmt: skip
    """All repetitions of all libraries on one link, and why the last of one failed."""
    runs: Runs = {key: [] for key in present}
    failed: dict[str, str] = {}
    for repetition in range(options.repetitions):
        others = [key for key in present if key != ALONE]
        alone = None
        for key in [ALONE, *(others[::-1] if repetition % 2 else others)]:
            jobs = make_jobs(key, link, size, workers, folder, options)
            try:
                results = run(jobs, link, options.deadline)
            except Failed as error:
                if key == ALONE:
                    raise SystemExit(f"the workers alone failed: {error}") from error
                runs[key].append(None)
                failed[key] = str(error)
                print(f"failed: {ENTRIES[key].title}: {error}", flush=True)
                continue
            alone = results if key == ALONE else alone
            runs[key].append(summarise(results, alone, options.sync_every))
        print(f"done: {link.name}, {size}, {workers} workers, {repetition + 1}", flush=True)
    return runs, failed


def print_rows(
    title: str, runs: Runs, failed: dict[str, str], keys: list[str], with_bounds: bool
) -> None:
    """The table of one link."""
    rows = []
    for key in keys:
        if key not in runs:
            rows.append([ENTRIES[key].title, "absent", *["-"] * (len(HEADER) - 2)])
        elif any(run is not None for run in runs[key]):
            rows.append(row(key, runs, with_bounds))
        else:
            rows.append([ENTRIES[key].title, "failed", *["-"] * (len(HEADER) - 2)])
    print(f"\n{title}:", end="")
    print_table(HEADER, rows)
    for key, why in failed.items():
        print(f"{ENTRIES[key].title}: failed: {why}")


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = make_parser(__doc__)
    names = list(ENTRIES)
    usual = [name for name in names if not name.startswith("ours_")]
    parser.add_argument("--only", nargs="+", choices=names, default=usual, metavar="LIBRARY",
                        help=f"some of {', '.join(names)}; the first always runs, and the "
                        "compressed ones only if they are named")  # fmt: skip
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["0.8M"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=10, help="counted in every run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--sync-every", type=int, default=10, help="local steps of a round")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.6)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--rate", default="100mbit", help="of the shaped link, as tc writes it")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--dpwa", help="a checkout of dpwa, which has no package")
    parser.add_argument("--png", type=Path, help="draw the last model and number of workers")
    options = parser.parse_args()
    if options.quick:
        options.models, options.workers, options.links = ["tiny"], [2], ["loopback"]
        options.rounds, options.repetitions = 2, 1
    if min(options.workers) < 2 or options.rounds < 1 or options.sync_every < 2:
        parser.error("it takes 2 workers, 1 round and 2 local steps a round at least")
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # takes workers and networks down
    print_machine()
    keys = [key for key in ENTRIES if key == ALONE or key in options.only]
    versions = {key: found(key, options.dpwa) for key in keys}
    for key in keys:
        if ENTRIES[key].package:
            version = versions[key]
            print(f"{ENTRIES[key].title}: {'absent' if version is None else version or 'found'}")
    present = [key for key in keys if versions[key] is not None]
    for size in options.models:
        for workers in options.workers:
            tables: dict[str, Runs] = {}
            for name in options.links:
                with tempfile.TemporaryDirectory(prefix="loco-bench-") as folder:
                    try:
                        with open_link(name, Path(folder), workers, options.rate) as link:
                            runs, failed = measure(
                                link, size, workers, Path(folder), present, options
                            )
                            tables[link.name] = runs
                            title = f"{link.name}, {size}, {workers} workers"
                            print_rows(title, runs, failed, keys, name == "loopback")
                    except Unavailable as error:
                        print(f"{name}: skipped: {error}")
            if options.png and tables:
                draw(tables, options.png)
                print(f"The picture is in {options.png}")


if __name__ == "__main__":
    main()
