"""What to do about a checkpoint that is damaged: name it, and another one that is whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from lightning_loco.strategies.checkpoint.atomic_io import damage_of, is_archive, local_path
from lightning_loco.strategies.checkpoint.manifest import KEY, read_entry
from lightning_loco.strategies.checkpoint.side_files import SideFiles


def read_main(read: Callable[[], dict[str, Any]], path: str | Path) -> dict[str, Any]:
    """Read a main file, and refuse one that is damaged.

    Args:
        read: Reads it, as Lightning does.
        path: Of the file.

    Raises:
        ValueError: Naming the file and what is wrong with it.
    """
    try:
        loaded = read()
    except Exception as error:  # damaged files fail in many ways
        if isinstance(error, FileNotFoundError) or getattr(error, "filename", None) is not None:
            raise
        local = local_path(path)
        is_local = local is not None and local.is_file()
        if (found := damage_of(path)) is None and (is_archive(path) or not is_local):
            raise
        raise ValueError(f"The checkpoint {path} cannot be read: {found or error}.") from error
    if (found := damage_of(path)) is not None:
        raise ValueError(f"The checkpoint {path} is damaged: {found}.")
    return loaded


@contextmanager
def other_one_named(
    io: CheckpointIO, path: str | Path, worker: int | None = None
) -> Iterator[None]:
    """Add to a ValueError which other checkpoint in the folder can be used.

    Args:
        io: How files are read.
        path: Of the main file that is refused.
        worker: Whose side file must be there; None for those of all workers.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} {_other_one(io, path, worker)}".rstrip()) from error


def _other_one(io: CheckpointIO, path: str | Path, worker: int | None) -> str:
    local = local_path(path)
    if local is None:
        return ""
    own = os.path.realpath(local)
    others: list[tuple[float, Path]] = []
    for file in local.parent.glob("*.ckpt"):
        with suppress(OSError):  # deleted meanwhile
            if file.is_file() and os.path.realpath(file) != own:
                others.append((file.stat().st_mtime, file))
    for _, file in sorted(others, reverse=True):
        if _is_whole(io, file, worker):
            return f"Go on from {file}, the newest other checkpoint in its folder that is whole."
    return f"No other checkpoint in {local.parent} is whole."


def _is_whole(io: CheckpointIO, path: Path, worker: int | None) -> bool:
    """Whether a run can go on from a file; of side files only the ends are looked at."""
    try:
        if damage_of(path) is not None:
            return False
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if KEY in content:
            entry, files = read_entry(content[KEY], path), SideFiles(io, path)
            writers = range(entry.num_workers) if worker is None else [worker]
            for writer in [*writers, None] if entry.has_shared else writers:
                if damage_of(files.find(entry.stamp, writer), reads_all=False) is not None:
                    return False
        return "loops" in content and "optimizer_states" in content
    except Exception:  # damaged files fail in many ways
        return False
