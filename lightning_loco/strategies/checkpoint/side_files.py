"""What lies beside a checkpoint: one file per worker and one for what all workers share.

``model.ckpt`` is an ordinary Lightning checkpoint. ``model.ckpt.loco/<stamp>/`` holds
``worker_00000.pt`` and so on, and ``shared.pt``. The main file names its stamp. The next one is
written last, waits in ``<stamp>/main.ckpt`` until all workers agree that the save is complete, and
is renamed. Only when it has been read back, the saves are deleted that were there when this one
began. So an interrupted save never spoils the checkpoint that was there before, and a worker that
wakes late never one that came after: its main file does not wait any more.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import Tensor

from lightning_loco.fault_points import reach
from lightning_loco.parameters.fingerprint import crc32
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.atomic_io import (
    WholeFileIO,
    damage_of,
    local_path,
    move_file,
)
from lightning_loco.strategies.checkpoint.manifest import NEW_RUN, is_stamp, stamps_in, steps_of

_MAIN, _FILE = "main.ckpt", re.compile(r"worker_(\d{5})\.pt")
_SEAL = "seal"
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


class SideFiles:
    """The side files of one checkpoint.

    Args:
        io: How files are written and read.
        path: The main file.

    Attributes:
        path: The same.
    """

    def __init__(self, io: CheckpointIO, path: str | Path) -> None:
        self._io = io
        self.path = str(path)
        self._folder = f"{path}.loco"

    def save(self, stamp: str, worker: int | None, content: dict[str, Any]) -> None:
        """Write a file of a save.

        Args:
            stamp: The name of this save.
            worker: Whose it is; None for what all workers share.
            content: Plain values and tensors.

        Raises:
            OSError: If the file cannot be written.
        """
        path = f"{self._folder}/{stamp}/{_file_of(worker)}"
        self._io.save_checkpoint(seal(content, stamp, worker), path)

    def load(
        self, stamp: str, worker: int, has_shared: bool, weights_only: bool | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read what one worker needs.

        Args:
            stamp: The name of the save, from the main file.
            worker: Who reads.
            has_shared: Whether there is something that all workers share.
            weights_only: False to unpickle any object, as for the main file.

        Returns:
            The worker's own part, and the shared one: empty if there is none.

        Raises:
            ValueError: Naming the first file that is not there, is damaged, or is another worker's
                or of another save.
        """
        own = self._read(stamp, worker, weights_only)
        return own, self._read(stamp, None, weights_only) if has_shared else {}

    def name_of(self, stamp: str, worker: int | None) -> str:
        """Where to read the part of a worker; with None, what all workers share.

        The main file may be a link: the side files are beside the file that it leads to.
        """
        path = self.path if local_path(self.path) is None else os.path.realpath(self.path)
        return f"{path}.loco/{stamp}/{_file_of(worker)}"

    def find(self, stamp: str, worker: int | None) -> str:
        """As :meth:`name_of`, for a file that is to be read.

        Raises:
            ValueError: If it does not exist.
        """
        name = self.name_of(stamp, worker)
        if not get_filesystem(name).exists(name):
            raise ValueError(
                f"The checkpoint {self.path} needs {name}, which does not exist. "
                f"Keep the folder {Path(name).parents[1].name} beside the checkpoint, on a file "
                f"system that all machines share. {NEW_RUN}"
            )
        return name

    # ------------------------------------------------------------- main files that wait

    @property
    def can_wait(self) -> bool:
        """Whether a main file can be written to another place and be moved from there."""
        return isinstance(self._io, WholeFileIO) and local_path(self.path) is not None

    def waiting_main(self, stamp: str) -> str:
        """Where the main file of a save waits until the save is complete."""
        return f"{self._folder}/{stamp}/{_MAIN}"

    def put_main(self, stamp: str) -> bool:
        """Put the waiting main file of a save into its place; returns whether there was one."""
        reach("before the main file is in its place")
        try:
            move_file(Path(self.waiting_main(stamp)), Path(self.path))
        except FileNotFoundError:
            return False
        return True

    def workers_of(self, stamp: str) -> list[int]:
        """Whose files of a save are on this disk."""
        files = get_filesystem(self._folder)
        folder = f"{self._folder}/{stamp}"
        entries = files.ls(folder, detail=False) if files.exists(folder) else []
        found = [_FILE.fullmatch(Path(entry).name) for entry in entries]
        return sorted(int(match[1]) for match in found if match)

    def saves(self) -> set[str]:
        """The saves on this disk that have a main file, be it in its place or waiting."""
        waiting = {s for s in self.stamps() if os.path.exists(self.waiting_main(s))}
        return waiting | stamps_in(self.path, self._io)

    # -------------------------------------------------------------------- the end of a save

    def settle(self, stamp: str, before: list[str], is_named: bool = True) -> None:
        """Delete the saves of before, unless the main file needs them.

        What waits there goes first: from then on no process that wakes late can replace the main
        file, which is read only after that.

        Args:
            stamp: The save that is complete now.
            before: What :meth:`stamps` has returned when that save began.
            is_named: Whether its main file names it; if not, it is deleted too.

        Raises:
            OSError: If the main file was to be replaced and still names another save.
        """
        reach("before the last checkpoint is deleted")
        before = [found for found in before if found != stamp]
        for found in before:
            if (waiting := local_path(self.waiting_main(found))) is not None:
                waiting.unlink(missing_ok=True)
        kept = stamps_in(self.path, self._io)
        is_late = is_named and stamp not in kept  # as another's way to write may be
        if is_late and isinstance(self._io, TorchCheckpointIO):
            raise OSError(
                f"The checkpoint {self.path} could not be replaced. What is there is complete."
            )
        first = min(map(steps_of, kept), default=0)
        for found in before if is_named else [*before, stamp]:
            if found not in kept and (not is_late or steps_of(found) < first):
                self.remove_save(found)
        if not is_named:
            self._remove_empty_folder()

    def drop(self, stamp: str) -> None:
        """Delete a save that has failed, unless the main file has come to need it."""
        if stamp not in stamps_in(self.path, self._io):
            self.remove_save(stamp)
            self._remove_empty_folder()

    def remove_save(self, stamp: str) -> None:
        """Delete a save."""
        self._remove(f"{self._folder}/{stamp}")

    def remove(self) -> None:
        """Delete all saves."""
        self._remove(self._folder)

    def stamps(self) -> list[str]:
        """The saves that are there, complete or not."""
        files = get_filesystem(self._folder)
        entries = files.ls(self._folder, detail=False) if files.exists(self._folder) else []
        return list(filter(is_stamp, (Path(entry).name for entry in entries)))

    def _remove_empty_folder(self) -> None:
        if (local := local_path(self._folder)) is not None:
            with suppress(OSError):  # it is not there, or not empty, or a link
                local.rmdir()

    def _read(self, stamp: str, worker: int | None, weights_only: bool | None) -> dict[str, Any]:
        name = self.find(stamp, worker)
        try:
            sealed = lightning_compat.load_checkpoint(self._io, name, weights_only is not False)
        except Exception as error:  # damaged files fail in many ways
            if isinstance(error, OSError) and error.filename is not None:
                raise
            text = damage_of(name) or error
            raise ValueError(f"{name} is damaged and cannot be read: {text}. {NEW_RUN}") from error
        try:
            return unseal(sealed, stamp, worker)
        except ValueError as error:
            raise ValueError(f"{name} {error}. {NEW_RUN}") from error

    def _remove(self, path: str) -> None:
        local = local_path(path)
        if local is not None and local.is_symlink():
            local.unlink()  # not what it leads to
        else:
            self._io.remove_checkpoint(path)


