"""The lock that tests share, and that a test marked ``alone`` holds exclusively."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from pathlib import Path

import pytest

from tests.harness.exclusive import lock
from tests.harness.programs import Program
from tests.harness.sources import ROOT


class Holder:
    """A thread that holds the lock until :meth:`release`."""

    def __init__(self, folder: Path, exclusive: bool) -> None:
        self._taken, self._release = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(folder, exclusive))
        self._thread.start()

    def _hold(self, folder: Path, exclusive: bool) -> None:
        with lock(folder, exclusive):
            self._taken.set()
            self._release.wait()

    def has_it(self) -> bool:
        return self._taken.wait(10.0)

    def must_wait(self) -> bool:
        return not self._taken.wait(0.2)

    def release(self) -> None:
        self._release.set()
        self._thread.join()


def test_a_shared_lock_is_held_by_many(tmp_path: Path) -> None:
    holders = [Holder(tmp_path, exclusive=False) for _ in range(3)]
    assert all(holder.has_it() for holder in holders)
    for holder in holders:
        holder.release()


def test_an_exclusive_lock_waits_for_holders_and_goes_before_those_who_come_later(
    tmp_path: Path,
) -> None:
    first = Holder(tmp_path, exclusive=False)
    assert first.has_it()
    alone = Holder(tmp_path, exclusive=True)
    assert alone.must_wait()
    later = Holder(tmp_path, exclusive=False)
    assert later.must_wait()
    first.release()
    assert alone.has_it()
    assert later.must_wait()
    alone.release()
    assert later.has_it()
    later.release()


def test_an_error_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock(tmp_path, exclusive=True):
        raise KeyError
    holder = Holder(tmp_path, exclusive=True)
    assert holder.has_it()
    holder.release()


TESTS = """
import json
import time
from pathlib import Path

import pytest


def note(name):
    began = time.monotonic()
    time.sleep(0.2)
    (Path(__file__).parent / f"{name}.json").write_text(json.dumps([began, time.monotonic()]))


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_together(name):
    note(name)


@pytest.mark.alone
@pytest.mark.parametrize("name", ["e", "f", "g", "h"])
def test_alone(name):
    note(name)
"""


@pytest.mark.process
def test_marked_tests_run_alone(tmp_path: Path) -> None:
    (tmp_path / "test_times.py").write_text(TESTS)
    options = ["-n2", "--dist=load", "--maxschedchunk=1", "-ptests.harness.exclusive"]
    options += [f"--rootdir={ROOT}"]
    command = [sys.executable, "-m", "pytest", f"-c{ROOT}/pyproject.toml", *options, str(tmp_path)]
    with Program(command, ROOT) as program:
        program.succeed()
    times = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(times) == list("abcdefgh")
    together = {pair for pair in itertools.combinations(times, 2) if overlap(times, *pair)}
    assert together
    assert not {name for pair in together for name in pair} & set("efgh")


def overlap(times: dict[str, tuple[float, float]], one: str, other: str) -> bool:
    """Return whether two tests have run at the same time."""
    return times[one][0] < times[other][1] and times[other][0] < times[one][1]
