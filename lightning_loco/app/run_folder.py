"""The folder of a run: shared by all its ranks, and not used by any other run."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import uuid
from pathlib import Path

NAME_FILE = ".run"
"""File with the name of the run that a folder belongs to; every folder of a run has one."""

_EXISTS = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def claim(folder: Path, run: str) -> Path:
    """Create a folder for a run, or find the one that another rank of the run has created.

    If another run has it, ``-2``, ``-3``, ... is appended. ``run`` is equal on all ranks of the
    run, and of no other one. OSError if the folder cannot be written.
    """
    for number in itertools.count(1):
        numbered = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if _create(numbered, run) or _read_run(numbered) == run:
            return numbered
    raise AssertionError


def _create(folder: Path, run: str) -> bool:
    """Create a folder with the name of its run atomically; return False if it exists already."""
    new = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    new.mkdir(parents=True)
    try:
        (new / NAME_FILE).write_text(run)
        os.rename(new, folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        if error.errno not in _EXISTS:
            raise
        return False
    return True


def _read_run(folder: Path) -> str | None:
    try:
        return (folder / NAME_FILE).read_text()
    except OSError:
        return None