def _file_of(worker: int | None) -> str:
    return "shared.pt" if worker is None else f"worker_{worker:05d}.pt"


def seal(content: dict[str, Any], stamp: str, worker: int | None) -> dict[str, Any]:
    """Add a seal.

    Args:
        content: Plain values and tensors.
        stamp: The name of the save that it belongs to.
        worker: Whose it is; None if it is all workers'.
    """
    made = {"stamp": stamp, "worker": worker, "checksum": checksum(content)}
    return {**content, _SEAL: made}


def unseal(sealed: Any, stamp: str, worker: int | None) -> dict[str, Any]:
    """The content behind a seal.

    Args:
        sealed: What was read.
        stamp: The name of the save that it must belong to.
        worker: Whose it must be.

    Raises:
        ValueError: If it is another worker's or of another save, or has changed.
    """
    content = dict(sealed) if isinstance(sealed, Mapping) else {}
    found = content.pop(_SEAL, None)
    if not isinstance(found, Mapping) or set(found) != {"stamp", "worker", "checksum"}:
        raise ValueError("has no seal of lightning_loco")
    if (found["stamp"], found["worker"]) != (stamp, worker):
        raise ValueError(
            f"belongs to {_owner(found['worker'])} in save {found['stamp']!r}, not to "
            f"{_owner(worker)} in save {stamp!r}"
        )
    if found["checksum"] != checksum(content):
        raise ValueError("has changed since it was written: its checksum does not fit")
    return content


def checksum(content: Any, start: int = 0) -> int:
    """CRC-32 of plain values and dense tensors, in their order.

    Args:
        content: Mappings, sequences, sets, tensors, numbers, texts and the like. Of objects of
            other kinds, only the kind counts.
        start: The checksum of what comes before.

    Example:
        >>> checksum({"lr": 0.1}) == checksum({"lr": 0.2})
        False
    """
    if isinstance(content, Tensor):
        start = zlib.crc32(f"{content.dtype}{tuple(content.shape)}".encode(), start)
        if content.layout is not torch.strided or content.is_quantized:
            return start
        return crc32(content, start)
    if isinstance(content, Mapping):
        for key, value in content.items():
            start = checksum(value, zlib.crc32(f"{key!r}:".encode(), start))
        return zlib.crc32(b"}", start)
    if isinstance(content, (list, tuple)):
        for value in content:
            start = checksum(value, zlib.crc32(b",", start))
        return zlib.crc32(b"]", start)
    if isinstance(content, (set, frozenset)):
        return zlib.crc32(repr(sorted(map(repr, content))).encode(), start)
    text = repr(content) if isinstance(content, _PLAIN) else type(content).__qualname__
    return zlib.crc32(text.encode(), start)


def _owner(worker: Any) -> str:
    return "all workers" if worker is None else f"worker {worker}"
