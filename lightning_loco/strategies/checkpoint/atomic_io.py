"""Files that are written atomically: completely, or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
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

META = "meta.pt"
"""What a checkpoint that is a folder has beside the parts of each rank; Lightning's name."""

_ARCHIVE = b"PK\x03\x04"


class WholeFileIO(TorchCheckpointIO):
    """A ``CheckpointIO`` that survives the end of the process or the machine at any time.

    Lightning writes a local file to the folder for temporary files and moves it, which overwrites
    the old file if that folder is on another file system. Here the file is written beside its
    target, synced to the disk, and renamed. For addresses such as ``s3://`` it does as Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a file, or replace one atomically; missing folders are made.

        OSError if it cannot be written; an existing one is then unchanged.
        """
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            _replace(target, checkpoint)


def local_path(path: str | Path) -> Path | None:
    """Return the path of a file on this machine; None for addresses such as ``s3://``."""
    files, name = url_to_fs(str(path))
    return Path(name) if isinstance(files, LocalFileSystem) else None


def move_file(source: Path, target: Path) -> None:
    """Replace a file by another one; FileNotFoundError if ``source`` does not exist."""
    source.replace(target)
    _sync_folder(target.parent)
    _sync_folder(source.parent)


def move_folder(source: Path, target: Path) -> None:
    """Replace a checkpoint by another one, where one of them is a folder.

    The old one is moved beside ``source`` before that, since a folder cannot be replaced at once.
    FileNotFoundError if ``source`` does not exist, and IsADirectoryError if ``target`` is a folder
    of something else than a checkpoint; the old one then stays.
    """
    if not source.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
    if target.is_dir() and not (target / META).exists():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    former = source.with_name(f"former_{source.name}")
    if target.exists():
        target.replace(former)
    source.replace(target)
    _sync_folder(target.parent)
    remove_file_or_folder(former)


def remove_file_or_folder(path: Path) -> None:
    """Delete a file, or a folder with its content, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_archive(path: str | Path) -> bool:
    """Return whether a local file starts like those that ``torch.save`` writes."""
    local = local_path(path)
    if local is None or not local.is_file():
        return False
    with local.open("rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def damage_of(path: str | Path, reads_all: bool = True) -> str | None:
    """Describe what is wrong with a file that ``torch.save`` has written; None if nothing is.

    ``torch.load`` does not compare the checksums in the file. This reads it once more; without
    ``reads_all`` only its end. Nothing is wrong with remote files and those of another format.
    """
    local = local_path(path)
    if local is None or not local.is_file():
        return None
    if not is_archive(local):
        return None if local.stat().st_size else "it is empty"
    try:
        with zipfile.ZipFile(local) as archive:
            # Not with torch.serialization.set_crc32_options(False).
            has_checksums = any(part.CRC for part in archive.infolist())
            changed = archive.testzip() if reads_all and has_checksums else None
    except Exception as error:  # damaged archives raise errors of many types
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
        # torch hides the error of a full disk behind that of closing its archive.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            cause = error.__context__
            raise OSError(cause.errno, cause.strerror, str(target)) from error
        raise
    _sync_folder(target.parent)


def _new_part(stem: Path) -> BufferedWriter:
    """Create a temporary file with a unique name, and lock it until it is closed."""
    while True:
        file = stem.with_name(f"{stem.name}.{secrets.token_hex(4)}.part").open("xb")
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process removed it as abandoned before it was locked


def _remove_abandoned(parts: Iterable[Path]) -> None:
    """Remove temporary files of killed processes: those without a lock."""
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system supports it
            raise
    finally:
        os.close(descriptor)
