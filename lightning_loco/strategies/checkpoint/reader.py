"""The save that a run goes on from: which one, and what is in it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_loco.distributed import WorkerGroup
from lightning_loco.earlier_run import EarlierRun
from lightning_loco.schedules.base import proportion
from lightning_loco.strategies.checkpoint.atomic_io import damage_of, local_path
from lightning_loco.strategies.checkpoint.manifest import NEW_RUN, content_of, read_entry, steps_of
from lightning_loco.strategies.checkpoint.other_checkpoint import other_one_named
from lightning_loco.strategies.checkpoint.position import Position
from lightning_loco.strategies.checkpoint.side_files import SideFiles
from lightning_loco.strategies.driven import Engine

_REQUEUED = re.compile(r"hpc_ckpt_(\d+)\.ckpt")
_PLACE = "the choice of a checkpoint"
_NEEDED = (("engine", ()), ("lightning", ("loops",)), ("position", Position._fields))
_PLAIN = ""
"""In place of a stamp: a main file without side files."""

Found = dict[str, list[int]]
"""The saves on a worker's disk, and whose side files of each are there."""


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
            files.find(self._entry.stamp, self.num_workers - 1)

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

    def saved(self) -> EarlierRun:
        """What engines with other settings, or of another number of workers, go on from."""
        state, entry = self.own["engine"], self._entry
        if self.is_new:
            state = {**state, "statistics": {**state["statistics"], "bytes_sent": 0, "wait_s": 0.0}}
        return EarlierRun(
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

    def _read(self, worker: int) -> dict[str, Any]:
        entry = self._entry
        own, shared = self._files.load(entry.stamp, worker, entry.has_shared, self._weights_only)
        file = self._files.name_of(entry.stamp, worker)
        with content_of(file):
            for key, entries in _NEEDED:
                for name in ("", *entries):
                    if key not in own or (name and name not in own[key]):
                        raise ValueError(f"{file} has no {name or key!r}. {NEW_RUN}")
            own["engine"].update(shared)
        return own


class ChosenSave(NamedTuple):
    """What all workers go on from.

    Attributes:
        path: The main file on this worker's disk.
        seen: For each worker, whose side files are on its disk.
    """

    path: str
    seen: list[list[int]]

    def readers(self) -> dict[int, int]:
        """For each worker's side file, who reads it where one is to do so for all."""
        first = {n: at for at, seen in reversed([*enumerate(self.seen)]) for n in seen}
        own = {worker: worker for worker, seen in enumerate(self.seen) if worker in seen}
        return first | own


def path_on_own_disk(path: str | Path) -> str:
    """The absolute path of a file on this machine.

    Raises:
        ValueError: If it is an address elsewhere.
    """
    local = local_path(path)
    if local is None:
        raise ValueError(
            f"checkpoint_folder='private' keeps checkpoints on each worker's own disk, and {path} "
            "is somewhere else. Use checkpoint_folder='shared' for it."
        )
    return str(local)


def choose_save(group: WorkerGroup, io: CheckpointIO, path: str | Path | None) -> ChosenSave | None:
    """Agree on the newest save that all workers have, and complete it where it was interrupted.

    All workers must call it.

    Args:
        group: The workers.
        io: How files are read.
        path: The main file that this worker would go on from; None if it has found none.

    Returns:
        None if no worker has found a file.

    Raises:
        ValueError: On every worker, if they have none in common, with a list of what they have.
    """
    own = None if path is None else os.path.realpath(path_on_own_disk(path))
    named = [one for one in group.gather_objects(own, _PLACE) if one is not None]
    if not named:
        return None
    where: dict[str, SideFiles] = {}
    found: Found = {}
    damaged: list[str] = []
    for name in _candidates(own, named):
        files = SideFiles(io, name)
        stamps = files.saves()
        if not stamps and os.path.exists(name):
            if (damage := damage_of(name)) is None:
                stamps = {_PLAIN}
            else:
                damaged.append(f"Worker {group.worker}'s {name} is damaged: {damage}.")
        for stamp in stamps:
            if stamp not in found:
                where[stamp], found[stamp] = files, files.workers_of(stamp) if stamp else []
    everyone: list[Found] = group.gather_objects(found, _PLACE)
    common = [stamp for stamp in found if all(stamp in theirs for theirs in everyone)]
    ranks = {stamp: _rank(stamp, everyone) for stamp in common}
    stamp = max(common, key=lambda one: (ranks[one], steps_of(one), one), default=_PLAIN)
    if not ranks.get(stamp):
        words = [_words(everyone, named[0]), *sum(group.gather_objects(damaged, _PLACE), [])]
        with other_one_named(io, own or named[0], group.worker) if damaged else nullcontext():
            raise ValueError(" ".join(words))
    with group.errors_shared(_PLACE):
        where[stamp].put_main(stamp)
    return ChosenSave(where[stamp].path, [one[stamp] for one in everyone])


def _candidates(own: str | None, named: Sequence[str]) -> list[str]:
    """The files to look at: of others only the names count, if this worker has a folder."""
    if own is None:
        return list(dict.fromkeys(named))
    folder = os.path.dirname(own)
    others = [os.path.join(folder, os.path.basename(name)) for name in named]
    return list(dict.fromkeys([own, *others]))


def _rank(stamp: str, everyone: Sequence[Found]) -> int:
    """How good a save is that all have: 3 if each worker has its own side file.

    It is 2 if some have that of worker 0 only, because nobody has one of theirs; 1 if there are no
    side files at all; and 0 if a worker can do nothing with it.
    """
    if stamp == _PLAIN:
        return 1
    seen = [found[stamp] for found in everyone]
    if all(worker in numbers for worker, numbers in enumerate(seen)):
        return 3
    writers = {number for numbers in seen for number in numbers}
    mine = [worker if worker in writers else 0 for worker in range(len(seen))]
    return 2 * all(number in numbers for number, numbers in zip(mine, seen, strict=True))


def _words(everyone: Sequence[Found], path: str) -> str:
    parts = [
        f"worker {worker} has {_listed(found) or 'none'}" for worker, found in enumerate(everyone)
    ]
    return (
        f"checkpoint_folder='private', and there is no checkpoint {path} that all workers have on "
        f"their disks: {'; '.join(parts)}. Start each worker where it was, or copy the main file "
        f"and its folder {Path(path).name}.loco to the disks that lack them. {NEW_RUN}"
    )


def _listed(found: Found) -> str:
    newest_first = sorted(found, key=steps_of, reverse=True)
    return ", ".join(
        f"{stamp or 'a file without side files'} with the side files of worker "
        f"{', '.join(map(str, found[stamp])) or 'none'}"
        for stamp in newest_first
    )


def complete_one(path: str | Path) -> str | Path:
    """The checkpoint to resume from, after a requeue of SLURM that may have been killed.

    Lightning takes the highest number in its folder, be it that of side files without a main file.

    Args:
        path: What is to be loaded.

    Returns:
        The newest complete checkpoint of a requeue in the same folder, if ``path`` is one that is
        not there; in all other cases ``path``.
    """
    local = local_path(path)
    if local is None or local.exists() or not _REQUEUED.fullmatch(local.name):
        return path
    found = [file for file in local.parent.iterdir() if _REQUEUED.fullmatch(file.name)]
    if not found:
        return path
    last = max(found, key=lambda file: int(file.stem.rpartition("_")[2]))
    rank_zero_info(f"{path} was not completed. Going on from {last}.")
    return last
