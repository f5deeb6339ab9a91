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

from lightning_loco._util.fault_points import reach

META = "meta.pt"
"""What a checkpoint that is a folder has beside the parts of each rank; Lightning's name."""

_CURRENT, _FIRST = "current", "first"
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


def check_kind(path: Path) -> None:
    """Raise ValueError if a path is neither a file nor a folder: a pipe would be read for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is not a file. Put a copy of the checkpoint's own file there.")


def move_file(source: Path, target: Path) -> None:
    """Replace a file by another one; FileNotFoundError if ``source`` does not exist."""
    _move(source, target)
    _sync(target.parent)
    _sync(source.parent)


def move_folder(source: Path, target: Path, name: str) -> None:
    """Replace a checkpoint by another one, where one of them is a folder.

    No rename replaces a folder that has content. So the files of a folder that is replaced become
    links to files of the same name in its subfolder ``current``, which is a link, too; the new
    checkpoint is moved into the subfolder ``name``, and replacing that one link replaces all files
    at once. :func:`remove_part` deletes the old ones.

    A file and a folder replace each other by two renames, and so do folders on a file system
    without links.

    FileNotFoundError if ``source`` does not exist, and IsADirectoryError if ``target`` is a folder
    of something else than a checkpoint; the old one then stays.
    """
    if not source.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
    if target.is_dir() and not (target / META).exists():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if source.is_dir() and _has_links(target):
        link = source.with_name(_CURRENT)
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        _move(source, target / name)
        _link_files(target, name)
        _sync(target)
        reach("before a file is in its place")
        _move(link, target / _CURRENT)  # a later save deletes the link of a suspended worker
        _sync(target)
        return
    former = source.with_name(f"former_{source.name}")
    if target.exists():
        _move(target, former)
    _move(source, target)
    _sync(target.parent)
    remove_file_or_folder(former)


def remove_staged(staged: Path) -> None:
    """Delete a checkpoint that has not replaced another one, so that it no longer can."""
    if (link := staged.with_name(_CURRENT)).is_symlink():
        link.unlink()
    remove_file_or_folder(staged)


def remove_part(folder: Path, name: str) -> None:
    """Delete a part that :func:`move_folder` has added to a folder, unless it is in use."""
    if (folder / _CURRENT).is_symlink():
        for part in {name, _FIRST} - {os.readlink(folder / _CURRENT)}:
            remove_file_or_folder(folder / part)


def _has_links(target: Path) -> bool:
    """Let the files of a folder be links, without changing its content; False if they cannot be."""
    if not target.is_dir() or target.is_symlink():
        return False
    current, first = target / _CURRENT, target / _FIRST
    if not current.is_symlink():
        remove_file_or_folder(current)
        remove_file_or_folder(first)
        files = [file for file in target.iterdir() if file.is_file()]
        first.mkdir()
        try:
            for file in files:
                os.link(file, first / file.name)
            current.symlink_to(first.name)
        except OSError as error:
            remove_file_or_folder(first)
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            return False
    _link_files(target, os.readlink(current))
    return True


def _link_files(folder: Path, name: str) -> None:
    for file in (folder / name).iterdir():
        found = folder / file.name
        if not found.is_symlink():
            link = folder / f".{file.name}.link"
            link.unlink(missing_ok=True)
            link.symlink_to(Path(_CURRENT, file.name))
            link.replace(found)


def _move(source: Path, target: Path) -> None:
    """Rename a file, a link or a folder, also to another file system, where it is copied first."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        part = target.with_name(f".{target.name}.part")
        remove_file_or_folder(part)
        shutil.move(source, part)
        for file in [part, *part.rglob("*")]:
            if not file.is_symlink():
                _sync(file)
        part.replace(target)


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
    """Describe the damage of a file that ``torch.save`` has written; None if there is none.

    ``torch.load`` does not compare the checksums in the file. This reads it once more; without
    ``reads_all`` only its end. Remote files and files of another format are not checked.
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
        # torch hides the error of a full disk behind an error of closing its archive.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            cause = error.__context__
            raise OSError(cause.errno, cause.strerror, str(target)) from error
        raise
    _sync(target.parent)


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
        _sync(folder.parent)


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system supports it
            raise
    finally:
        os.close(descriptor)
