"""The run that wrote a checkpoint, as a run reads it that is to go on from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_loco.comm.saved import Saved
from lightning_loco.schedules.base import proportion
from lightning_loco.strategies.driven import Engine
from lightning_loco.strategies.main_file import NEW_RUN, content_of, read_entry
from lightning_loco.strategies.positions import Position
from lightning_loco.strategies.side_files import SideFiles


class SavedRun:
    """A main file's entry and the side files that it names.

    A worker that did not exist then reads those of worker 0, and so does one whose own are lost.

    Args:
        entry: Of the main file.
        files: Beside it.
        path: The main file.
        worker: Who reads.
        weights_only: As the main file was read: False if any object may be in the files.
        readers: For each side file, who can read it; None if all can read all.

    Attributes:
        name: The file that the worker goes on from.
        is_new: Whether the worker has none of its own.
        num_workers: How many workers wrote it.
        algorithm: With what.
        own: What the worker goes on from.

    Raises:
        ValueError: If a file is missing, damaged or another's, or something is missing in it.
    """

    def __init__(
        self,
        entry: Any,
        files: SideFiles,
        path: str | Path,
        worker: int,
        weights_only: bool | None = None,
        readers: dict[int, int] | None = None,
    ) -> None:
        self._entry = read_entry(entry, path)
        self._files = files
        self._weights_only = weights_only
        self._readers = readers
        self.num_workers = self._entry.num_workers
        self.algorithm = self._entry.algorithm
        self.is_new = worker >= self.num_workers or worker in self._lost
        number = 0 if self.is_new else worker
        self.name = files.name_of(self._entry.stamp, number)
        self.own = self._read(number)
        if readers is None:
            self._find(self.num_workers - 1)

    def position(self) -> Position:
        """Where the worker goes on; a new one with its own random numbers."""
        found = Position(**self.own["position"])
        return found._replace(random=None) if self.is_new else found

    def shares(self) -> list[int]:
        """In what proportion its workers shared the data, one number each."""
        every = self._entry.settings.get("sync_every")
        return proportion(every) if isinstance(every, list) else [1] * self.num_workers

    def equals(self, engine: Engine) -> bool:
        """Whether the present run has the same settings and number of workers."""
        return (
            self.num_workers == engine.worker.group.num_workers
            and not self._lost
            and self.algorithm == type(engine.settings.algorithm).__name__
            and self._entry.settings == engine.settings.describe()
        )

    def saved(self) -> Saved:
        """What engines with other settings, or of another number of workers, go on from."""
        state, entry = self.own["engine"], self._entry
        if self.is_new:
            state = {**state, "statistics": {**state["statistics"], "bytes_sent": 0, "wait_s": 0.0}}
        return Saved(
            state,
            self.algorithm,
            entry.settings,
            self.num_workers,
            entry.consensus_key,
            entry.has_shared,
            read=lambda worker: self._read(worker)["engine"],
            readers=self._readers,
        )

    @property
    def _lost(self) -> list[int]:
        readers = self._readers
        return [] if readers is None else [n for n in range(self.num_workers) if n not in readers]

    def lost(self) -> list[str]:
        """What is missing, in words."""
        names = ", ".join(map(str, self._lost))
        return [f"what worker {names} had, which is on no disk, is left out"] if names else []

    def _find(self, worker: int) -> None:
        with _advised():
            self._files.find(self._entry.stamp, worker)

    def _read(self, worker: int) -> dict[str, Any]:
        entry = self._entry
        with _advised():
            own, shared = self._files.load(
                entry.stamp, worker, entry.has_shared, self._weights_only
            )
        with content_of(self._files.name_of(entry.stamp, worker)):
            own["engine"].update(shared)
        return own


@contextmanager
def _advised() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{error} {NEW_RUN}") from error
