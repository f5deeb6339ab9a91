"""The checkpoint of a run that was asked to stop."""

from __future__ import annotations

import os
import re
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_loco.strategies import lightning_private
from lightning_loco.strategies.whole_files import local_path

_REQUEUED = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


def save_where_stopped(trainer: pl.Trainer, reason: str, saved: bool) -> None:
    """Save all workers' state after they have stopped at a common step; every worker calls it.

    Args:
        trainer: This worker's.
        reason: Why they have stopped: a requeue of SLURM makes its own checkpoint.
        saved: Whether a checkpoint of this step has been written already.
    """
    if reason == lightning_private.REQUEUE:
        lightning_private.requeue(trainer)
    elif not saved and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        callback = trainer.checkpoint_callback
        folder = getattr(callback, "dirpath", None) or trainer.default_root_dir
        path = os.path.join(folder, "interrupted.ckpt")
        trainer.save_checkpoint(path)
        rank_zero_info(
            f"Stopped at a common step and saved {path}. Go on with "
            f"trainer.fit(..., ckpt_path={path!r})."
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
