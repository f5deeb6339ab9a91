"""Explore orders of events: `make explore SECONDS=600 SEED=1`.

Every schedule that breaks a property is made shorter, printed, and written to build/exploration;
`python -m tests.exploration --replay FILE` runs it again and prints it event by event.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import subprocess
import time
import warnings
from collections import Counter
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.exploration.mutants import Mutant
    from tests.exploration.run import Outcome

ROOT = Path(__file__).resolve().parents[2]
FAILURES = ROOT / "build" / "exploration"
NIGHTS = ROOT / "docs" / "exploration_nights.csv"

_PROGRESS_S = 10.0
_SHRINK_S = 60.0
_SEEDS_PER_RUN = 10**6


class Report(NamedTuple):
    """What a process has found in one run."""

    world: str
    order: bytes
    num_events: int
    failure: str
    seed: int
    path: str


def main() -> int:
    """Explore, replay a schedule, or look for mutants; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.exploration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to explore")
    parser.add_argument("--seed", type=int, help="first seed (default: another one every time)")
    parser.add_argument("--world", action="append", help="explore this world only (repeatable)")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--replay", type=Path, help="run a schedule again, and print it")
    parser.add_argument("--mutants", nargs="?", const="", help="look for mutants with this name")
    parser.add_argument("--coverage", action="store_true", help="measure branches, in one process")
    parser.add_argument("--record", action="store_true", help=f"add the counts to {NIGHTS.name}")
    chosen = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(ROOT))  # of the processes that are started
    if chosen.replay:
        return show_replay(chosen.replay)
    worlds = chosen.world or list(_worlds())
    if chosen.mutants is not None:
        return look_for_mutants(worlds, chosen.mutants, chosen.seconds, chosen.jobs)
    seed = int(time.time()) % 10**6 if chosen.seed is None else chosen.seed
    if chosen.coverage:
        return measure_coverage(worlds, chosen.seconds, seed)
    return explore_all(worlds, chosen.seconds, seed, chosen.jobs, chosen.record)


def _worlds() -> dict[str, Any]:
    from tests.exploration.worlds import WORLDS

    return WORLDS


# ------------------------------------------------------------------------------- exploring


def explore_all(worlds: list[str], seconds: float, seed: int, jobs: int, record: bool) -> int:
    """Explore worlds in turn, in several processes; return 1 if something was found."""
    print(f"Exploring {', '.join(worlds)} for {seconds:g} s with SEED={seed}", flush=True)
    context = multiprocessing.get_context("spawn")
    reports: Any = context.Queue()
    deadline = time.time() + seconds
    processes = [
        context.Process(target=_explore, args=(worlds, seed, job, jobs, deadline, reports))
        for job in range(jobs)
    ]
    for process in processes:
        process.start()
    counts, events, failures = Counter[str](), Counter[str](), dict[str, Report]()
    orders: dict[str, set[bytes]] = {world: set() for world in worlds}
    began = shown = time.time()
    try:
        while any(process.is_alive() for process in processes) or not reports.empty():
            try:
                report = reports.get(timeout=0.5)
            except Empty:
                pass
            else:
                counts[report.world] += 1
                events[report.world] += report.num_events
                orders[report.world].add(report.order)
                if report.failure and report.failure not in failures:
                    failures[report.failure] = report
                    print(f"\nFOUND {report.failure}\n  {report.path}\n", flush=True)
            if time.time() - shown > _PROGRESS_S:
                shown = time.time()
                total = ", ".join(f"{world} {counts[world]:,}" for world in worlds)
                print(f"{shown - began:5.0f} s: {total}; found {len(failures)}", flush=True)
    finally:
        for process in processes:
            process.terminate()
    took = time.time() - began
    print(f"\n{'world':10}{'schedules':>11}{'orders':>10}{'events':>13}{'per hour':>10}")
    for world in worlds:
        print(
            f"{world:10}{counts[world]:11,}{len(orders[world]):10,}{events[world]:13,}"
            f"{round(counts[world] / took * 3600):10,}"
        )
    print(f"{counts.total() / took * 3600:,.0f} schedules per hour; found {len(failures)}.")
    for failure, report in failures.items():
        print(f"- {failure}\n  python -m tests.exploration --replay {report.path}")
    if record:
        different = sum(map(len, orders.values()))
        _record(seconds, counts.total(), different, events.total(), len(failures))
    died = [process.exitcode for process in processes if process.exitcode not in (0, -15)]
    if died:
        print(f"A process has ended with status {died[0]}.")
    return int(bool(failures or died or not counts))


