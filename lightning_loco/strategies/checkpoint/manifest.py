"""What the main file of a checkpoint says about the files beside it."""

from __future__ import annotations

import re
import secrets
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fsspec
from lightning.fabric.plugins import CheckpointIO

if TYPE_CHECKING:
    from lightning_loco.strategies.driven import Engine

KEY = "lightning_loco"
"""Where the main file keeps it."""

NEW_RUN = (
    "To start a new run from its weights alone, use "
    "YourModule.load_from_checkpoint(path) and fit without ckpt_path."
)
"""What remains when side files cannot be used."""

MOST_WORKERS = 99_999
"""Their numbers have five digits in the names of side files."""

_FORMAT = 4
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


class Entry(NamedTuple):
    """What ties a main file to its side files, and says which run wrote them.

    Attributes:
        stamp: The name of the save.
        num_workers: How many workers wrote it.
        algorithm: The name of the algorithm's class.
        settings: Of that run, as plain values.
        has_shared: Whether there is a file of what all workers share.
        consensus_key: The entry of the algorithm's state that is the consensus, or None.
    """

    stamp: str
    num_workers: int
    algorithm: str
    settings: dict[str, Any]
    has_shared: bool
    consensus_key: str | None


_KINDS: dict[str, type | tuple[type, ...]] = {
    "algorithm": str,
    "settings": dict,
    "has_shared": bool,
    "consensus_key": (str, type(None)),
}


def entry_of(engine: Engine, stamp: str) -> dict[str, Any]:
    """The entry of the main file that ties it to its side files: plain values only."""
    algorithm = engine.settings.algorithm
    return {
        "format": _FORMAT,
        "stamp": stamp,
        "num_workers": engine.worker.group.num_workers,
        "algorithm": type(algorithm).__name__,
        "settings": engine.settings.describe(),
        "has_shared": algorithm.replicated,
        "consensus_key": engine.settings.consensus_key,
        "round_index": engine.worker.round_index,
    }


def read_entry(entry: Any, path: str | Path) -> Entry:
    """Refuse the entry of another format, and what is none.

    Raises:
        ValueError: Naming the file.
    """
    for name in ("format", *Entry._fields):
        if not isinstance(entry, dict) or name not in entry:
            raise ValueError(f"The entry {KEY!r} of {path} has no {name!r}. {NEW_RUN}")
        if name == "format" and entry["format"] != _FORMAT:
            raise ValueError(
                f"The side files of {path} have format {entry['format']}, and this version of "
                f"lightning_loco reads format {_FORMAT} only. {NEW_RUN}"
            )
    found = Entry(*(entry[name] for name in Entry._fields))
    if not is_stamp(found.stamp):
        raise ValueError(
            f"The checkpoint {path} names its side files {found.stamp!r}, which is no name that "
            f"lightning_loco gives. {NEW_RUN}"
        )
    number = found.num_workers
    if not isinstance(number, int) or not 1 <= number <= MOST_WORKERS:
        raise ValueError(f"The checkpoint {path} says that {number!r} workers wrote it. {NEW_RUN}")
    for name, kinds in _KINDS.items():
        if not isinstance(value := getattr(found, name), kinds):
            raise ValueError(
                f"The checkpoint {path} says {name}={value!r}, which lightning_loco does not "
                f"write. {NEW_RUN}"
            )
    return found


@contextmanager
def content_of(file: str | Path) -> Iterator[None]:
    """Let errors that impossible content causes inside name the file that it comes from.

    Raises:
        ValueError: In their place.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file} holds what lightning_loco does not write ({type(error).__name__}: {error}). "
            f"{NEW_RUN}"
        ) from error


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
