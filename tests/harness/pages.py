"""The pages for users, and their contents."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from functools import cached_property
from pathlib import Path

from tests.harness.sources import ROOT

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    def __str__(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text without code blocks."""
        return _FENCED.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        found = re.findall(r"^```(\w+)\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)
        return [code for name, code in found if name == language]

    @property
    def shell(self) -> list[str]:
        """All lines of shell code."""
        return [line for block in self.blocks("bash") for line in block.splitlines()]

    @property
    def commands(self) -> list[str]:
        """The lines that start a training run."""
        return [line for line in self.shell if " train.py " in line]

    @property
    def ticked(self) -> list[str]:
        """All text in backticks."""
        return re.findall(r"`([^`\n]+)`", self.prose)

    @property
    def links(self) -> list[tuple[str, str]]:
        """Labels and targets of links and pictures, except links to the web."""
        found = re.findall(r"\[([^]]*)\]\(([^)]+)\)", self.prose)
        return [(label, link) for label, link in found if not link.startswith("https://")]

    def target(self, link: str) -> Path:
        """Return the file that a link on this page points to."""
        file = link.partition("#")[0]
        return (self.path.parent / file).resolve() if file else self.path

    @property
    def anchors(self) -> set[str]:
        """The anchors that GitHub generates for the headings."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        words = [re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings]
        return {word.replace(" ", "-") for word in words}

    def has_table(self, first_cell: str) -> bool:
        """Return whether there is a table whose first heading is ``first_cell``."""
        return f"\n| {first_cell} |" in self.text

    def table(self, first_cell: str) -> list[list[str]]:
        """Return the rows, without headings, of the table whose first heading is ``first_cell``."""
        lines = self.text.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
        rows = []
        for line in lines[start + 2 :]:
            if not line.startswith("|"):
                break
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        return rows


README = Page(ROOT / "README.md")
DOCS = [Page(path) for path in sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [README, *DOCS, *map(Page, sorted((ROOT / "examples").rglob("README.md")))]
LINKING = [
    *PAGES,
    *(
        Page(ROOT / f"{name}.md")
        for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT")
    ),
]


def doc(name: str) -> Page:
    """Return the page ``docs/<name>``."""
    return Page(ROOT / "docs" / name)


def overrides_of(command: str) -> list[str]:
    """Return the overrides in a command line of train.py, without Hydra's own flags."""
    words = shlex.split(command, comments=True)
    words = words[next(i for i, word in enumerate(words) if word.endswith("train.py")) + 1 :]
    return [word for word in words if not word.startswith("--") and word != "job"]


def benchmark_results(row: str, table: str) -> dict[str, dict[str, float]]:
    """Return the kept results of a row of the benchmark of low-communication training, by seed."""
    file = ROOT / "benchmarks" / "low_communication" / "results" / f"{row}.json"
    tables = json.loads(file.read_text(encoding="utf-8"))
    seeds: dict[str, dict[str, float]] = tables[table]["seeds"]
    return seeds
