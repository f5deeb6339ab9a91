"""Files that are written atomically: completely, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from lightning_loco._util.disk import DISK, Disk
from lightning_loco._util.fault_points import reach

META = "meta.pt"
"""What a checkpoint that is a folder has beside the parts of each rank; Lightning's name."""

_CURRENT, _FIRST = "current", "first"
"""A link to the subfolder with the present files, and the start of the name of the first one."""
_ARCHIVE = b"PK\x03\x04"


class WholeFileIO(TorchCheckpointIO):
    """A ``CheckpointIO`` that survives the end of the process or the machine at any time.

    Lightning writes a local file to the folder for temporary files and moves it, which overwrites
    the old file if that folder is on another file system. Here the file is written beside its
    target, synced to the disk, and renamed. For addresses such as ``s3://`` it does as Lightning.

    ``disk`` has the files of this machine; a model of it can take its place.
    """

    disk: Disk = DISK

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
            _write(self.disk, target, checkpoint)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a file, or a folder with its content, if there is one."""
        if (local := local_path(path)) is not None:
            self.disk.remove(local)
        else:
            super().remove_checkpoint(path)


def disk_of(io: CheckpointIO) -> Disk:
    """Return the disk to which a ``CheckpointIO`` writes the files of this machine."""
    return io.disk if isinstance(io, WholeFileIO) else DISK


def local_path(path: str | Path) -> Path | None:
    """Return the path of a file on this machine; None for addresses such as ``s3://``."""
    files, name = url_to_fs(str(path))
    return Path(name) if isinstance(files, LocalFileSystem) else None


def check_kind(path: Path, disk: Disk = DISK) -> None:
    """Raise ValueError if a path is neither a file nor a folder: a pipe would be read for ever."""
    if disk.exists(path) and not disk.is_file(path) and not disk.is_dir(path):
        raise ValueError(f"{path} is not a file. Put a copy of the checkpoint's own file there.")


def move_file(disk: Disk, source: Path, target: Path) -> None:
    """Replace a file by another one; FileNotFoundError if ``source`` does not exist."""
    disk.replace(source, target)
    # Before anything of the old checkpoint is deleted: a crash could undo the rename alone. If it
    # brings back the old name, that is one more name of the same file, which a later save deletes.
    disk.sync(target.parent)


def move_folder(disk: Disk, source: Path, target: Path, name: str) -> None:
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
    if not disk.exists(source):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
    if disk.is_dir(target) and not disk.exists(target / META):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if disk.is_dir(source) and _has_links(disk, target, name):
        link = source.with_name(_CURRENT)
        disk.remove(link)
        disk.symlink(link, name)
        disk.replace(source, target / name)
        _link_files(disk, target, name)
        # A file that is not a link yet after a crash would keep its old content in the new one.
        disk.sync(target)
        reach("before a file is in its place")
        disk.replace(link, target / _CURRENT)  # a later save deletes the link of a suspended worker
        disk.sync(target)  # as in move_file
        return
    former = source.with_name(f"former_{source.name}")
    if disk.exists(target):
        disk.replace(target, former)
    disk.replace(source, target)
    disk.sync(target.parent)  # as in move_file
    disk.remove(former)


def remove_staged(disk: Disk, staged: Path) -> None:
    """Delete a checkpoint that has not replaced another one, so that it no longer can."""
    if disk.read_link(link := staged.with_name(_CURRENT)) is not None:
        disk.remove(link)
    if disk.is_dir(staged):  # renamed first: a suspended worker could move what is half deleted
        # To a new name: a process that was killed may have left such a folder.
        removed = staged.with_name(f"removed_{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):  # it has just done so
            disk.replace(staged, removed)
        staged = removed
    disk.remove(staged)


def remove_part(disk: Disk, folder: Path, name: str) -> None:
    """Delete a part that :func:`move_folder` has added to a folder, unless it is in use."""
    if (used := disk.read_link(folder / _CURRENT)) is not None:
        is_first = re.compile(rf"{_FIRST}(_.*)?").fullmatch  # without a name in former versions
        for part in sorted({name, *filter(is_first, disk.names_in(folder))} - {used}):
            disk.remove(folder / part)


def _has_links(disk: Disk, target: Path, name: str) -> bool:
    """Let the files of a folder be links, without changing its content; False if they cannot be.

    For the checkpoint ``name``: one that another process writes meanwhile has another folder for
    the first files, which must not be deleted if the links lead there.
    """
    if not disk.is_dir(target) or disk.read_link(target) is not None:
        return False
    current, first = target / _CURRENT, target / f"{_FIRST}_{name}"
    if (used := disk.read_link(current)) is None:
        if disk.exists(current):  # a copy has a folder there; a link may be of a later save
            disk.remove(current)
        names = [name for name in disk.names_in(target) if disk.is_file(target / name)]
        disk.make_folder(first)
        try:
            for name in names:
                disk.link(target / name, first / name)
            disk.symlink(current, first.name)
        except OSError as error:
            disk.remove(first)
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            return False
        # A crash must not leave a link in place of a file, and not what it leads to.
        disk.sync(first)
        disk.sync(target)
    _link_files(disk, target, used or first.name)
    return True


def _link_files(disk: Disk, folder: Path, name: str) -> None:
    for file in disk.names_in(folder / name):
        if disk.read_link(folder / file) is None:
            link = folder / f".{file}.link"
            disk.remove(link)
            disk.symlink(link, str(Path(_CURRENT, file)))
            disk.replace(link, folder / file)


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


def _write(disk: Disk, target: Path, content: Any) -> None:
    reach("writing a checkpoint")
    make_folder(disk, target.parent)
    name = f".{hashlib.sha256(target.name.encode()).hexdigest()[:16]}"
    for found in disk.names_in(target.parent):
        if found.startswith(name) and found.endswith(".part"):
            disk.remove_abandoned(target.with_name(found))
    file = None
    while file is None:  # another process may remove it before it is locked
        part = target.with_name(f"{name}.{secrets.token_hex(4)}.part")
        file = disk.create(part)
    try:
        with file:
            torch.save(content, file)
            # Before the rename: a crash could leave the new name with a part of the content.
            disk.sync_file(file)
            reach("before a file is in its place")
            disk.replace(part, target)
    except BaseException as error:
        disk.remove(part)
        # torch hides the error of a full disk behind an error of closing its archive.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            cause = error.__context__
            raise OSError(cause.errno, cause.strerror, str(target)) from error
        raise
    disk.sync(target.parent)


def make_folder(disk: Disk, folder: Path) -> None:
    """Make a folder and those above it, unless they exist, and put their names on the disk."""
    if not disk.is_dir(folder):
        make_folder(disk, folder.parent)
        disk.make_folder(folder)
        disk.sync(folder.parent)
