"""What tests reach and what they take is written down, and what a change loses is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import measure
from tests.conftest import ROOT

UNIT = "tests/topology/test_base.py::test_receivers_follow_from_the_weights"
IN_THE_POOL = "tests/comm/test_checks.py::test_equal_models_pass_whatever_their_values"


def test_lines_that_have_moved_are_found_again_and_changed_ones_are_not() -> None:
    old = ["import a", "", "def f():", "    return 1"]
    new = ["import a", "import b", "", "def f():", "    return 2"]
    assert measure.moved(old, new) == {1: 1, 2: 3, 3: 4}


def run(folder: Path, *tests: str) -> None:
    command = [sys.executable, "-m", "tests.measure", "run", str(folder), "-q", *tests]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.process
@pytest.mark.soak
def test_a_run_knows_what_each_test_reaches_in_the_pool_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-p", "no:cacheprovider"]
    run(tmp_path / "both", UNIT, IN_THE_POOL, *options)
    run(tmp_path / "one", UNIT, *options)
    lines = (tmp_path / "both" / "times.jsonl").read_text().splitlines()
    assert [json.loads(line)["test"] for line in lines] == [UNIT, IN_THE_POOL]
    assert measure.compare(tmp_path / "one", tmp_path / "both") == 0
    assert measure.compare(tmp_path / "both", tmp_path / "one") == 1
    assert f"taken by {IN_THE_POOL}" in capsys.readouterr().out
