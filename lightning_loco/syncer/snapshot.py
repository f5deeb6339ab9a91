"""The folder of a syncer: the fragments as they were merged last, and which rounds those are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from lightning_loco._util.disk import DISK, Disk
from lightning_loco.algorithms.algorithm import State

_MAIN = "syncer.json"
_PREFIX = "fragment_"


class Saved(NamedTuple):
    """What a folder has.

    Attributes:
        contract: Of the run, as :meth:`Snapshot.save` got it.
        rounds: The state of the rounds.
        fragments: The state of each fragment, on the CPU.
    """

    contract: dict[str, Any]
    rounds: dict[str, Any]
    fragments: list[State]


class Snapshot:
    """Saves merged fragments, each in a file of its own, so that a merge writes only one.

    A save is the replacement of ``syncer.json``, which names the files: it is there completely, or
    not at all, whenever the process or the machine fails.

    Args:
        folder: For this run alone; it is made.
        disk: Of this machine; a model of it can take its place.
    """

    def __init__(self, folder: Path, disk: Disk = DISK) -> None:
        self._folder, self._disk = folder, disk
        self._names: list[str] = []

    def load(self) -> Saved | None:
        """Return what was saved last; None if nothing was.

        Raises:
            ValueError: If a file is missing or cannot be read.
        """
        path = self._folder / _MAIN
        if not self._disk.exists(path):
            return None
        try:
            with self._disk.open(path) as file:
                main = json.load(file)
            fragments = []
            for name in main["files"]:
                path = self._folder / name
                with self._disk.open(path) as file:
                    fragments.append(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:
            raise ValueError(
                f"{path} of the syncer cannot be read: {error}. Copy the folder back from a "
                "backup, or start a new run in another folder."
            ) from error
        self._names = main["files"]
        return Saved(main["contract"], main["rounds"], fragments)

    def save(
        self,
        contract: Mapping[str, Any],
        rounds: Mapping[str, Any],
        fragments: Sequence[State],
        merged: Mapping[int, str],
    ) -> None:
        """Save a state; OSError if that fails, and the one before is then unchanged.

        Args:
            contract: What identifies the run.
            rounds: The state of the rounds.
            fragments: The state of each fragment.
            merged: The fragments that have changed since the last save, each with a text for the
                name of its file that no other state of it has had.
        """
        disk = self._disk
        if not self._names:
            disk.make_folder(self._folder)
            disk.sync(self._folder.parent)
        names = [*self._names] or [""] * len(fragments)
        for fragment, text in merged.items():
            names[fragment] = f"{_PREFIX}{fragment}_{text}.pt"
            self._write(names[fragment], partial(torch.save, fragments[fragment]))
        main = {"contract": contract, "rounds": rounds, "files": names}
        staged = self._write(f"{_MAIN}.new", lambda file: file.write(json.dumps(main).encode()))
        disk.sync(self._folder)
        disk.replace(staged, self._folder / _MAIN)
        disk.sync(self._folder)
        self._names = names
        for name in disk.names_in(self._folder):
            if name.startswith(_PREFIX) and name not in names:
                disk.remove(self._folder / name)

    def _write(self, name: str, write: Callable[[IO[bytes]], object]) -> Path:
        path = self._folder / name
        self._disk.remove(path)  # of a process that was killed
        file = self._disk.create(path)
        if file is None:
            raise FileExistsError(f"{path} was removed by another syncer. Stop one of them.")
        with file:
            write(file)
            self._disk.sync_file(file)
        return path
