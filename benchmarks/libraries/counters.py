"""Bytes on an interface and memory of processes, as Linux counts them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def bytes_sent(interface: str) -> float:
    """What an interface of this network namespace has sent so far; NaN where there is no counter.

    Headers of every layer count, and so do acknowledgements.
    """
    try:
        lines = (PROC / "net" / "dev").read_text().splitlines()
    except OSError:
        return math.nan
    for line in lines:
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return float(counts.split()[8])
    return math.nan


def forget_peak() -> None:
    """Reset the highest resident memory of this process."""
    with contextlib.suppress(OSError):
        (PROC / "self" / "clear_refs").write_text("5")


def resident_bytes() -> float:
    """Resident memory of this process."""
    try:
        return 1024 * _kilobytes(PROC / "self" / "status", "VmRSS:")
    except OSError:
        return math.nan


def peak_bytes() -> float:
    """Highest resident memory of this process, and what its child processes hold now.

    The children's part is their share (PSS): pages that they share with this process after a
    fork count once.
    """
    try:
        own = _kilobytes(PROC / "self" / "status", "VmHWM:")
    except OSError:
        return math.nan
    return 1024 * (own + sum(_share(child) for child in _descendants(os.getpid())))


def _share(process: int) -> float:
    try:
        return _kilobytes(PROC / str(process) / "smaps_rollup", "Pss:")
    except OSError:  # it has ended
        return 0.0


def _kilobytes(file: Path, field: str) -> float:
    line = next((x for x in file.read_text().splitlines() if x.startswith(field)), f"{field} 0")
    return float(line.split()[1])


def _descendants(process: int) -> Iterator[int]:
    for task in (PROC / str(process) / "task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield child
                yield from _descendants(child)


def marked(mark: str) -> Iterator[int]:
    """Processes whose environment has a variable of this form, ``NAME=value``."""
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
