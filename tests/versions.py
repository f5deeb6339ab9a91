"""Run what depends on Lightning and on Python with other versions of them: `make test-versions`.

Every other Lightning of :data:`LIGHTNING` is installed into a folder of its own below `.versions/`,
which comes first on `PYTHONPATH`; PyTorch and all else are those of `.venv`. Every other Python
of this machine runs in the environment `.versions/python3.12`, say. These are made only when asked
for, with `make test-versions INSTALL=1`, because each brings a PyTorch of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".versions"

LIGHTNING = ("2.5.0", "2.5.6", "2.6.6")
"""The oldest that pyproject.toml allows, the last of each minor version, and the newest."""

PYTHON = ("3.10", "3.11", "3.12", "3.13")

OLDER = {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"}
"""The LightningCLI of older versions calls what newer versions of jsonargparse warn of."""

TESTS = ("tests/strategies", "tests/callbacks", "tests/test_threads.py")

Outcome = str
"""One line: passed, FAILED, or why it was not run."""


def main() -> int:
    """Run them all; the exit status is 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", help="make environments of other Pythons")
    parser.add_argument("--only", default="", help="part of the names of the runs to make")
    chosen = parser.parse_args()
    outcomes = {}
    for release in LIGHTNING:
        if chosen.only in (name := f"Lightning {release}"):
            outcomes[name] = try_lightning(release)
    for release in PYTHON:
        if chosen.only in (name := f"Python {release}"):
            outcomes[name] = try_python(release, chosen.install)
    print("\n" + "\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    return int("FAILED" in outcomes.values())


def try_lightning(release: str) -> Outcome:
    """Run the tests with another version of Lightning."""
    if version("lightning") == release:
        return "that of .venv: make test and make test-long run everything with it"
    folder = FOLDER / f"lightning-{release}"
    if not (folder / f"lightning-{release}.dist-info").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "--no-deps", "--target", str(folder), f"lightning=={release}"], check=True
        )
    return run_tests(f"Lightning {release}", sys.executable, PYTHONPATH=str(folder), **OLDER)


def try_python(release: str, install: bool) -> Outcome:
    """Run the tests with another version of Python."""
    if release == "{}.{}".format(*sys.version_info):
        return "that of .venv: make test and make test-long run everything with it"
    command = find_python(release)
    if command is None:
        return f"not run: there is no python{release} on this machine"
    environment = FOLDER / f"python{release}"
    python = environment / "bin" / "python"
    if not python.exists():
        if not install:
            return f"not run: make test-versions INSTALL=1 makes {environment.relative_to(ROOT)}"
        subprocess.run([command, "-m", "venv", str(environment)], check=True)
        wanted = ["-c", "constraints.txt", "-e", ".[dev]"]
        subprocess.run([str(python), "-m", "pip", "install", *wanted], check=True, cwd=ROOT)
    return run_tests(f"Python {release}", str(python))


def find_python(release: str) -> str | None:
    """A Python of this machine: on the path, or one that pyenv keeps."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{release}.*/bin/python"))
    for command in [which(f"python{release}"), *map(str, kept)]:
        if (
            command is not None
            and subprocess.run([command, "-V"], capture_output=True).returncode == 0
        ):
            return command
    return None


def run_tests(name: str, python: str, **environ: str) -> Outcome:
    """Run the tests in a process of their own."""
    print(f"\n=== {name}", flush=True)
    command = [python, "-m", "pytest", "-q", "-m", "not long", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ})
    return "passed" if done.returncode == 0 else "FAILED"


if __name__ == "__main__":
    sys.exit(main())
