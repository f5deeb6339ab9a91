"""``lightning-loco replay``: repeats the merges of a tape, and shows where a result differs."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_loco.syncer.tape import replay

EQUAL, DIFFERS, MISSING = 0, 1, 3
"""Exit statuses."""


def run(args: argparse.Namespace) -> int:
    """Repeat the merges of the tape in ``args.folder``. Returns the exit status.

    Raises:
        ValueError: If there is no tape, or its method cannot be read.
    """
    folder = Path(args.folder)
    inside = folder / "tape"  # of the folder of a syncer
    counts = {EQUAL: 0, DIFFERS: 0, MISSING: 0}
    for one in replay(inside if inside.is_dir() else folder):
        kind = EQUAL if one.problem is None else DIFFERS if one.differs else MISSING
        counts[kind] += 1
        if kind != EQUAL and not args.quiet:
            print(f"round {one.round}, fragment {one.fragment}: {one.problem}")
    print(
        f"{sum(counts.values())} merges: {counts[EQUAL]} equal bit for bit, "
        f"{counts[DIFFERS]} different, {counts[MISSING]} that cannot be repeated"
    )
    return next((kind for kind in (DIFFERS, MISSING) if counts[kind]), EQUAL)
