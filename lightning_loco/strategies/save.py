"""One save of all workers: in one folder that they share, or each on a disk of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_loco.comm import WorkerGroup
from lightning_loco.comm.watchdog import WorkerFailure
from lightning_loco.strategies.side_files import SideFiles

_PLACE = "writing a checkpoint"


class Save(NamedTuple):
    """What a worker has to write.

    Attributes:
        files: Beside the main file.
        stamp: The name of the save.
        own: What is this worker's alone.
        shared: What all workers share; None if there is nothing.
        write_main: Writes the main file to a path.
    """

    files: SideFiles
    stamp: str
    own: dict[str, Any]
    shared: dict[str, Any] | None
    write_main: Callable[[str], None]

    def write_common(self, path: str) -> None:
        """Write what all workers share, and then the main file."""
        if self.shared is not None:
            self.files.save(self.stamp, None, self.shared)
        self.write_main(path)


def save_together(group: WorkerGroup, save: Save) -> bool:
    """Write a save into a folder that all workers see; what is common comes from worker 0.

    All workers must call it.

    Args:
        group: The workers.
        save: What this one writes.

    Returns:
        Whether this worker has written the main file.

    Raises:
        OSError: On every worker, if one cannot write its files; the save before is complete.
        ValueError: On every worker, if the side folder is a symbolic link.
    """
    is_first, files, stamp = group.worker == 0, save.files, save.stamp
    try:
        with group.errors_shared(_PLACE):
            files.save(stamp, group.worker, save.own)
        with group.errors_shared(_PLACE):
            if is_first:
                save.write_common(files.path)
                files.settle(stamp)
    except Exception:
        if is_first:
            files.drop(stamp)
        raise
    return is_first


def save_apart(group: WorkerGroup, save: Save) -> bool:
    """Write a save onto the disk of each worker, as :func:`save_together`; disks may be shared too.

    On each disk the first of those whose files are there writes what is common. The main file takes
    its place only when all is written on all disks: wherever the workers are killed, there is a
    save that all of them have.
    """
    files, stamp = save.files, save.stamp
    try:
        with group.errors_shared(_PLACE):
            files.save(stamp, group.worker, save.own)
        is_first = is_first_of(files.workers_of(stamp), group.worker)
        with group.errors_shared(_PLACE):
            if is_first:
                save.write_common(files.waiting_main(stamp))
    except WorkerFailure:
        raise  # the others may have found it complete
    except Exception:
        if is_first_of(files.workers_of(stamp), group.worker):
            files.drop(stamp)
        raise
    with group.errors_shared(_PLACE):
        if is_first:
            files.put_main(stamp)
            files.settle(stamp)
    return is_first


def save_main_apart(group: WorkerGroup, save: Save) -> bool:
    """Write a main file alone onto the disk of each worker; returns whether this one has."""
    files, stamp = save.files, save.stamp
    with group.errors_shared(_PLACE):
        files.save(stamp, group.worker, {})  # tells who shares this disk
    is_first = is_first_of(files.workers_of(stamp), group.worker)
    with group.errors_shared(_PLACE):
        if is_first:
            save.write_main(files.path)
            files.remove_save(stamp)
    return is_first


def is_first_of(workers: list[int], worker: int) -> bool:
    """Whether no other worker has a lower number."""
    return min(workers, default=worker) >= worker
