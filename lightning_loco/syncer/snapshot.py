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
_KEYS = ("contract", "rounds", "files")


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
        if (main := self._read_main()) is None:
            return None
        load = partial(torch.load, map_location="cpu", weights_only=True)
        self._names = main["files"]
        fragments = [self._read(name, load) for name in self._names]
        return Saved(main["contract"], main["rounds"], fragments)

    def load_contract(self) -> dict[str, Any] | None:
        """Return the contract of what was saved last; None, and errors, as of :meth:`load`."""
        main = self._read_main()
        return None if main is None else main["contract"]

    def _read_main(self) -> dict[str, Any] | None:
        if not self._disk.exists(self._folder / _MAIN):
            return None
        main: dict[str, Any] = self._read(_MAIN, _load_main)
        return main

    def _read(self, name: str, read: Callable[[IO[bytes]], Any]) -> Any:
        path = self._folder / name
        try:
            with self._disk.open(path) as file:
                return read(file)
        except Exception as error:
            raise ValueError(
                f"{path} of the syncer cannot be read: {error}. Copy the folder back from a "
                "backup, or start a new run in another folder."
            ) from error

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
            self._write(names[fragment], partial(save_tensors, fragments[fragment]))
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


def _load_main(file: IO[bytes]) -> dict[str, Any]:
    main: dict[str, Any] = json.load(file)
    if missing := [key for key in _KEYS if key not in main]:
        raise ValueError(f"it has no {missing[0]}")
    return main


def save_tensors(content: Any, file: IO[bytes]) -> None:
    """Save as :func:`torch.save`, but raise OSError if the disk is full."""
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # After a failed write PyTorch cannot end the file either, and says only that.
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else OSError(str(error)) from None
