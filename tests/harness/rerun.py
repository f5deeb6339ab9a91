"""Run pytest; failed tests run once more, alone, to distinguish flaky tests from broken ones.

`make test-faults` runs this. A test that fails and then passes is flaky: the last lines and the
file `build/test-logs/flaky` name it, both logs stay in that folder, and the exit status is 0. It is
a defect of the package or of the test all the same.

Usage:
    python -m tests.harness.rerun [arguments of pytest]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.sources import ROOT

LOGS = ROOT / "build" / "test-logs"

MOST = 10
"""With more failures than this, nothing is repeated."""

_FILE = "LOCO_FAILED_TESTS"
_failed: set[str] = set()


def main(arguments: list[str], folder: Path = ROOT, logs: Path = LOGS) -> int:
    """Run pytest once or twice in a folder; return the exit status."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "flaky").write_text("")
    status, failed = run(arguments, folder, logs / "first.log")
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= MOST:
        return status
    print(f"\n=== once more, alone: {len(failed)} tests that failed", flush=True)
    status, broken = run(["--numprocesses=0", *failed], folder, logs / "again.log")
    flaky = [name for name in failed if name not in broken]
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and flaky:
        (logs / "flaky").write_text("\n".join(flaky) + "\n")
        print(f"\nflaky: {' '.join(flaky)}\nTheir logs: {logs / 'first.log'}, {logs / 'again.log'}")
    return status


def run(arguments: list[str], folder: Path, log: Path) -> tuple[int, list[str]]:
    """Run pytest and copy its output to a file; return the exit status and the failed tests."""
    failed = log.with_suffix(".json")
    failed.write_text("[]")
    command = [sys.executable, "-m", "pytest", "-p", "tests.harness.rerun", *arguments]
    environ = {**os.environ, _FILE: str(failed)}
    with (
        log.open("wb") as copy,
        subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        while chunk := os.read(process.stdout.fileno(), 65536):
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            copy.write(chunk)
    return process.returncode, json.loads(failed.read_text())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the names of the tests that failed where :func:`run` reads them."""
    if not hasattr(session.config, "workerinput") and _FILE in os.environ:
        Path(os.environ[_FILE]).write_text(json.dumps(sorted(_failed)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
