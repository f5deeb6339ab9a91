"""The strategy of eager updates, which are made for overlap."""

from __future__ import annotations

from typing_extensions import Unpack

from lightning_loco.algorithms import EagerDiLoCo
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.schedules import SyncEvery
from lightning_loco.strategies.arguments import RoundArguments, spelled_out
from lightning_loco.strategies.loco import LocoStrategy


class EagerDiLoCoStrategy(LocoStrategy):
    """Async DiLoCo in which no worker waits for its own part of the mean.

    See :class:`~lightning_loco.algorithms.EagerDiLoCo` for the formula and :class:`LocoStrategy`
    for the arguments that all strategies share.

    Args:
        sync_every: Local steps between rounds, or one number per worker.
        outer_lr: Outer learning rate, or a schedule of rates.
        outer_momentum: Outer momentum.
        nesterov: Nesterov momentum.
        warm_start: Make the first round a blocking one.
        evaluate: As in :class:`LocoStrategy`, like all arguments that follow.

    Example::

        Trainer(strategy=EagerDiLoCoStrategy(sync_every=50), devices=4, num_nodes=8)
    """

    @spelled_out(LocoStrategy.__init__)
    def __init__(
        self,
        sync_every: SyncEvery = 100,
        outer_lr: OuterLR = 0.7,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
        warm_start: bool = True,
        **common: Unpack[RoundArguments],
    ) -> None:
        super().__init__(
            EagerDiLoCo(outer_lr, outer_momentum, nesterov),
            sync_every=sync_every,
            overlap=True,
            warm_start=warm_start,
            **common,
        )
