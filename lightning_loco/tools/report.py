"""The command ``lightning-loco report``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run with run.json, or such a file"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the page to write; default: report.html in the folder of a single run, "
        "comparison.html here for several",
    )


def run(args: argparse.Namespace) -> int:
    """Draw the page. Returns the exit status."""
    # Imported here, because the other commands shall run where templates cannot be read.
    from lightning_loco.report.page import PAGE_FILE, render_comparison, render_run
    from lightning_loco.report.record import RunRecord, replace_file

    paths = [Path(name) for name in args.runs]
    try:
        records = [RunRecord.load(path) for path in paths]
        if len(paths) == 1:
            folder = paths[0] if paths[0].is_dir() else paths[0].parent
            page = Path(args.output or folder / PAGE_FILE)
            text = render_run(records[0])
        else:
            page = Path(args.output or "comparison.html")
            text = render_comparison(dict(zip(names_of(paths), records, strict=True)))
        replace_file(page, text)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {page}")
    return 0


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the paths without the folder that all share, different from each other."""
    whole = [str(path.resolve()) for path in paths]
    shared = os.path.commonpath([os.path.dirname(name) for name in whole])
    short = [os.path.relpath(name, shared) for name in whole]
    return [
        name if short.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(short, start=1)
    ]
