"""One save of all workers: in one folder that they share, or each on a disk of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.side_files import SideFiles

_PLACE = "writing a checkpoint"


class Save(NamedTuple):
    """What a worker has to write.

    Attributes:
        files: Beside the main file.
        stamp: The name of the save.
        own: What is this worker's alone; None if the main file is all there is.
        shared: What all workers share; None if there is nothing.
        write_main: Writes the main file to a path.
    """

    files: SideFiles
    stamp: str
    own: dict[str, Any] | None
    shared: dict[str, Any] | None
    write_main: Callable[[str], None]

    def write_common(self, waits: bool) -> None:
        """Write what all workers share, and the main file where it can wait."""
        if self.shared is not None:
            self.files.save(self.stamp, None, self.shared)
        if waits:
            self.write_main(self.files.waiting_main(self.stamp))

    def complete(self, waits: bool, before: list[str], workers: list[int]) -> None:
        """Put the main file into its place, and delete what it does not need any more.

        Args:
            waits: Whether it has been written, and waits.
            before: The saves that were there when this one began.
            workers: Whose files of this save must be there, as far as this machine has seen them.

        Raises:
            OSError: If files of this save are gone, or the main file cannot be replaced.
        """
        files, stamp, has_side_files = self.files, self.stamp, self.own is not None
        if not waits:
            self.write_main(files.path)
        elif not {*workers} <= {*files.workers_of(stamp)} or not files.put_main(stamp):
            raise OSError(
                f"The checkpoint {files.path} could not be replaced: files of the next one have "
                "been deleted while it was written, as by another run that saves to the same path. "
                "Let each run save to a folder of its own."
            )
        if waits or has_side_files:
            files.settle(stamp, before, is_named=has_side_files)


def save_together(group: WorkerGroup, save: Save) -> bool:
    """Write a save into a folder that all workers see; what is common comes from worker 0.

    All workers must call it. The main file takes its place after one more agreement: a worker 0
    that has been asleep while the others ended, and while a new run has saved, changes nothing.

    Args:
        group: The workers.
        save: What this one writes.

    Returns:
        Whether this worker has written the main file.

    Raises:
        OSError: On every worker, if one cannot write its files; the save before is complete.
    """
    is_first, files = group.worker == 0, save.files
    before: list[str] = []
    try:
        with group.errors_shared(_PLACE):
            if is_first:
                before = files.stamps()
            if save.own is not None:
                files.save(save.stamp, group.worker, save.own)
        with group.errors_shared(_PLACE):
            if is_first:
                save.write_common(files.can_wait)
        with group.errors_shared(_PLACE):
            if is_first:
                own = [] if save.own is None else [group.worker]
                save.complete(files.can_wait, before, own)
    except Exception:
        if is_first:
            files.drop(save.stamp)
        raise
    return is_first


def save_apart(group: WorkerGroup, save: Save) -> bool:
    """Write a save onto the disk of each worker, as :func:`save_together`; disks may be shared too.

    On each disk the first of those whose files are there writes what is common. The main file takes
    its place only when all is written on all disks: wherever the workers are killed, there is a
    save that all of them have.
    """
    files, stamp = save.files, save.stamp
    before: list[str] = []
    try:
        with group.errors_shared(_PLACE):
            before = files.stamps()
            files.save(stamp, group.worker, save.own or {})  # also tells who shares this disk
        workers = files.workers_of(stamp)
        is_first = is_first_of(workers, group.worker)
        with group.errors_shared(_PLACE):
            if is_first:
                save.write_common(waits=True)
    except WorkerFailure:
        raise  # the others may have found it complete
    except Exception:
        if is_first_of(files.workers_of(stamp), group.worker):
            files.drop(stamp)
        raise
    with group.errors_shared(_PLACE):
        if is_first:
            save.complete(True, before, workers)
    return is_first


def is_first_of(workers: list[int], worker: int) -> bool:
    """Whether no other worker has a lower number."""
    return min(workers, default=worker) >= worker


def save_where_stopped(trainer: pl.Trainer, reason: str, saved: bool) -> None:
    """Save all workers' state after they have stopped at a common step; every worker calls it.

    Args:
        trainer: This worker's.
        reason: Why they have stopped: a requeue of SLURM makes its own checkpoint.
        saved: Whether a checkpoint of this step has been written already.
    """
    if reason == lightning_compat.REQUEUE:
        lightning_compat.requeue(trainer)
    elif not saved and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        callback = trainer.checkpoint_callback
        folder = getattr(callback, "dirpath", None) or trainer.default_root_dir
        path = os.path.join(folder, "interrupted.ckpt")
        trainer.save_checkpoint(path)
        rank_zero_info(
            f"Stopped at a common step and saved {path}. Go on with "
            f"trainer.fit(..., ckpt_path={path!r})."
        )
