"""What the main file of a checkpoint says about the files beside it."""

from __future__ import annotations

import re
import secrets
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from lightning.fabric.plugins import CheckpointIO

from lightning_loco.algorithms import Algorithm

if TYPE_CHECKING:
    from lightning_loco.strategies.driven import Engine

KEY = "lightning_loco"
"""Where the main file keeps it."""

NEW_RUN = (
    "To start a new run from its weights alone, use "
    "YourModule.load_from_checkpoint(path) and fit without ckpt_path."
)
"""What remains when side files cannot be used."""

_FORMAT = 3
_STAMP = re.compile(rb"step\d+-[0-9a-f]{8}")


def new_stamp(steps: int) -> str:
    """A name for one save that no other save has.

    Args:
        steps: Local steps made so far.
    """
    return f"step{steps}-{secrets.token_hex(4)}"


def is_stamp(value: Any) -> bool:
    """Whether this can be a name of :func:`new_stamp`, and so is no path to elsewhere."""
    return isinstance(value, str) and _STAMP.fullmatch(value.encode()) is not None


def steps_of(stamp: str) -> int:
    """The local steps that a stamp tells; 0 if it is none."""
    return int(stamp[4:].partition("-")[0]) if is_stamp(stamp) else 0


def entry_of(engine: Engine, stamp: str) -> dict[str, Any]:
    """The entry of the main file that ties it to its side files: plain values only."""
    return {
        "format": _FORMAT,
        "stamp": stamp,
        "num_workers": engine.worker.group.num_workers,
        "algorithm": type(engine.settings.algorithm).__name__,
        "settings": engine.settings.describe(),
        "round_index": engine.worker.round_index,
    }


def check_entry(entry: Any, algorithm: Algorithm, num_workers: int, path: str | Path) -> str:
    """Refuse the entry of another format, algorithm or number of workers, and what is none.

    Returns:
        The stamp of the side files.

    Raises:
        ValueError: Naming the file.
    """
    for name in ("format", "stamp", "algorithm", "num_workers"):
        if not isinstance(entry, dict) or name not in entry:
            raise ValueError(f"The entry {KEY!r} of {path} has no {name!r}. {NEW_RUN}")
    if entry["format"] != _FORMAT:
        raise ValueError(
            f"The side files of {path} have format {entry['format']}, and this version of "
            f"lightning_loco reads format {_FORMAT} only. {NEW_RUN}"
        )
    if entry["algorithm"] != type(algorithm).__name__:
        raise ValueError(
            f"The checkpoint {path} was written by {entry['algorithm']} and cannot be resumed with "
            f"{type(algorithm).__name__}. {NEW_RUN}"
        )
    if entry["num_workers"] != num_workers:
        raise ValueError(
            f"The checkpoint {path} was written by {entry['num_workers']} workers and this run has "
            f"{num_workers}; each worker resumes from its own state. {NEW_RUN}"
        )
    if not is_stamp(entry["stamp"]):
        raise ValueError(
            f"The checkpoint {path} names its side files {entry['stamp']!r}, which is no name that "
            f"lightning_loco gives. {NEW_RUN}"
        )
    return str(entry["stamp"])


def stamps_in(path: str, io: CheckpointIO) -> set[str]:
    """The stamps in a main file: that of its side files; empty if there is no file to be read.

    Only the part of the file without tensors is read, if it is written as ``torch.save`` does.

    Args:
        path: The main file.
        io: Reads a file of another kind.
    """
    with suppress(OSError, zipfile.BadZipFile), fsspec.open(path, "rb") as file:
        archive = zipfile.ZipFile(file)
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return {found.decode() for name in names for found in _STAMP.findall(archive.read(name))}
    with suppress(Exception):  # a user's own way to write files may fail in any way
        return {io.load_checkpoint(path)[KEY]["stamp"]}
    return set()
