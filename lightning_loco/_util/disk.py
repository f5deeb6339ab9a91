"""The operations on files of which a save consists; a model of a disk can take their place."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import AbstractContextManager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import IO

import fsspec
from fsspec.core import url_to_fs


class Disk:
    """The disks of this machine; addresses such as ``s3://`` can be listed and read as well.

    What is written, renamed or deleted may be lost if the machine fails, until it is synced: the
    content of a file by :meth:`sync_file`, and the names in a folder by :meth:`sync`.
    """

    # --------------------------------------------------------------------- reading

    def exists(self, path: str | Path) -> bool:
        """Whether there is a file or a folder, on this machine or at an address."""
        files, name = url_to_fs(str(path))
        return bool(files.exists(name))

    def is_file(self, path: str | Path) -> bool:
        """Whether there is a file, or a link to one."""
        return os.path.isfile(path)

    def is_dir(self, path: str | Path) -> bool:
        """Whether there is a folder, or a link to one."""
        return os.path.isdir(path)

    def read_link(self, path: Path) -> str | None:
        """Return where a symbolic link leads; None if there is none."""
        return os.readlink(path) if path.is_symlink() else None

    def real_path(self, path: str | Path) -> str:
        """Return the path of the file to which a path leads, without links."""
        return os.path.realpath(path)

    def names_in(self, folder: str | Path) -> list[str]:
        """Return the names in a folder, on this machine or at an address; empty without one."""
        files, name = url_to_fs(str(folder))
        entries = files.ls(name, detail=False) if files.exists(name) else []
        return [Path(entry).name for entry in entries]

    def open(self, path: str | Path) -> AbstractContextManager[IO[bytes]]:
        """Open a file to read it, on this machine or at an address."""
        file: AbstractContextManager[IO[bytes]] = fsspec.open(str(path), "rb")
        return file

    # --------------------------------------------------------------------- writing

    def create(self, path: Path) -> IO[bytes] | None:
        """Create a file, locked until it is closed; None if it was removed as abandoned before."""
        file: BufferedWriter = path.open("xb")
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()
        return None

    def remove_abandoned(self, path: Path) -> None:
        """Delete a file of :meth:`create` if its process was killed: then it has no lock."""
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """Make a folder in an existing one, unless it exists."""
        path.mkdir(exist_ok=True)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        os.link(source, target)

    def symlink(self, link: Path, target: str) -> None:
        """Make a symbolic link to ``target``."""
        link.symlink_to(target)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file, a link or a folder, also to another disk, where it is copied first."""
        try:
            source.replace(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            part = target.with_name(f".{target.name}.part")
            self.remove(part)
            shutil.move(source, part)
            for file in [part, *part.rglob("*")]:
                if not file.is_symlink():
                    self.sync(file)
            part.replace(target)

    def remove(self, path: Path) -> None:
        """Delete a file, a link, or a folder with its content, if there is one."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def remove_empty_folder(self, path: Path) -> None:
        """Delete a folder, unless it does not exist, is not empty, or is a link."""
        with suppress(OSError):
            path.rmdir()

    def sync_file(self, file: IO[bytes]) -> None:
        """Put the content of an open file on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Put the names in a folder, or the content of a file, on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can
                raise
        finally:
            os.close(descriptor)


DISK = Disk()
"""The real disks."""
