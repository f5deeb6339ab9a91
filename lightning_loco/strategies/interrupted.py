"""The checkpoint of a run that was asked to stop."""

from __future__ import annotations

import os

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_loco.strategies import lightning_private


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
