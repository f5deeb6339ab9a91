"""What the monitors share: log figures of the last round at the steps the user wants logged."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_loco.strategies.base import EngineStrategy
from lightning_loco.strategies.lightning_compat import is_logging_step


class RoundMonitor(pl.Callback):
    """Log some figures whenever a round has ended, as often as ``log_every_n_steps`` allows.

    Args:
        prog_bar: Show the figures in the progress bar, too.

    Attributes:
        strategies: Those that have the figures.
    """

    strategies: tuple[type[Any], ...] = (EngineStrategy,)

    def __init__(self, prog_bar: bool = False) -> None:
        self.prog_bar = prog_bar
        self._logged: object = 0

    @abstractmethod
    def metrics(self, strategy: Any) -> dict[str, float]:
        """The names and values to log, of one of the :attr:`strategies`."""

    def news(self, strategy: Any) -> object:
        """What is another thing as soon as there is something to log: the number of rounds."""
        return strategy.statistics.rounds

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the rounds of an earlier fit."""
        self._logged = 0
        if not isinstance(trainer.strategy, self.strategies):
            rank_zero_info(
                f"{type(self).__name__} logs nothing with {type(trainer.strategy).__name__}, which "
                "has no such figures."
            )

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log if there are news since the last time; no communication."""
        strategy: Any = trainer.strategy
        if not isinstance(strategy, self.strategies):
            return
        if not (self.prog_bar or is_logging_step(trainer)):
            return
        news = self.news(strategy)
        if news == self._logged:
            return
        self._logged = news
        pl_module.log_dict(
            self.metrics(strategy), prog_bar=self.prog_bar, on_step=True, on_epoch=False
        )
