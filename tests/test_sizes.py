"""Files are short: CONTRIBUTING.md states the rule, and this test keeps it."""

from __future__ import annotations

from statistics import median

import pytest

from tests.conftest import ROOT
from tests.test_layering import PACKAGE

LONGEST = 300
MEDIAN = 130


def sizes() -> dict[str, int]:
    """Lines of each module of the package; files that only collect names count, too."""
    return {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_no_file_is_long() -> None:
    long = {path: lines for path, lines in sizes().items() if lines > LONGEST}
    assert not long, f"more than {LONGEST} lines; find the second idea and give it a file: {long}"


def test_most_files_are_short() -> None:
    assert median(sizes().values()) <= MEDIAN


@pytest.mark.parametrize("number", [LONGEST, MEDIAN])
def test_contributing_states_the_rule(number: int) -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    (rule,) = [line for line in lines if "median" in line]
    assert str(number) in rule
