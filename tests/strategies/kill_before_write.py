"""Processes that are killed right before a certain change of a file."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

_AUDITED = {"os.rename": "replace", "os.remove": "remove", "os.rmdir": "remove"}
_told: list[Callable[[str, str], None]] = []
_is_hooked = False


class Death(NamedTuple):
    """Ends a worker, or all of them, right before a change that one makes to a file.

    Attributes:
        worker: Whose changes are counted.
        number: Before which one, from 1 on; 0 for none.
        folder: Whose files are meant; an absolute path.
        notes: A file elsewhere, with a line for each change that was made or was to be made.
        all_die: Whether the others are killed, too.
    """

    worker: int
    number: int
    folder: str
    notes: str
    all_die: bool = True

    @contextmanager
    def may_come(self) -> Iterator[None]:
        """All workers must enter it together; it may come until they leave it."""
        processes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(processes, os.getpid())
        if dist.get_rank() != self.worker:
            yield
            return
        changes: list[str] = []

        def note(change: str) -> None:
            changes.append(change)
            Path(self.notes).write_text("\n".join(changes))
            if len(changes) == self.number:
                others = processes if self.all_die else []
                for process in [*(one for one in others if one != os.getpid()), os.getpid()]:
                    os.kill(process, SIGKILL)

        with before_each_change(self.folder, note):
            yield


@contextmanager
def before_each_change(folder: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Tell what is done to the files below a folder, before it is done.

    Args:
        folder: An absolute path.
        tell: Called with ``"write"`` when half of a file is written, ``"sync"`` before a file is
            brought to the disk, ``"replace NAME"`` and ``"remove NAME"``.
    """
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_audit)  # nothing takes it away again
        _is_hooked = True

    def tell_below(change: str, path: str) -> None:
        if os.path.realpath(path).startswith(f"{os.path.realpath(folder)}/"):
            tell(change)

    save, sync = torch.save, os.fsync

    def save_in_halves(content: Any, file: Any, **options: Any) -> None:
        whole = io.BytesIO()
        save(content, whole, **options)
        half = len(whole.getvalue()) // 2
        file.write(whole.getvalue()[:half])
        file.flush()
        tell_below("write", getattr(file, "name", ""))
        file.write(whole.getvalue()[half:])

    def tell_and_sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isfile(path):
            tell_below("sync", path)
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save_in_halves)
        patch.setattr(os, "fsync", tell_and_sync)
        _told.append(tell_below)
        try:
            yield
        finally:
            _told.pop()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _told and event in _AUDITED:
        path, folder = os.fspath(args[1 if event == "os.rename" else 0]), args[-1]
        if folder != -1:  # an open one, to which the path is relative
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        _told[-1](f"{_AUDITED[event]} {os.path.basename(path)}", path)
