"""A room in which tests are together or alone."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.exclusive import turn
from tests.programs import Program


class Visitor:
    """Somebody who wants to be in the room until he is told to leave."""

    def __init__(self, folder: Path, alone: bool) -> None:
        self.entered, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._visit, args=(folder, alone))
        self._thread.start()

    def _visit(self, folder: Path, alone: bool) -> None:
        with turn(folder, alone):
            self.entered.set()
            self._leave.wait()

    def is_in(self) -> bool:
        return self.entered.wait(0.2)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join()


def test_many_are_in_the_room_together(tmp_path: Path) -> None:
    visitors = [Visitor(tmp_path, alone=False) for _ in range(3)]
    assert all(visitor.is_in() for visitor in visitors)
    for visitor in visitors:
        visitor.leave()


def test_who_wants_to_be_alone_waits_for_those_inside_and_goes_before_those_who_come(
    tmp_path: Path,
) -> None:
    first = Visitor(tmp_path, alone=False)
    assert first.is_in()
    lonely = Visitor(tmp_path, alone=True)
    assert not lonely.is_in()
    later = Visitor(tmp_path, alone=False)
    assert not later.is_in()
    first.leave()
    assert lonely.is_in()
    assert not later.is_in()
    lonely.leave()
    assert later.is_in()
    later.leave()


def test_an_error_empties_the_room(tmp_path: Path) -> None:
    with pytest.raises(KeyError), turn(tmp_path, alone=True):
        raise KeyError
    visitor = Visitor(tmp_path, alone=True)
    assert visitor.is_in()
    visitor.leave()


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
    options = ["-n2", "--dist=load", "--maxschedchunk=1", "-ptests.exclusive", f"--rootdir={ROOT}"]
    command = [sys.executable, "-m", "pytest", f"-c{ROOT}/pyproject.toml", *options, str(tmp_path)]
    with Program(command, ROOT) as program:
        program.succeed()
    times = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(times) == list("abcdefgh")
    together = {pair for pair in itertools.combinations(times, 2) if overlap(times, *pair)}
    assert together
    assert not {name for pair in together for name in pair} & set("efgh")


def overlap(times: dict[str, tuple[float, float]], one: str, other: str) -> bool:
    """Whether two tests have run at the same time."""
    return times[one][0] < times[other][1] and times[other][0] < times[one][1]