def _explore(
    worlds: list[str], seed: int, job: int, jobs: int, deadline: float, reports: Any
) -> None:
    _be_quiet()
    from tests.exploration.run import explore
    from tests.exploration.shrink import shrink

    seen: set[str] = set()
    for number in itertools.count(job, jobs):
        if time.time() > deadline:
            return
        world, own_seed = worlds[number // jobs % len(worlds)], seed * _SEEDS_PER_RUN + number
        outcome = explore(world, own_seed)
        order = _order(outcome.schedule.choices)
        num_events, failure, path = len(outcome.steps), "", ""
        if outcome.failure:
            failure = f"{world}: {outcome.kind}"
            if failure not in seen:
                seen.add(failure)
                outcome = shrink(outcome, _SHRINK_S)
                name = re.sub(r"\W+", "_", f"{world}_{outcome.kind}_{own_seed}")
                file = FAILURES / f"{name}.json"
                outcome.schedule.save(file)
                path = str(file.relative_to(ROOT))
                print(_describe(outcome), flush=True)
        reports.put(Report(world, order, num_events, failure, own_seed, path))


def _order(choices: list[str]) -> bytes:
    return hashlib.blake2b("\n".join(choices).encode(), digest_size=8).digest()


def _be_quiet() -> None:
    """Use one thread for tensors, and show no logs or warnings, of which faults cause many."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _describe(outcome: Outcome) -> str:
    """Return the events of a run as a table, and what did not hold."""
    rows = [f"{step.time_s:9.3f}  {step.name:28.28}  {step.why}" for step in outcome.steps]
    if len(rows) > 400:
        rows[100:-300] = [f"          ... {len(rows) - 400} more events"]
    world, settings = outcome.schedule.world, outcome.schedule.settings
    end = f"{outcome.kind}: {outcome.failure}" if outcome.kind else "All properties hold."
    return "\n".join(
        [f"{world} {settings}", "   time s  event  (why)", *rows, outcome.details, end]
    )


def show_replay(path: Path) -> int:
    """Run a schedule again and print its events; return 1 if it still fails."""
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(format="           log: %(message)s")
    from tests.exploration.run import Schedule, replay

    outcome = replay(Schedule.load(path))
    print(_describe(outcome))
    return int(bool(outcome.failure))


def _record(seconds: float, *numbers: int) -> None:
    """Add a line to the counts by night."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    with NIGHTS.open("a", newline="") as file:
        csv.writer(file).writerow([today, found.stdout.strip() or "?", round(seconds), *numbers])


# --------------------------------------------------------------------------------- mutants


def look_for_mutants(worlds: list[str], part: str, seconds: float, jobs: int) -> int:
    """Put defects back one at a time, and print how long each took to find; 1 if one was not."""
    from tests.exploration.mutants import all_mutants

    chosen = [(world, one) for world, found in all_mutants().items() for one in found]
    chosen = [(world, one) for world, one in chosen if part in one.name and world in worlds]
    known = [(world, one) for world, one in chosen if one.lacks]
    chosen = [(world, one) for world, one in chosen if not one.lacks]
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_be_quiet) as pool:
        work = [(world, mutant, seconds) for world, mutant in chosen]
        missed = 0
        for name, took, count, failure in pool.imap_unordered(find_mutant, work):
            missed += not failure
            what = f"{took:6.1f} s, {count:5} schedules: {failure}" if failure else "NOT FOUND"
            print(f"{name:66.66} {what}", flush=True)
    for world, one in known:
        print(f"{f'{world}: {one.name}':66.66} is not found: {one.lacks}")
    print(f"{len(chosen) - missed} of {len(chosen) + len(known)} mutants were found.")
    return int(missed > 0)


def find_mutant(work: tuple[str, Mutant, float]) -> tuple[str, float, int, str]:
    """Explore with a defect until it is found; return name, seconds, schedules and what fails.

    Seconds are those of the processor, so that they are about the same on a busy machine.
    """
    from tests.exploration.run import explore

    world, mutant, seconds = work
    began, count, failure = time.process_time(), 0, ""
    with mutant.put_back():
        while not failure and time.process_time() < began + seconds:
            failure = explore(world, count, mutant.settings).kind
            count += 1
    took = time.process_time() - began
    if failure and explore(world, count - 1, mutant.settings).kind:
        failure += f", ALSO WITHOUT IT: seed {count - 1}"
    return f"{world}: {mutant.name}", took, count, failure


# -------------------------------------------------------------------------------- coverage


def measure_coverage(worlds: list[str], seconds: float, seed: int) -> int:
    """Explore in this process, and print which branches of the state machines were reached."""
    import coverage

    measured = coverage.Coverage(branch=True, data_file=None, config_file=False, messages=False)
    measured.start()  # before the modules are imported
    from tests.exploration.run import explore

    _be_quiet()
    kinds, deadline = _worlds(), time.time() + seconds
    for number in itertools.count():
        if time.time() > deadline:
            break
        explore(worlds[number % len(worlds)], seed * _SEEDS_PER_RUN + number)
    measured.stop()
    modules = sorted({module for world in worlds for module in kinds[world].covered})
    files = {module: str(ROOT / (module.replace(".", "/") + ".py")) for module in modules}
    FAILURES.mkdir(parents=True, exist_ok=True)
    report = FAILURES / "coverage.json"
    measured.json_report(morfs=[*files.values()], outfile=str(report))
    found = json.loads(report.read_text())["files"]
    totals = {str(ROOT / file): each["summary"] for file, each in found.items()}
    print(f"{'module':50}{'branches':>10}{'reached':>9}")
    for module, file in files.items():
        number, reached = totals[file]["num_branches"], totals[file]["covered_branches"]
        print(f"{module:50}{number:10}{reached / max(1, number):9.0%}")
    return 0
