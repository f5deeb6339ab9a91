"""The newest save that all workers have, where each has a disk of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning.fabric.plugins import CheckpointIO

from lightning_loco.comm import WorkerGroup
from lightning_loco.strategies.main_file import NEW_RUN, steps_of
from lightning_loco.strategies.side_files import SideFiles
from lightning_loco.strategies.whole_files import damage_of, local_path

_PLACE = "the choice of a checkpoint"
_PLAIN = ""
"""In place of a stamp: a main file without side files."""

Found = dict[str, list[int]]
"""The saves on a worker's disk, and whose side files of each are there."""


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
