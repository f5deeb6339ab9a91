"""The files of one checkpoint: a main file, and a folder with one file per worker beside it.

``model.ckpt`` is an ordinary Lightning checkpoint. ``model.ckpt.loco/<stamp>/`` holds
``worker_00000.pt`` and so on, and ``shared.pt`` with what all workers share. The main file has a
:class:`Manifest` that names the stamp, a name that no two saves share.

A new main file is written last, to ``<stamp>/main.ckpt``. It stays there until all workers agree
that the save is complete, and is then renamed. Only after it has been read back, the saves that
existed when this one started are deleted. So an interrupted save never damages the checkpoint
before it; and a worker that was suspended never replaces a later one, because the file that it
would rename has been deleted.
"""

from __future__ import annotations

import re
import secrets
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch import Tensor

from lightning_loco._util.disk import DISK, Disk
from lightning_loco._util.fault_points import reach
from lightning_loco.model.fingerprint import crc32
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.atomic_io import (
    META,
    WholeFileIO,
    check_kind,
    damage_of,
    disk_of,
    local_path,
    move_file,
    move_folder,
    remove_part,
    remove_staged,
)

KEY = "lightning_loco"
"""Key of the manifest in the main file."""

AFTER_ERROR = "after_error"
"""Entry beside the manifest: worker 0 has saved alone, because its fit has failed."""

SHARDS = "lightning_loco_shards"
"""Key of the files that ranks have written into a main file that is a folder; else it is empty.

The main file of workers that hold the whole model does not have it.
"""

NEW_RUN = (
    "To start a new run from its weights alone, use "
    "YourModule.load_from_checkpoint(path) and fit without ckpt_path."
)
"""What a user can do if side files cannot be used."""

FORMAT = 5
"""Version of what this package adds to a checkpoint."""

_STAMP = re.compile(rb"step\d+-[0-9a-f]{8}")
_MAIN, _FILE = "main.ckpt", re.compile(r"worker_(\d{5})\.pt")
_DELETED, _REMOVED = "deleted", "removed_"
_HEADER = "seal"
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)

# ------------------------------------------------------------- stamps and the manifest


def new_stamp(steps: int) -> str:
    """Return a unique name for a save after ``steps`` local steps."""
    return f"step{steps}-{secrets.token_hex(4)}"


def is_stamp(value: Any) -> bool:
    """Return whether this is a name of :func:`new_stamp`, and so not a path to elsewhere."""
    return isinstance(value, str) and _STAMP.fullmatch(value.encode()) is not None


def steps_of(stamp: str) -> int:
    """Return the local steps in a stamp; 0 if it is not one."""
    return int(stamp[4:].partition("-")[0]) if is_stamp(stamp) else 0


def stamps_in(path: str, io: CheckpointIO) -> set[str]:
    """Return the stamps in a main file; empty if there is no file that can be read.

    Only the part without tensors is read, if it is written as ``torch.save`` does; ``io`` reads a
    file of another kind.
    """
    disk, file_of_all = disk_of(io), path
    if (local := local_path(path)) is not None:
        file_of_all = str(local / META if disk.is_dir(local) else local)
        if disk.exists(file_of_all) and not disk.is_file(file_of_all):
            return set()
    with suppress(OSError, zipfile.BadZipFile):
        parts = plain_parts(file_of_all, disk)
        return {found.decode() for part in parts for found in _STAMP.findall(part)}
    # Not an archive of torch.save: the file of a user's CheckpointIO, which may raise anything.
    with suppress(Exception):
        return {io.load_checkpoint(path)[KEY]["stamp"]}
    return set()


def plain_parts(path: str, disk: Disk = DISK) -> list[bytes]:
    """Return the parts of a file that ``torch.save`` has written, without tensors."""
    with disk.open(path) as file:
        archive = zipfile.ZipFile(file)
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return [archive.read(name) for name in names]


def check_format(found: Any, path: str | Path) -> None:
    """Raise ValueError, which names both formats, if another version has written a checkpoint."""
    if found != FORMAT:
        raise ValueError(
            f"The checkpoint {path} has format {found}, and this version of lightning_loco reads "
            f"format {FORMAT}. Resume with the version that has written it. {NEW_RUN}"
        )


