"""A disk in memory that may lose, in a crash, what was not synced."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lightning_loco._util.disk import Disk


@dataclass(eq=False)
class File:
    """A file, which may have several names; ``synced`` is what is certainly on the disk."""

    content: bytes = b""
    synced: bytes = b""
    is_open: bool = True


@dataclass(eq=False)
class Link:
    """A symbolic link; it is on the disk if its name is."""

    target: str


@dataclass(eq=False)
class Folder:
    """A folder, with the names that it has, and those that are certainly on the disk."""

    names: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)


Node = File | Link | Folder


@dataclass(eq=False)
class Change:
    """A name that was set or deleted (None) in a folder, and may not be on the disk yet.

    A rename deletes the old name only ``after`` the new one is on the disk: file systems do both at
    once, or in this order; of a folder, which has one name, always at once.
    """

    folder: Folder
    name: str
    node: Node | None
    after: Change | None = None

    @property
    def cause(self) -> Change:
        """The change that is on the disk only together with this one."""
        return self.after if self.after and isinstance(self.after.node, Folder) else self


class _Stream(io.BytesIO):
    """An open file, whose content is in the file at once."""

    def __init__(self, file: File) -> None:
        super().__init__()
        self.file = file

    def write(self, data: bytes) -> int:  # type: ignore[override]
        written = super().write(data)
        self.file.content = self.getvalue()
        return written

    def close(self) -> None:
        self.file.is_open = False
        super().close()


class ModelDisk(Disk):
    """A disk in memory; ``before`` is called with a description before each change of it."""

    def __init__(self, root: Folder | None = None) -> None:
        self.root = root or Folder()
        self.pending: list[Change] = []
        self.before: Callable[[str], object] = bool

    # --------------------------------------------------------------------- a crash

    def crashes(self) -> Iterator[ModelDisk]:
        """Yield what may be there after a crash at this moment, without repetitions.

        Of the changes of names that were not synced none, all, only one, or all but one are there,
        and a file that was not synced is cut short.
        """
        pending, seen = self.pending, set[str]()
        choices = [set[Change](), {*pending}]
        for change in pending:
            choices += [{change}, {*pending} - {change}]
        for chosen in choices:
            names: dict[Folder, dict[str, Node]] = {}
            for change in pending:
                if change.cause in chosen and (change.after is None or change.after in chosen):
                    found = names.setdefault(change.folder, {**change.folder.synced})
                    _set(found, change.name, change.node)
            left = ModelDisk(_copied(self.root, names, {}))  # type: ignore[arg-type]
            if (listing := repr(_listed(left.root))) not in seen:
                seen.add(listing)
                yield left

    def sync(self, path: str | Path) -> None:
        self.before(f"sync {Path(path).name}")
        folder = self._at(path)
        if not isinstance(folder, Folder):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        for change in [one for one in self.pending if one.folder is folder]:
            if change.after in self.pending:
                self._put_on_disk(change.after)
            self._put_on_disk(change)
            for other in [one for one in self.pending if one.cause is change]:
                self._put_on_disk(other)

    def _put_on_disk(self, change: Change) -> None:
        for one in [*self.pending]:  # earlier changes of the same name, in their order
            if one.folder is change.folder and one.name == change.name:
                _set(one.folder.synced, one.name, one.node)
                self.pending.remove(one)
            if one is change:
                return

    def sync_file(self, file: IO[bytes]) -> None:
        assert isinstance(file, _Stream)
        self.before("sync a file")
        file.file.synced = file.file.content

    # --------------------------------------------------------------------- reading

    def _at(self, path: str | Path, follow: bool = True) -> Node | None:
        """Return what is at a path; links in it are followed, the last one only if ``follow``."""
        node: Node | None = self.root
        parts = Path(path).parts[1:]
        for number, part in enumerate(parts):
            node = node.names.get(part) if isinstance(node, Folder) else None
            if isinstance(node, Link) and (follow or number < len(parts) - 1):
                node = self._at(Path("/", *parts[:number], node.target))
        return node

    def _folder_of(self, path: Path) -> Folder:
        folder = self._at(path.parent)
        if not isinstance(folder, Folder):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return folder

    def exists(self, path: str | Path) -> bool:
        return self._at(path) is not None

    def is_file(self, path: str | Path) -> bool:
        return isinstance(self._at(path), File)

    def is_dir(self, path: str | Path) -> bool:
        return isinstance(self._at(path), Folder)

    def read_link(self, path: Path) -> str | None:
        link = self._at(path, follow=False)
        return link.target if isinstance(link, Link) else None

    def real_path(self, path: str | Path) -> str:
        assert self.read_link(Path(path)) is None, "no run saves through a link"
        return str(path)

    def names_in(self, folder: str | Path) -> list[str]:
        found = self._at(folder)
        return [*found.names] if isinstance(found, Folder) else []

    def open(self, path: str | Path) -> AbstractContextManager[IO[bytes]]:
        file = self._at(path)
        if not isinstance(file, File):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return io.BytesIO(file.content)

    # --------------------------------------------------------------------- writing

    def _change(
        self, folder: Folder, name: str, node: Node | None, after: Change | None = None
    ) -> Change:
        _set(folder.names, name, node)
        self.pending.append(Change(folder, name, node, after))
        return self.pending[-1]

    def _add(self, path: Path, node: Node) -> None:
        folder = self._folder_of(path)
        if path.name in folder.names:
            raise FileExistsError(17, "File exists", str(path))
        self._change(folder, path.name, node)

    def create(self, path: Path) -> IO[bytes]:
        self.before(f"create {path.name}")
        file = File()
        self._add(path, file)
        return _Stream(file)

    def remove_abandoned(self, path: Path) -> None:
        file = self._at(path, follow=False)
        if isinstance(file, File) and not file.is_open:
            self.remove(path)

    def make_folder(self, path: Path) -> None:
        self.before(f"make {path.name}")
        if not self.is_dir(path):
            self._add(path, Folder())

    def link(self, source: Path, target: Path) -> None:
        self.before(f"link {target.name}")
        if (file := self._at(source)) is None:
            raise FileNotFoundError(2, "No such file or directory", str(source))
        self._add(target, file)

    def symlink(self, link: Path, target: str) -> None:
        self.before(f"symlink {link.name}")
        self._add(link, Link(target))

    def replace(self, source: Path, target: Path) -> None:
        self.before(f"replace {target.name}")
        node, there = self._at(source, follow=False), self._at(target, follow=False)
        if node is None:
            raise FileNotFoundError(2, "No such file or directory", str(source))
        if isinstance(there, Folder):
            raise IsADirectoryError(21, "Is a directory", str(target))
        added = self._change(self._folder_of(target), target.name, node)
        self._change(self._folder_of(source), source.name, None, added)

    def remove(self, path: Path) -> None:
        node = self._at(path, follow=False)
        if isinstance(node, Folder):
            for name in [*node.names]:
                self.remove(path / name)
        self.before(f"remove {path.name}")
        if self._at(path, follow=False) is not None:
            self._change(self._folder_of(path), path.name, None)

    def remove_empty_folder(self, path: Path) -> None:
        node = self._at(path, follow=False)
        if isinstance(node, Folder) and not node.names:
            self.remove(path)


def _set(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _copied(node: Node, names: dict[Folder, dict[str, Node]], copies: dict[Node, Node]) -> Node:
    """Copy what is on the disk; ``names`` are those of folders whose changes are there in part."""
    if node in copies:
        return copies[node]
    if isinstance(node, Folder):
        copy: Node = Folder()
        copies[node] = copy
        found = names.get(node, node.synced)
        copy.names = {name: _copied(one, names, copies) for name, one in found.items()}
        copy.synced = {**copy.names}
    elif isinstance(node, File):
        is_whole = node.synced == node.content
        content = node.content if is_whole else node.content[: len(node.content) // 2]
        copy = File(content, content, is_open=False)
    else:
        copy = Link(node.target)
    copies[node] = copy
    return copy


def _listed(node: Node) -> object:
    if isinstance(node, Folder):
        return sorted((name, _listed(one)) for name, one in node.names.items())
    return hash(node.content) if isinstance(node, File) else node.target
