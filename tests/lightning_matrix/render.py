"""The page docs/feature_matrix.md, made of the table: `python -m tests.lightning_matrix.render`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.conftest import ROOT
from tests.lightning_matrix.table import (
    AS_DDP,
    STRATEGIES,
    TABLE,
    Apart,
    Better,
    Refused,
    Row,
    Verdict,
)

PAGE = ROOT / "docs" / "feature_matrix.md"

HEAD = """# Feature matrix

What comes of a feature of Lightning, or of an idiom of code written for DDP, under each strategy.
Every cell is a run of two workers in a test. The weights after fit are always finite, and equal on
both unless DDP leaves each worker its own.

- **=** as under DDP: the same steps, epochs, batches, hooks, logged names and files, or the same
  error.
- **+** better than DDP, which hangs, fails or goes wrong there.
- **~** ends well, but not as under DDP, which is in the nature of the method.
- **no**: refused with a clear message on all ranks.

This page is made from the table of the tests. Two of its rows need `transformers`, and are skipped
without; a job of the workflow for GitHub has it.
"""


def page() -> str:
    """The text of the page."""
    sections = [f"## {title}\n\n{table(rows)}" for title, rows in TABLE.items()]
    return "\n".join([HEAD, *sections])


def table(rows: list[Row]) -> str:
    """The rows as a table, and below it what its signs mean."""
    lines = ["| feature | " + " | ".join(STRATEGIES) + " |", "|---" * (len(STRATEGIES) + 1) + "|"]
    for row in rows:
        signs = " | ".join(sign(row.of(name)) for name in STRATEGIES)
        lines.append(f"| {row.feature} | {signs} |")
    notes = [note for row in rows for note in notes_of(row)]
    return "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""])


def sign(verdict: Verdict) -> str:
    """A verdict in a cell."""
    return {"as DDP": "=", "better": "+", "refused": "no", "apart": "~"}[verdict.words]


def notes_of(row: Row) -> Iterator[str]:
    """What is better, or what the message says."""
    told: list[Verdict] = [AS_DDP]
    for name in STRATEGIES:
        verdict = row.of(name)
        if verdict not in told:
            told.append(verdict)
            if isinstance(verdict, Refused):
                yield f'- {row.feature}: "{verdict.message}".'
            elif isinstance(verdict, (Better, Apart)):
                yield f"- {row.feature}: {verdict.how}."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