class Manifest(NamedTuple):
    """The entry of a main file that names its side files, and describes the run that wrote them.

    Attributes:
        stamp: Name of the save.
        num_workers: Number of workers that wrote it.
        algorithm: Name of the algorithm's class.
        settings: Settings of that run, as plain values.
        has_shared: Whether there is a file of the state that all workers share.
    """

    stamp: str
    num_workers: int
    algorithm: str
    settings: dict[str, Any]
    has_shared: bool

    @classmethod
    def of(cls, engine: LocalParticipant, stamp: str) -> Manifest:
        """Describe a save of the present run."""
        algorithm = engine.settings.algorithm
        return cls(
            stamp,
            engine.worker.group.num_workers,
            type(algorithm).__name__,
            engine.settings.describe(),
            algorithm.replicated,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the entry for the main file: plain values only."""
        return {"format": FORMAT, **self._asdict()}

    @classmethod
    def from_state_dict(cls, entry: Any, path: str | Path) -> Manifest:
        """Read the entry of a main file.

        ValueError, which names the file, if it has another format; KeyError without an entry.
        """
        check_format(entry["format"], path)
        found = cls(*(entry[name] for name in cls._fields))
        if not is_stamp(found.stamp):
            raise ValueError(
                f"The checkpoint {path} names its side files {found.stamp!r}, which is not a name "
                f"that lightning_loco gives. {NEW_RUN}"
            )
        return found


@contextmanager
def errors_naming(file: str | Path) -> Iterator[None]:
    """A context that turns errors of impossible content into a ValueError that names the file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file} holds what lightning_loco does not write ({type(error).__name__}: {error}). "
            f"{NEW_RUN}"
        ) from error


# ------------------------------------------------------------------- the side folder


