"""Run what depends on Lightning and on Python with other versions of them: `make test-versions`.

Every other Lightning of :data:`LIGHTNING` is installed into a folder of its own below `.versions/`,
which comes first on `PYTHONPATH`; PyTorch and all else are those of `.venv`. Every other Python
of this machine runs in the environment `.versions/python3.12`, say. These are made only when asked
for, with `make test-versions INSTALL=1`, because each brings a PyTorch of its own. What cannot be
installed is not run, and the list at the end says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.harness.sources import ROOT

FOLDER = ROOT / ".versions"

LIGHTNING = ("2.5.6", "2.6.6")
"""The oldest that pyproject.toml allows, then the last of each minor version, up to the newest."""

PYTHON = ("3.10", "3.11", "3.12", "3.13")

OLDER = {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"}
"""Older versions of LightningCLI use functions that newer versions of jsonargparse deprecate."""

TESTS = (
    "tests/strategies",
    "tests/callbacks",
    "tests/app/test_command_line.py",
    "tests/util/test_threads.py",
)
"""Tests of code that uses Lightning, and of threads."""

Outcome = str
"""One line: passed, FAILED, or why it was not run."""


class NotInstalled(Exception):
    """pip failed; the message is the last line of its output."""


def main() -> int:
    """Run all tests; return 1 if one run has failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", help="make environments of other Pythons")
    parser.add_argument("--only", default="", help="part of the names of the runs to make")
    parser.add_argument("tests", nargs="*", default=TESTS, help="files of tests to run")
    chosen = parser.parse_args()
    outcomes = {}
    for release in LIGHTNING:
        if chosen.only in (name := f"Lightning {release}"):
            outcomes[name] = try_lightning(release, chosen.tests)
    for release in PYTHON:
        if chosen.only in (name := f"Python {release}"):
            outcomes[name] = try_python(release, chosen.tests, chosen.install)
    print("\n" + "\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


def try_lightning(release: str, tests: Sequence[str] = TESTS) -> Outcome:
    """Run the tests with another version of Lightning."""
    if version("lightning") == release:
        return "that of .venv: make test, make test-faults and make soak use it"
    folder = FOLDER / f"lightning-{release}"
    if not folder.is_dir():
        try:
            install_lightning(release, folder)
        except NotInstalled as error:
            return f"not run: pip could not install it ({error})"
    return run_tests(f"Lightning {release}", sys.executable, tests, PYTHONPATH=str(folder), **OLDER)


def install_lightning(release: str, folder: Path) -> None:
    """Install a version of Lightning, without dependencies, into a folder; all of it or nothing."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    pip(sys.executable, "--no-deps", "--target", str(part), f"lightning=={release}")
    part.rename(folder)


def try_python(release: str, tests: Sequence[str] = TESTS, install: bool = False) -> Outcome:
    """Run the tests with another version of Python."""
    if release == "{}.{}".format(*sys.version_info):
        return "that of .venv: make test, make test-faults and make soak use it"
    command = find_python(release)
    if command is None:
        return f"not run: there is no python{release} on this machine"
    environment = FOLDER / f"python{release}"
    if not environment.is_dir():
        if not install:
            return f"not run: make test-versions INSTALL=1 makes {environment.relative_to(ROOT)}"
        try:
            make_environment(command, environment)
        except NotInstalled as error:
            return f"not run: pip could not install what it needs ({error})"
    return run_tests(f"Python {release}", str(environment / "bin" / "python"), tests)


def make_environment(command: str, folder: Path) -> None:
    """Make an environment of a Python with all dependencies; all of it or nothing."""
    subprocess.run([command, "-m", "venv", str(folder)], check=True)
    try:
        pip(str(folder / "bin" / "python"), "-c", "constraints.txt", "-e", ".[dev]")
    except BaseException:
        shutil.rmtree(folder)
        raise


def pip(python: str, *wanted: str) -> None:
    """Install packages; raise NotInstalled on failure, for example without a network."""
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled((done.stderr.strip().splitlines() or ["it says nothing"])[-1])


def find_python(release: str) -> str | None:
    """Return a Python on this machine: in the path, or managed by pyenv."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{release}.*/bin/python"))
    for command in [shutil.which(f"python{release}"), *map(str, kept)]:
        if (
            command is not None
            and subprocess.run([command, "-V"], capture_output=True).returncode == 0
        ):
            return command
    return None


def run_tests(name: str, python: str, tests: Sequence[str], **environ: str) -> Outcome:
    """Run the tests in a separate process, and print its exit status if it is not 0."""
    print(f"\n=== {name}: {' '.join(tests)}", flush=True)
    began = time.monotonic()
    at_once = [f"--numprocesses={os.environ.get('JOBS', '2')}", "--dist=worksteal"]
    command = [python, "-m", "pytest", "-q", *at_once, "-m", "not process and not soak", *tests]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ})
    minutes = (time.monotonic() - began) / 60
    status = done.returncode
    return f"{f'FAILED ({status})' if status else 'passed'} in {minutes:.1f} minutes"


if __name__ == "__main__":
    sys.exit(main())
