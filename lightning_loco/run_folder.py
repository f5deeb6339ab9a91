"""The folder of a run: the same for all its ranks, and no other run's."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import uuid
from pathlib import Path

NAME_FILE = ".run"
"""Names the run that a folder belongs to; a folder is never there without it."""

_IS_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def claim(folder: Path, run: str) -> Path:
    """Make a folder for a run, or find the one that another rank of the run has made.

    Args:
        folder: How it is to be called. If that is another run's, ``-2``, ``-3``, ... are appended.
        run: A text that all ranks of the run have in common, and no other run has.

    Returns:
        The folder that is there now.

    Raises:
        OSError: If nothing can be written there.
    """
    for number in itertools.count(1):
        numbered = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if _make(numbered, run) or _run_of(numbered) == run:
            return numbered
    raise AssertionError


def _make(folder: Path, run: str) -> bool:
    """Make a folder with the name of its run in it, both at once; whether it was not there."""
    new = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    new.mkdir(parents=True)
    try:
        (new / NAME_FILE).write_text(run)
        os.rename(new, folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        if error.errno not in _IS_THERE:
            raise
        return False
    return True


def _run_of(folder: Path) -> str | None:
    try:
        return (folder / NAME_FILE).read_text()
    except OSError:
        return None
