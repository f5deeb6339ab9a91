"""The pages that users read, and what can be found in them."""

from __future__ import annotations

import dataclasses
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
        """The text without its blocks of code."""
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
        """The lines that start a training."""
        return [line for line in self.shell if " train.py " in line]

    @property
    def ticked(self) -> list[str]:
        """What stands between backticks."""
        return re.findall(r"`([^`\n]+)`", self.prose)

    @property
    def links(self) -> list[tuple[str, str]]:
        """Label and target of links and pictures, without those into the web."""
        found = re.findall(r"\[([^]]*)\]\(([^)]+)\)", self.prose)
        return [(label, link) for label, link in found if not link.startswith("https://")]

    def target(self, link: str) -> Path:
        """The file of a link on this page."""
        file = link.partition("#")[0]
        return (self.path.parent / file).resolve() if file else self.path

    @property
    def anchors(self) -> set[str]:
        """What GitHub makes of the headings."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        words = [re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings]
        return {word.replace(" ", "-") for word in words}

    def has_table(self, first_cell: str) -> bool:
        """Whether there is a table whose first heading is first_cell."""
        return f"\n| {first_cell} |" in self.text

    def table(self, first_cell: str) -> list[list[str]]:
        """The rows, without the headings, of the table whose first heading is first_cell."""
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
    """The page ``docs/<name>``."""
    return Page(ROOT / "docs" / name)


def overrides_of(command: str) -> list[str]:
    """What a command line gives to train.py; flags of Hydra's own are left out."""
    words = shlex.split(command, comments=True)
    words = words[next(i for i, word in enumerate(words) if word.endswith("train.py")) + 1 :]
    return [word for word in words if not word.startswith("--") and word != "job"]
