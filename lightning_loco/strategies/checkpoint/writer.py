"""One save by all workers: to one folder that they share, or each to its own disk."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_loco._util.decisions import Decision, carry_out
from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.side_files import SideFiles

_LABEL = "writing a checkpoint"


class Do(enum.Enum):
    """What a rank does between two agreements of all ranks; if it fails, all get its error.

    The argument is a function that does this rank's part, and returns what comes of it; None if
    others do it.

    Attributes:
        PREPARE: Write the files of the workers: the saves that existed before.
        WRITE: Write what all workers share, and the main file beside the one that it will replace.
        COMMIT: Replace the main file, and delete the saves before.
    """

    PREPARE = enum.auto()
    WRITE = enum.auto()
    COMMIT = enum.auto()


class Save(NamedTuple):
    """The data that a rank writes: of a worker of several ranks the first one writes its files.

    :meth:`to_shared_folder` and :meth:`to_private_folders` are decisions, which
    :func:`save_together` carries out.

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

    def to_shared_folder(self, worker: int, place: int, num_workers: int = 1) -> Decision[Do, bool]:
        """Write the save to a folder that all workers see; worker 0 writes the shared state.

        There are side files of all ``num_workers`` workers or of none. The main file is replaced
        after one more agreement: a worker 0 that was suspended while the others ended and a new run
        has saved changes nothing. Returns whether this rank has written the main file. OSError on
        every rank if one cannot write its files; the checkpoint that existed before is still
        complete.
        """
        is_first, staged = worker == place == 0, self.files.can_stage
        try:
            before = yield Do.PREPARE, partial(self._prepare, worker, self.own, lists=is_first)
            yield Do.WRITE, partial(self.write_shared, staged) if is_first else None
            # Another run may have deleted the files of the others before worker 0 wrote its own.
            workers = [] if self.own is None else [*range(num_workers)]
            yield Do.COMMIT, partial(self.commit, staged, before, workers) if is_first else None
        except Exception:
            if is_first:
                self.files.discard(self.stamp)
            raise
        return is_first

    def to_private_folders(self, worker: int, place: int) -> Decision[Do, bool]:
        """Write the save to the disk of each worker, see :meth:`to_shared_folder`.

        The ranks of a worker see the same disk. Workers may share one: on each, the first of the
        workers whose files are there writes the shared state. The main file is replaced only after
        everything is written on all disks: if the workers are killed at any time, there is a save
        that all of them have.
        """
        files, stamp, writes = self.files, self.stamp, place == 0
        # Without a state it is an empty file, to be found on its disk.
        own = (self.own or {}) if writes else None
        try:
            before = yield Do.PREPARE, partial(self._prepare, worker, own, lists=True)
            # With its own, which another run may have deleted while this rank was suspended.
            workers = sorted({*files.workers_of(stamp), worker})
            is_first = writes and _is_first_of(workers, worker)
            yield Do.WRITE, partial(self.write_shared, staged=True) if is_first else None
        except WorkerFailure:
            raise  # the others may have found it complete
        except Exception:
            if writes and _is_first_of(files.workers_of(stamp), worker):
                files.discard(stamp)
            raise
        yield Do.COMMIT, partial(self.commit, True, before, workers) if is_first else None
        return is_first

    def _prepare(self, worker: int, own: dict[str, Any] | None, *, lists: bool) -> list[str]:
        # Listed first: a later save, which may replace this one, must not be deleted as older.
        before = self.files.stamps() if lists else []
        if own is not None:
            self.files.save(self.stamp, worker, own)
        return before

    def write_shared(self, staged: bool) -> None:
        """Write the shared state, and the main file if it can be staged."""
        if self.shared is not None:
            self.files.save(self.stamp, None, self.shared)
        if staged:
            self.write_main(self.files.staged_main(self.stamp))

    def commit(self, staged: bool, before: list[str], workers: list[int]) -> None:
        """Replace the main file, and delete the saves that existed ``before`` this one.

        In this order: a crash in between leaves both saves, and the main file has one of them.

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


def save_together(decide: Callable[[int, int], Decision[Do, bool]], group: WorkerGroup) -> bool:
    """Carry out a decision of a :class:`Save` with the other ranks; all of them must call it."""

    def do(_: Do, part: Callable[[], Any] | None) -> Any:
        with group.errors_shared(_LABEL):
            return part and part()

    return carry_out(decide(group.worker, group.place), do)


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
