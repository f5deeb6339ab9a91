"""PauseAveraging: stops the averaging by the clock during a part of training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_loco.strategies.named import AsyncModelAverageStrategy


class PauseAveraging(pl.Callback):
    """Stop the averaging of :class:`AsyncModelAverageStrategy` during a part of training.

    It calls the strategy's ``abort`` and ``resume`` on every worker, each of which waits for all
    workers. They must therefore reach the same steps or epochs; if they have different numbers of
    batches, use ``epochs``.

    Args:
        steps: The first local step without averaging, counted from 0, and the first one with it
            again; None instead of the second for the rest of training.
        epochs: The same in epochs.
        validation: Pause from the start of each validation to the next batch. No round runs in a
            validation anyway; this also says so to code that reads ``strategy.engine.paused``.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range or none is given, or, before training, if the
            strategy is another one.

    Example::

        pause = PauseAveraging(steps=(1000, 2000))
        Trainer(strategy=AsyncModelAverageStrategy(), devices=4, callbacks=[pause])
    """

    def __init__(
        self,
        *,
        steps: tuple[int, int | None] | None = None,
        epochs: tuple[int, int | None] | None = None,
        validation: bool = False,
    ) -> None:
        if steps is None and epochs is None and not validation:
            raise ValueError(
                "PauseAveraging needs steps=(FIRST, END), epochs=(FIRST, END) or validation=True."
            )
        for name, pause in (("steps", steps), ("epochs", epochs)):
            if pause is not None:
                _check(name, pause)
        self.steps, self.epochs, self.validation = steps, epochs, validation
        self._pauses = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies that do not average by the clock."""
        self._pauses = False
        if stage == "fit" and not isinstance(trainer.strategy, AsyncModelAverageStrategy):
            raise ValueError(
                f"PauseAveraging needs AsyncModelAverageStrategy, but the strategy is "
                f"{type(trainer.strategy).__name__}. Remove the callback, or use "
                "strategy='async_model_average'."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop or resume, if a pause begins or ends with this step."""
        strategy = trainer.strategy
        assert isinstance(strategy, AsyncModelAverageStrategy)
        assert strategy.engine is not None
        self._set(
            strategy,
            _contains(self.steps, strategy.engine.worker.steps)
            or _contains(self.epochs, trainer.current_epoch),
        )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop, if there is a pause in validations."""
        strategy = trainer.strategy
        if isinstance(strategy, AsyncModelAverageStrategy) and strategy.is_training:
            self._set(strategy, self.validation or self._pauses)

    def _set(self, strategy: AsyncModelAverageStrategy, pauses: bool) -> None:
        if pauses != self._pauses:
            (strategy.abort if pauses else strategy.resume)()
        self._pauses = pauses


def _contains(pause: tuple[int, int | None] | None, number: int) -> bool:
    if pause is None:
        return False
    first, end = pause
    return first <= number and (end is None or number < end)


def _check(name: str, pause: tuple[int, int | None]) -> None:
    is_pair = isinstance(pause, (tuple, list)) and len(pause) == 2
    numbers = [value for value in pause if value is not None] if is_pair else []
    if not numbers or pause[0] is None or not all(type(value) is int for value in numbers):
        raise TypeError(
            f"{name} must be a pair of integers such as (1000, 2000), or (1000, None) for the rest "
            f"of training, got {pause!r}."
        )
    first, end = pause
    if first < 0 or (end is not None and end <= first):
        raise ValueError(f"{name} must be (FIRST, END) with 0 <= FIRST < END, got {tuple(pause)}.")
