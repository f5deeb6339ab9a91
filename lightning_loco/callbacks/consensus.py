"""ConsensusMonitor: how far the workers are apart."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_loco.callbacks.monitor import RoundMonitor
from lightning_loco.engine import Engine
from lightning_loco.strategies.base import EngineStrategy


class ConsensusMonitor(RoundMonitor):
    r"""Log the consensus distance right before rounds, when the workers are farthest apart.

    .. math:: \sqrt{\tfrac{1}{N} \sum_i \lVert \theta^i - \bar\theta \rVert^2}

    Metric: ``loco/consensus_distance``. It costs one small all-reduce in each measured round, of at
    most ``max_elements`` parameters as float64; for larger models it is an estimate from every k-th
    parameter, others in each round. On the demo 8192 are within 1 % of the distance.

    Args:
        every_n_rounds: Measure in every n-th round, at least 1.
        max_elements: Parameters to look at, at most.
        prog_bar: Show it in the progress bar, too.

    Raises:
        ValueError: If a number is smaller than 1.
        TypeError: If a number is not an integer.

    Example::

        Trainer(strategy=GASLoCStrategy(), callbacks=[ConsensusMonitor(every_n_rounds=10)])
    """

    def __init__(
        self, every_n_rounds: int = 1, max_elements: int = 8192, prog_bar: bool = False
    ) -> None:
        for name, value in (("every_n_rounds", every_n_rounds), ("max_elements", max_elements)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}.")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        super().__init__(prog_bar)
        self.every_n_rounds = every_n_rounds
        self.max_elements = max_elements

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask the engine to measure; the same on all workers."""
        super().on_fit_start(trainer, pl_module)
        strategy = trainer.strategy
        if isinstance(strategy, EngineStrategy) and isinstance(strategy.engine, Engine):
            strategy.engine.consensus_every = self.every_n_rounds
            strategy.engine.consensus_elements = self.max_elements

    def metrics(self, strategy: EngineStrategy) -> dict[str, float]:
        """The last measured distance."""
        distance = strategy.statistics.consensus_distance
        return {} if distance is None else {"loco/consensus_distance": distance}
