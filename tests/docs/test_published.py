"""The tables of the page are the output of its commands."""

from __future__ import annotations

import re

import pytest

from benchmarks import published
from tests.harness.pages import doc

PAGE = doc("results/published.md")
SLOW = ("noloco", "streaming")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.soak if part in SLOW else ())
        for part in published.PARTS
    ],
)
def test_the_tables_are_the_output_of_the_command(
    part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    published.main([part])
    tables = capsys.readouterr().out.strip().split("\n\n")
    section = PAGE.text.partition(f"python benchmarks/published.py {part}\n")[2]
    section = section.partition("\n## ")[0]
    assert tables
    for table in tables:
        assert f"\n{table}\n" in section


def test_each_part_has_a_section() -> None:
    commands = re.findall(r"^python benchmarks/published\.py (\w+)$", PAGE.text, re.MULTILINE)
    assert commands == list(published.PARTS)


def test_an_unknown_part_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        published.main(["godput"])
    assert "godput: must be of goodput, streaming" in capsys.readouterr().err
