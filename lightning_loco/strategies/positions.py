"""Where a worker is in its data and its random numbers, to go on exactly there."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl

from lightning_loco.strategies import lightning_private
from lightning_loco.strategies.random_states import set_random_states


class Position(NamedTuple):
    """What a worker takes up right before its first resumed batch.

    Attributes:
        random: States of the random number generators; None to leave them as they are.
        new_epoch: Whether the run goes straight on with a new epoch.
    """

    random: dict[str, Any] | None
    new_epoch: bool

    def restore(self, trainer: pl.Trainer) -> None:
        """Take it up; the loops have been restored by Lightning."""
        if self.random is not None:
            set_random_states(self.random)
        if self.new_epoch:
            lightning_private.start_epoch_data(trainer)


def forget_finished_epoch(loaded: dict[str, Any]) -> bool:
    """Drop the position in the data when it is the end of an epoch.

    Lightning would put the loader at its end again and count an epoch without batches. When the
    epoch is already counted, it would also take the next one for its last batch.

    Args:
        loaded: A checkpoint, before Lightning reads its loops.

    Returns:
        Whether Lightning goes straight on with the next epoch, without ending the present one.
    """
    loop = loaded["loops"]["fit_loop"]
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    if not batches["is_last_batch"]:
        return False
    loop["state_dict"].pop("combined_loader", None)
    batch_ended = batches["current"]["completed"] == batches["current"]["ready"]
    epoch_ended = epochs["current"]["processed"] == epochs["current"]["ready"]
    if epoch_ended:
        batches["is_last_batch"] = False
        batches["current"] = dict.fromkeys(batches["current"], 0)
        for counts in (epochs["current"], epochs["total"]):
            counts["completed"] = counts["processed"]
    return epoch_ended or not batch_ended
