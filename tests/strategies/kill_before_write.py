"""Kills processes right before a specified change of a file."""

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

_AUDITED = {
    "os.rename": "replace",
    "os.remove": "remove",
    "os.rmdir": "remove",
    "os.link": "link",
    "os.symlink": "link",
}
_callbacks: list[Callable[[str, str], None]] = []
_is_hooked = False


class Death(NamedTuple):
    """Kills a worker, or all of them, right before one of them changes a file.

    Attributes:
        worker: The worker whose changes are counted.
        number: The number of the change, starting at 1; 0 for none.
        folder: The folder in which changes are counted.
        log: A file elsewhere, with a line for each change that was or would have been made.
        kills_all: Whether the others are killed, too.
    """

    worker: int
    number: int
    folder: str
    log: str
    kills_all: bool = True

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count changes in this context; all workers must enter it together."""
        processes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(processes, os.getpid())
        if dist.get_rank() != self.worker:
            yield
            return
        changes: list[str] = []

        def on_change(change: str) -> None:
            changes.append(change)
            Path(self.log).write_text("\n".join(changes))
            if len(changes) == self.number:
                others = processes if self.kills_all else []
                for process in [*(one for one in others if one != os.getpid()), os.getpid()]:
                    os.kill(process, SIGKILL)

        with before_each_change(self.folder, on_change):
            yield


@contextmanager
def before_each_change(folder: str, call: Callable[[str], None]) -> Iterator[None]:
    """Call a function before each change of a file below a folder.

    Args:
        folder: An absolute path.
        call: Called with ``"write"`` when half of a file is written, ``"sync"`` before a file is
            synced to the disk, ``"replace NAME"``, ``"remove NAME"`` and ``"link NAME"``.
    """
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_audit)  # an audit hook cannot be removed
        _is_hooked = True

    def call_if_below(change: str, path: str) -> None:
        if os.path.realpath(path).startswith(f"{os.path.realpath(folder)}/"):
            call(change)

    save, sync = torch.save, os.fsync

    def save_in_halves(content: Any, file: Any, **options: Any) -> None:
        whole = io.BytesIO()
        save(content, whole, **options)
        half = len(whole.getvalue()) // 2
        file.write(whole.getvalue()[:half])
        file.flush()
        call_if_below("write", getattr(file, "name", ""))
        file.write(whole.getvalue()[half:])

    def call_and_sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isfile(path):
            call_if_below("sync", path)
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save_in_halves)
        patch.setattr(os, "fsync", call_and_sync)
        _callbacks.append(call_if_below)
        try:
            yield
        finally:
            _callbacks.pop()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _callbacks and event in _AUDITED:
        path, folder = os.fspath(args[0 if _AUDITED[event] == "remove" else 1]), args[-1]
        if folder != -1:  # an open folder that the path is relative to
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        _callbacks[-1](f"{_AUDITED[event]} {os.path.basename(path)}", path)
