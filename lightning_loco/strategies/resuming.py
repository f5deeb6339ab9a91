"""Where each worker is, inside the ordinary checkpoint: for a resume that is exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.strategies import checkpoint as side
from lightning_loco.strategies import lightning_private

KEY = "lightning_loco_positions"


class Resumed(NamedTuple):
    """A worker's position, to be taken up when training starts.

    Attributes:
        random: States of the random number generators.
        new_epoch: Whether the next epoch begins.
    """

    random: dict[str, Any] | None
    new_epoch: bool

    def restore(self, trainer: pl.Trainer) -> None:
        """Take it up."""
        if self.random is not None:
            side.set_random_state(self.random)
        if self.new_epoch:
            lightning_private.start_epoch_data(trainer)


def add_positions(checkpoint: dict[str, Any], workers: WorkerGroup) -> None:
    """Put every worker's loops and random state into the checkpoint; all workers call it."""
    own = {"loops": checkpoint["loops"], "random": side.random_state()}
    positions = workers.gather_objects(own)
    if workers.worker == 0:
        checkpoint[KEY] = positions


def take_position(loaded: dict[str, Any], worker: int, num_workers: int) -> Resumed | None:
    """Put this worker's loops where Lightning reads them.

    With another number of workers, all go on from worker 0's loops and new random numbers.

    Returns:
        None for a checkpoint of something else.
    """
    positions = loaded.get(KEY)
    if positions is None:
        return None
    position = {"random": None}
    if len(positions) == num_workers:
        position = positions[worker]
        loaded["loops"] = position["loops"]
    return Resumed(position["random"], side.forget_finished_epoch(loaded))
