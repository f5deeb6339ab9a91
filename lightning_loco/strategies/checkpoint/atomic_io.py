"""Files that appear as a whole or not at all, on whatever file system they are."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_loco.fault_points import reach

_ARCHIVE = b"PK\x03\x04"


class WholeFileIO(TorchCheckpointIO):
    """Lightning's way to write checkpoints, safe against a loss of the process or the machine.

    Lightning writes a local file into the folder for temporary files and moves it, which is a copy
    onto the old file where that folder is on another file system. Here it is written beside its
    target, brought to the disk, and renamed. Addresses such as ``s3://`` are left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a file in the place of the one that is there, which stays until then.

        Args:
            checkpoint: What to write.
            path: Where to; missing folders are made.
            storage_options: None; there is nothing to set.

        Raises:
            OSError: If that is not possible; what was there is as it was.
            TypeError: If there are ``storage_options``.
        """
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            _replace(target, checkpoint)


def local_path(path: str | Path) -> Path | None:
    """Where a file is on this machine's file systems; None for addresses elsewhere."""
    files, name = url_to_fs(str(path))
    return Path(name) if isinstance(files, LocalFileSystem) else None


def move_file(source: Path, target: Path) -> None:
    """Put a whole file into the place of another one; FileNotFoundError if it is not there."""
    source.replace(target)
    _sync_folder(target.parent)
    _sync_folder(source.parent)


def is_archive(path: str | Path) -> bool:
    """Whether a local file begins as those do that ``torch.save`` writes."""
    local = local_path(path)
    if local is None or not local.is_file():
        return False
    with local.open("rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def damage_of(path: str | Path, reads_all: bool = True) -> str | None:
    """What is wrong with a file that ``torch.save`` has written, in words.

    ``torch.load`` does not compare the checksums that are in it. This reads the file once more.

    Args:
        path: Of the file.
        reads_all: Whether to compare the checksums too, and not only to look at the file's end.

    Returns:
        None if nothing is wrong, and for files elsewhere or of another format.
    """
    local = local_path(path)
    if local is None or not local.is_file():
        return None
    if not is_archive(local):
        return None if local.stat().st_size else "it is empty"
    try:
        with zipfile.ZipFile(local) as archive:
            # torch.serialization.set_crc32_options(False) leaves them out.
            has_checksums = any(part.CRC for part in archive.infolist())
            changed = archive.testzip() if reads_all and has_checksums else None
    except Exception as error:  # damaged archives fail in many ways
        return f"it was cut short or has changed since it was written ({error})"
    return changed and f"its part {changed!r} has changed since it was written"


def _replace(target: Path, content: Any) -> None:
    reach("writing a checkpoint")
    _make_folder(target.parent)
    name = f".{hashlib.sha256(target.name.encode()).hexdigest()[:16]}"
    _remove_abandoned(target.parent.glob(f"{name}*.part"))
    file = _new_part(target.with_name(name))
    part = Path(file.name)
    try:
        with file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
            reach("before a file is in its place")
            part.replace(target)
    except BaseException as error:
        part.unlink(missing_ok=True)
        # torch hides a full disk behind what it found when it closed its archive.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            cause = error.__context__
            raise OSError(cause.errno, cause.strerror, str(target)) from error
        raise
    _sync_folder(target.parent)


def _new_part(stem: Path) -> BufferedWriter:
    """Create a temporary file that no other process writes, and lock it until it is closed."""
    while True:
        file = stem.with_name(f"{stem.name}.{secrets.token_hex(4)}.part").open("xb")
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # it was taken for an abandoned one before it was locked


def _remove_abandoned(parts: Iterable[Path]) -> None:
    """Remove temporary files of killed processes: those that no process holds a lock on."""
    for part in parts:
        with suppress(OSError):
            descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(descriptor)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can
            raise
    finally:
        os.close(descriptor)