class SideFiles:
    """The side files of one checkpoint, whose main file is ``path``."""

    def __init__(self, io: CheckpointIO, path: str | Path) -> None:
        self._io = io
        self._disk = disk_of(io)
        self.path = str(path)
        self._folder = f"{path}.loco"

    def save(self, stamp: str, worker: int | None, content: dict[str, Any]) -> None:
        """Write the file of a worker, or of the state that all workers share (None)."""
        path = f"{self._folder}/{stamp}/{_name_of(worker)}"
        self._io.save_checkpoint(with_header(content, stamp, worker), path)

    def load(
        self, stamp: str, worker: int, has_shared: bool, weights_only: bool | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a worker's own state, and the state that all share: empty unless ``has_shared``.

        ``weights_only=False`` unpickles any object, as for the main file. ValueError, which names
        it, for a file that does not exist, is damaged, or belongs to another worker or save.
        """
        own = self._read(stamp, worker, weights_only)
        return own, self._read(stamp, None, weights_only) if has_shared else {}

    def _read(self, stamp: str, worker: int | None, weights_only: bool | None) -> dict[str, Any]:
        path = self.find(stamp, worker)
        try:
            saved = lightning_compat.load_checkpoint(self._io, path, weights_only is not False)
        except Exception as error:  # damaged files raise errors of many types
            if isinstance(error, OSError) and error.filename is not None:
                raise
            text = damage_of(path) or error
            raise ValueError(f"{path} is damaged and cannot be read: {text}. {NEW_RUN}") from error
        try:
            return without_header(saved, stamp, worker)
        except ValueError as error:
            raise ValueError(f"{path} {error}. {NEW_RUN}") from error

    def find(self, stamp: str, worker: int | None) -> str:
        """Return the path of a side file, see :meth:`path_of`; ValueError if it does not exist."""
        path = self.path_of(stamp, worker)
        if not self._disk.exists(path):
            raise ValueError(
                f"The checkpoint {self.path} needs {path}, which does not exist. "
                f"Keep the folder {Path(path).parents[1].name} beside the checkpoint, on a file "
                f"system that all machines share. {NEW_RUN}"
            )
        if (local := local_path(path)) is not None:
            check_kind(local, self._disk)
        return path

    def path_of(self, stamp: str, worker: int | None) -> str:
        """Return the path from which to read the file of a worker, or of all workers (None).

        The main file may be a link: the side files are beside the file that it points to.
        """
        path = self.path if local_path(self.path) is None else self._disk.real_path(self.path)
        return f"{path}.loco/{stamp}/{_name_of(worker)}"

    def shards(self, stamp: str, worker: int | None) -> str:
        """Return the folder of the vectors of a worker that divides them, or of all (None)."""
        name = "shared" if worker is None else f"worker_{worker:05d}"
        return str(Path(self.path_of(stamp, worker)).with_name(f"shards_{name}"))

    # -------------------------------------------------------------- the main file

    @property
    def can_stage(self) -> bool:
        """Whether the main file can be written to a temporary path and renamed."""
        return isinstance(self._io, WholeFileIO) and local_path(self.path) is not None

    def staged_main(self, stamp: str) -> str:
        """Return the path of the main file until the save is complete."""
        return f"{self._folder}/{stamp}/{_MAIN}"

    def commit_main(self, stamp: str) -> bool:
        """Rename the staged main file of a save; return whether there was one."""
        reach("before the main file is in its place")
        disk, staged, main = self._disk, Path(self.staged_main(stamp)), Path(self.path)
        # Asked before the rename, which fails if the save is marked only after that.
        if disk.exists(staged.with_name(_DELETED)):
            return False
        try:
            if disk.is_dir(staged) or disk.exists(main / META):
                move_folder(disk, staged, main, stamp)
            else:
                move_file(disk, staged, main)
        except FileNotFoundError:
            return False
        return True

    # ----------------------------------------------------------- which saves exist

    def stamps(self) -> list[str]:
        """Return the stamps of all saves in the folder, complete or not."""
        names = self._disk.names_in(self._folder)
        parts = self._disk.names_in(self.path) if self._disk.is_dir(self.path) else []
        return sorted({*filter(is_stamp, [*names, *parts])})

    def saves(self) -> set[str]:
        """Return the stamps of saves on this disk whose main file exists, staged or renamed."""
        staged = {s for s in self.stamps() if self._disk.exists(self.staged_main(s))}
        return staged | stamps_in(self.path, self._io)

    def workers_of(self, stamp: str) -> list[int]:
        """Return the workers whose files of a save are on this disk."""
        found = map(_FILE.fullmatch, self._disk.names_in(f"{self._folder}/{stamp}"))
        return sorted(int(match[1]) for match in found if match)

    # ------------------------------------------------------------------- deletion

    def delete_older(self, stamp: str, before: list[str], is_named: bool = True) -> None:
        """Delete the saves that existed ``before`` this one, unless the main file needs them.

        They are marked, and their staged main files are deleted, first: then no other process can
        replace the main file any more, which is read only after that. OSError if the main file was
        to be replaced and still names another save. A save that no main file names is deleted, too.
        """
        reach("before the last checkpoint is deleted")
        before = [found for found in before if found != stamp]
        for found in before:
            if (staged := local_path(self.staged_main(found))) is not None:
                self._forbid(staged.with_name(_DELETED))
                remove_staged(self._disk, staged)
        kept = stamps_in(self.path, self._io)
        is_late = is_named and stamp not in kept  # a user's CheckpointIO may write later
        if is_late and isinstance(self._io, TorchCheckpointIO):
            raise OSError(
                f"The checkpoint {self.path} could not be replaced. The present one is complete."
            )
        first = min(map(steps_of, kept), default=0)
        for found in before if is_named else [*before, stamp]:
            if found not in kept and (not is_late or steps_of(found) < first):
                self.remove_save(found)
        for name in self._disk.names_in(self._folder):
            if name.startswith(_REMOVED):  # by a process that was killed meanwhile
                self._remove(f"{self._folder}/{name}")
        if not is_named:
            self._remove_empty_folder()

    def _forbid(self, mark: Path) -> None:
        """Mark a save as deleted: whoever still writes its main file must not rename it."""
        with suppress(OSError):  # it is marked, or gone, or the disk is full
            if (file := self._disk.create(mark)) is not None:
                file.close()

    def discard(self, stamp: str) -> None:
        """Delete a save that has failed, unless the main file already names it."""
        if stamp not in stamps_in(self.path, self._io):
            self.remove_save(stamp)
            self._remove_empty_folder()

    def remove_save(self, stamp: str) -> None:
        """Delete a save: all its files at once, and never one after the other."""
        folder = f"{self._folder}/{stamp}"
        local = local_path(folder)
        if local is not None and self._disk.is_dir(local) and self._disk.read_link(local) is None:
            # A new name: a process that was killed while it deleted this save has left a folder,
            # and a suspended one may have written a file of the save since.
            folder = f"{self._folder}/{_REMOVED}{new_stamp(steps_of(stamp))}"
            with suppress(FileNotFoundError):  # another process deletes it, too
                self._disk.replace(local, Path(folder))
        self._remove(folder)
        if (main := local_path(self.path)) is not None:
            remove_part(self._disk, main, stamp)  # of a main file that is a folder

    def remove(self) -> None:
        """Delete all saves."""
        self._remove(self._folder)

    def _remove_empty_folder(self) -> None:
        if (local := local_path(self._folder)) is not None:
            self._disk.remove_empty_folder(local)

    def _remove(self, path: str) -> None:
        local = local_path(path)
        if local is not None and self._disk.read_link(local) is not None:
            self._disk.remove(local)  # and not its target
        else:
            self._io.remove_checkpoint(path)


def _name_of(worker: int | None) -> str:
    return "shared.pt" if worker is None else f"worker_{worker:05d}.pt"


# --------------------------------------------------------------- headers with checksums


def with_header(content: dict[str, Any], stamp: str, worker: int | None) -> dict[str, Any]:
    """Add a header with the owner and a checksum to the content of a side file."""
    header = {"stamp": stamp, "worker": worker, "checksum": checksum(content)}
    return {**content, _HEADER: header}


def without_header(saved: Any, stamp: str, worker: int | None) -> dict[str, Any]:
    """Check the header of a side file and return the content without it.

    ValueError if it belongs to another worker or another save, or has changed.
    """
    content = dict(saved) if isinstance(saved, Mapping) else {}
    found = content.pop(_HEADER, None)
    if not isinstance(found, Mapping) or set(found) != {"stamp", "worker", "checksum"}:
        raise ValueError("has no header of lightning_loco")
    if (found["stamp"], found["worker"]) != (stamp, worker):
        raise ValueError(
            f"belongs to {_owner(found['worker'])} in save {found['stamp']!r}, not to "
            f"{_owner(worker)} in save {stamp!r}"
        )
    if found["checksum"] != checksum(content):
        raise ValueError("has changed since it was written: its checksum does not match")
    return content


def checksum(content: Any, start: int = 0) -> int:
    """Return the CRC-32 of plain values and dense tensors, in their order.

    Args:
        content: Mappings, sequences, sets, tensors, numbers, strings and the like. Of objects of
            other types, only the name of the type is included.
        start: The checksum of the content before.

    Example:
        >>> checksum({"lr": 0.1}) == checksum({"lr": 0.2})
        False
    """
    text: list[str] = []  # not in the checksum yet: one call for many short strings
    waiting: list[tuple[bool, Any]] = [(False, content)]  # a text or a value; the next one is last
    while waiting:
        is_text, value = waiting.pop()
        if is_text:
            text.append(value)
        elif isinstance(value, Tensor):
            text.append(f"{value.dtype}{tuple(value.shape)}")
            # The bytes of other tensors cannot be viewed; their type and shape are in it.
            if value.layout is torch.strided and not value.is_quantized:
                start = crc32(value, zlib.crc32("".join(text).encode(), start))
                text.clear()
        elif isinstance(value, Mapping):
            waiting.append((True, "}"))
            for key, entry in reversed(list(value.items())):
                waiting += [(False, entry), (True, f"{key!r}:")]
        elif isinstance(value, (list, tuple)):
            waiting.append((True, "]"))
            for entry in reversed(value):
                waiting += [(False, entry), (True, ",")]
        elif isinstance(value, (set, frozenset)):
            text.append(repr(sorted(map(repr, value))))
        else:
            text.append(repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__)
    return zlib.crc32("".join(text).encode(), start)


def _owner(worker: Any) -> str:
    return "all workers" if worker is None else f"worker {worker}"
