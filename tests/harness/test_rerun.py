"""Failed tests run once more, alone; those that then pass are reported as flaky."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness.programs import Program

pytestmark = pytest.mark.process

PASSES = "def test_passes():\n    pass\n"
FLAKY = """
from pathlib import Path

def test_passes_the_second_time():
    ran = Path(__file__).with_suffix(".ran")
    first = not ran.exists()
    ran.touch()
    assert not first
"""
BROKEN = "def test_fails():\n    assert False\n"


def run(folder: Path, **files: str) -> tuple[int, str, list[str]]:
    """Run these test files; return exit status, output and the flaky tests."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    call = "from pathlib import Path; from tests.harness import rerun; "
    call += "raise SystemExit(rerun.main(['-q', '-n2'], Path(), Path('logs')))"
    with Program([sys.executable, "-c", call], folder) as program:
        status, output = program.finish()
    return status, output, (folder / "logs" / "flaky").read_text().splitlines()


def test_a_test_that_passes_the_second_time_is_flaky_and_does_not_fail_the_run(
    tmp_path: Path,
) -> None:
    status, output, flaky = run(tmp_path, passes=PASSES, flaky=FLAKY)
    assert status == 0, output
    assert flaky == ["test_flaky.py::test_passes_the_second_time"]
    assert output.splitlines()[-2] == f"flaky: {flaky[0]}"
    assert "1 failed, 1 passed" in (tmp_path / "logs" / "first.log").read_text()
    assert "1 passed" in (tmp_path / "logs" / "again.log").read_text()


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    status, output, flaky = run(tmp_path, flaky=FLAKY, broken=BROKEN)
    assert status == 1, output
    assert flaky == ["test_flaky.py::test_passes_the_second_time"]


def test_many_failures_do_not_run_again(tmp_path: Path) -> None:
    status, output, _ = run(tmp_path, **{f"broken{n}": BROKEN for n in range(11)})
    assert status == 1, output
    assert "once more" not in output
