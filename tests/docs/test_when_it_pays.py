"""The tables of the page equal the output of its commands."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from lightning_loco.tools.plan.run import add_arguments, run
from tests.harness.pages import doc

PAGE = doc("when_it_pays.md")
SHOWN = re.findall(
    r"```bash\n(lightning-loco plan [^\n]*)\n```\n\n```text\n(.*?)\n```", PAGE.text, re.S
)


def test_commands_and_their_output_are_shown() -> None:
    assert len(SHOWN) == 5


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_the_output_is_that_of_the_command(
    command: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line ``...`` stands for omitted output."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(shlex.split(command)[2:])) == 0
    printed = capsys.readouterr().out
    for part in output.split("\n...\n"):
        before, found, printed = printed.partition(part)
        assert found, part


def test_numbers_in_the_text_are_those_of_the_tables() -> None:
    """The remaining text follows from these numbers by hand."""
    first = SHOWN[0][1]
    assert re.search(r"^DDP .* 0\.24  0$", first, re.M)
    assert re.search(r"^DiLoCo, int8 .* 1\.87 ", first, re.M)
    assert re.search(r"^Streaming DiLoCo, int8 <- .* 2\.00 ", first, re.M)
    text = " ".join(PAGE.text.split())
    assert "1.87 times as fast as one" in text
    assert "the speed in the table is 0.24" in text
