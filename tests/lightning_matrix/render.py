"""Writes the table as a page of the site: `python -m tests.lightning_matrix.render` prints it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.lightning_matrix.table import (
    AS_DDP,
    FEATURES_OF_TWO_RANKS,
    OF_TWO_RANKS,
    ROWS,
    STRATEGIES,
    TABLE,
    Apart,
    Better,
    Refused,
    Row,
    Verdict,
)

HEAD = """# Feature matrix

How each strategy behaves with the features of Lightning, and with idioms of code written for DDP.
Every cell is a run of two workers in a test. The weights after fit are always finite, and equal on
both workers unless they differ with DDP, too.

- **=** as with DDP: the same steps, epochs, batches, hooks, logged names and files, or the same
  error.
- **+** better than DDP, which hangs, fails or goes wrong there.
- **~** succeeds with another result than DDP, which is a property of the method.
- **no**: refused with a clear message on all ranks.

This page is generated from the table of the tests. Two of its rows need `transformers`, and are
skipped without it; a job of the GitHub workflow installs it.
"""

TWO_RANKS = """## Workers of two ranks

The same features with two [workers of two ranks](workers_of_several_ranks.md), compared with DDP on
four ranks: `DiLoCoStrategy(replica_size=2)`, and `LocoModelParallelStrategy` with DiLoCo,
`data_parallel_size=2` and `save_distributed_checkpoint=False`, whose model calls `fully_shard` in
`configure_model`. An empty cell was not tested: mostly, the code of the test fits no shards.

"""


def page() -> str:
    """Return the text of the page."""
    sections = [f"## {title}\n\n{table(rows)}" for title, rows in TABLE.items()]
    of_two_ranks = table([ROWS[feature] for feature in FEATURES_OF_TWO_RANKS], OF_TWO_RANKS)
    return "\n".join([HEAD, *sections, TWO_RANKS + of_two_ranks])


def table(rows: list[Row], names: list[str] = STRATEGIES) -> str:
    """Return the rows as a table, with notes below it."""
    lines = ["| feature | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        signs = " | ".join(sign(row.of(name)) for name in names)
        lines.append(f"| {row.feature} | {signs} |")
    notes = [note for row in rows for note in notes_of(row, names)]
    return "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""])


def sign(verdict: Verdict) -> str:
    """Return the symbol of a verdict for a cell."""
    return verdict.sign


def notes_of(row: Row, names: list[str]) -> Iterator[str]:
    """Yield explanations of better or different results, or the error message."""
    seen: list[Verdict] = [AS_DDP]
    for name in names:
        verdict = row.of(name)
        if verdict not in seen:
            seen.append(verdict)
            if isinstance(verdict, Refused):
                yield f'- {row.feature}: "{verdict.message}".'
            elif isinstance(verdict, (Better, Apart)):
                yield f"- {row.feature}: {verdict.how}."


if __name__ == "__main__":
    print(page())
