"""One save by all workers: to one folder that they share, or each to its own disk."""

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

_LABEL = "writing a checkpoint"


class Save(NamedTuple):
    """The data that a rank writes: of a worker of several ranks the first one writes its files.

    Attributes:
        files: The files of the checkpoint.
        stamp: Name of the save.
        own: State of this worker alone; None if there are no side files, or another rank of the
            worker writes them.
        shared: State that all workers share; None if there is none.
        write_main: Writes the main file to a path.
    """

    files: SideFiles
    stamp: str
    own: dict[str, Any] | None
    shared: dict[str, Any] | None
    write_main: Callable[[str], None]

    def to_shared_folder(self, group: WorkerGroup) -> bool:
        """Write the save to a folder that all workers see; worker 0 writes the shared state.

        All ranks must call it. The main file is replaced after one more agreement: a worker 0
        that was suspended while the others ended and a new run has saved changes nothing. Returns
        whether this rank has written the main file. OSError on every rank if one cannot write its
        files; the checkpoint that existed before is still complete.
        """
        is_first, files = group.worker == group.place == 0, self.files
        before: list[str] = []
        try:
            with group.errors_shared(_LABEL):
                if is_first:
                    before = files.stamps()
                if self.own is not None:
                    files.save(self.stamp, group.worker, self.own)
            with group.errors_shared(_LABEL):
                if is_first:
                    self.write_shared(files.can_stage)
            with group.errors_shared(_LABEL):
                if is_first:
                    own = [] if self.own is None else [group.worker]
                    self.commit(files.can_stage, before, own)
        except Exception:
            if is_first:
                files.discard(self.stamp)
            raise
        return is_first

    def to_private_folders(self, group: WorkerGroup) -> bool:
        """Write the save to the disk of each worker, see :meth:`to_shared_folder`.

        The ranks of a worker see the same disk. Workers may share one: on each, the first of the
        workers whose files are there writes the shared state. The main file is replaced only after
        everything is written on all disks: if the workers are killed at any time, there is a save
        that all of them have.
        """
        files, stamp, writes = self.files, self.stamp, group.place == 0
        before: list[str] = []
        try:
            with group.errors_shared(_LABEL):
                before = files.stamps()
                if writes:
                    # Without a state it is an empty file, to be found on its disk.
                    files.save(stamp, group.worker, self.own or {})
            workers = files.workers_of(stamp)
            is_first = writes and _is_first_of(workers, group.worker)
            with group.errors_shared(_LABEL):
                if is_first:
                    self.write_shared(staged=True)
        except WorkerFailure:
            raise  # the others may have found it complete
        except Exception:
            if writes and _is_first_of(files.workers_of(stamp), group.worker):
                files.discard(stamp)
            raise
        with group.errors_shared(_LABEL):
            if is_first:
                self.commit(True, before, workers)
        return is_first

    def write_shared(self, staged: bool) -> None:
        """Write the shared state, and the main file if it can be staged."""
        if self.shared is not None:
            self.files.save(self.stamp, None, self.shared)
        if staged:
            self.write_main(self.files.staged_main(self.stamp))

    def commit(self, staged: bool, before: list[str], workers: list[int]) -> None:
        """Replace the main file, and delete the saves that existed ``before`` this one.

        OSError if files of ``workers`` in this save are gone from this disk, or the main file,
        which may have been ``staged``, cannot be replaced.
        """
        files, stamp, has_side_files = self.files, self.stamp, self.own is not None
        if not staged:  # an object store or a user's CheckpointIO, which cannot rename
            self.write_main(files.path)
        elif not {*workers} <= {*files.workers_of(stamp)} or not files.commit_main(stamp):
            raise OSError(
                f"The checkpoint {files.path} could not be replaced: files of the next one have "
                "been deleted while it was written, as by another run that saves to the same path. "
                "Let each run save to its own folder."
            )
        if staged or has_side_files:
            files.delete_older(stamp, before, is_named=has_side_files)


def _is_first_of(workers: list[int], worker: int) -> bool:
    """Return whether no other worker has a lower number."""
    return min(workers, default=worker) >= worker


def save_where_stopped(trainer: pl.Trainer, reason: str, saved: bool) -> None:
    """Save after all workers have agreed to stop; every worker must call it.

    A requeue of SLURM makes its own checkpoint. A step that is ``saved`` is not saved again.
    """
    if reason == lightning_compat.REQUEUE:
        lightning_compat.requeue(trainer)
    elif not saved and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        callback = trainer.checkpoint_callback
        folder = getattr(callback, "dirpath", None) or trainer.default_root_dir
        path = os.path.join(folder, "interrupted.ckpt")
        trainer.save_checkpoint(path, weights_only=False)  # its default prints a line
        rank_zero_info(
            f"All workers have stopped and saved {path}. Go on with "
            f"trainer.fit(..., ckpt_path={path!r})."
        )
