"""Processor time and branch coverage of every test, over all processes that tests start.

It says what a change of the tests loses: run it before and after, and compare. Lines of the package
that have moved in between are found again; arcs of lines that have changed are left out.

Usage:
    python -m tests.measure run FOLDER [arguments of pytest]
    python -m tests.measure compare OLD_FOLDER NEW_FOLDER

A run writes two files into its folder:

- ``times.jsonl``: seconds of wall time and of the processor of each test, with its marks;
- ``arcs.json.gz``: by file, its text and the arcs (from line, to line) that were taken, each with
  the test functions that took it. Those of a process that was killed are lost.

It needs the package ``coverage``.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HARNESS_S

ROOT = Path(__file__).resolve().parent.parent

TIMES, TEST = "LOCO_TEST_TIMES", "LOCO_TEST"
"""Environment: the file of times, and the function of the test that is running."""

SETTINGS = """
[run]
branch = true
parallel = true
concurrency = multiprocessing,thread
sigterm = true
disable_warnings = module-not-measured,no-data-collected
source_pkgs = lightning_loco
data_file = {data}
context = ${{LOCO_TEST-}}
"""

Arcs = dict[str, dict[tuple[int, int], set[str]]]
"""By file and arc, the test functions."""


# ----------------------------------------------------------- the plugin, in each pytest process


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tell coverage of the test, and write down what it takes."""
    if TIMES not in os.environ:
        return (yield)
    os.environ[TEST] = item.nodeid.split("[")[0]
    follow()
    began, used = time.monotonic(), processor_s()
    try:
        return (yield)
    finally:
        line = {
            "test": item.nodeid,
            "wall_s": round(time.monotonic() - began, 3),
            "processor_s": round(processor_s() - used, 3),
            "marks": sorted({mark.name for mark in item.iter_markers()}),
        }
        with open(os.environ[TIMES], "a") as times:
            times.write(json.dumps(line) + "\n")


def follow() -> None:
    """From now on what this process runs counts for the test in the environment."""
    if TEST in os.environ:
        import coverage

        if (current := coverage.Coverage.current()) is not None:
            current.switch_context(os.environ[TEST])


def counted(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function for a new process, where what it runs counts for the test that is running here."""
    return functools.partial(_count, os.environ.get(TEST), target)


def _count(test: str | None, target: Callable[..., Any], *args: Any) -> Any:
    if test is not None:
        os.environ[TEST] = test
        follow()
    return target(*args)


def processor_s() -> float:
    """Seconds of the processor that this process and all below it have used so far."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for process, found in processes():
        children.setdefault(int(found[1]), []).append(process)
        ticks[process] = sum(map(int, found[11:15]))
    total, below = 0, [os.getpid()]
    while below:
        process = below.pop()
        total += ticks.get(process, 0)
        below += children.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


# --------------------------------------------------------------------------------- the commands


def run(folder: Path, arguments: list[str]) -> int:
    """Run pytest under coverage; its exit status."""
    raw = folder.resolve() / "raw"
    raw.mkdir(parents=True)
    (folder / "coveragerc").write_text(SETTINGS.format(data=raw / "arcs"))
    environ = {
        **os.environ,
        TIMES: str(folder.resolve() / "times.jsonl"),
        "COVERAGE_PROCESS_START": str(folder.resolve() / "coveragerc"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.measure", *arguments]
    pytest_run = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True)
    try:
        status = pytest_run.wait()
    except KeyboardInterrupt:
        pytest_run.send_signal(signal.SIGINT)
        status = pytest_run.wait()
    wait_for_session(pytest_run.pid)
    write_arcs(folder)
    return status


def wait_for_session(session: int) -> None:
    """Wait for the processes of a session: those of the pool write their arcs after pytest ends."""
    deadline = time.monotonic() + HARNESS_S
    while any(found[3] == str(session) and found[0] != "Z" for _, found in processes()):
        assert time.monotonic() < deadline, "a process of the tests goes on after pytest"
        time.sleep(0.05)


def processes() -> Iterator[tuple[int, list[str]]]:
    """All processes, and what /proc says of each after its name."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()


def write_arcs(folder: Path) -> None:
    """Write down the arcs of all processes of a run."""
    arcs: Arcs = {}
    for path in (folder / "raw").iterdir():
        if path.stat().st_size:  # that of a process that was killed may be empty
            add(path, arcs)
    tests = sorted({test for file in arcs.values() for found in file.values() for test in found})
    index = {test: number for number, test in enumerate(tests)}
    files = {
        name: [[*arc, sorted(map(index.__getitem__, found))] for arc, found in sorted(file.items())]
        for name, file in sorted(arcs.items())
    }
    texts = {name: (ROOT / "lightning_loco" / name).read_text().splitlines() for name in files}
    with gzip.open(folder / "arcs.json.gz", "wt") as out:
        json.dump({"tests": tests, "files": files, "texts": texts}, out)


def add(path: Path, arcs: Arcs) -> None:
    """Add the arcs of one process to those of all."""
    with sqlite3.connect(path) as data:
        files = dict(data.execute("SELECT id, path FROM file"))
        tests = dict(data.execute("SELECT id, context FROM context"))
        rows = data.execute("SELECT file_id, context_id, fromno, tono FROM arc")
        for file, test, start, end in rows:
            folder, _, name = files[file].rpartition("/lightning_loco/")
            if folder != str(ROOT):  # a test has made up a file of that name
                continue
            found = arcs.setdefault(name, {}).setdefault((start, end), set())
            found.add(tests[test].rpartition("|")[2])


def read(folder: Path) -> dict[str, Any]:
    """What a run has written."""
    with gzip.open(folder / "arcs.json.gz", "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


def moved(old: list[str], new: list[str]) -> dict[int, int]:
    """Where the lines of a file are in a later one, by number; those that have changed are not."""
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return {one.a + i + 1: one.b + i + 1 for one in blocks for i in range(one.size)}


def compare(old: Path, new: Path) -> int:
    """Print the arcs that the old run took and the new one did not; 1 if there are any."""
    before, after = read(old), read(new)
    num_lost = num_arcs = 0
    for name, rows in before["files"].items():
        lines = moved(before["texts"][name], after["texts"].get(name, []))
        taken = {(start, end) for start, end, _ in after["files"].get(name, [])}
        for start, end, tests in rows:
            arc = [lines.get(abs(line), 0) * (1 if line > 0 else -1) for line in (start, end)]
            num_arcs += 1
            if 0 not in arc and tuple(arc) not in taken:
                num_lost += 1
                by = before["tests"][tests[-1]] or "a process of its own"
                print(f"{name}: {start} -> {end}, taken by {by} and {len(tests) - 1} more")
    print(f"{num_lost} of {num_arcs} arcs are lost")
    return int(bool(num_lost))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_run = commands.add_parser("run", help="run tests and write down what they take and reach")
    of_run.add_argument("folder", type=Path, help="a new folder for the results")
    of_compare = commands.add_parser("compare", help="say which arcs a second run does not take")
    of_compare.add_argument("folders", type=Path, nargs=2)
    chosen, rest = parser.parse_known_args()
    if chosen.command == "run":
        return run(chosen.folder, rest)
    return compare(*chosen.folders)


if __name__ == "__main__":
    sys.exit(main())
