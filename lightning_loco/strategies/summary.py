"""Settings that work, but badly: what is said of them before training starts, in a line each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import lightning.pytorch as pl

from lightning_loco.engine import RoundSettings
from lightning_loco.parameters.flat import FlatLayout
from lightning_loco.schedules import Staggered

FEWEST_ROUNDS = 10
"""Outer momentum takes about as many rounds to show."""

NO_METRICS = (None, "step", "epoch")
"""What a callback may monitor that is no metric."""

SHORT_ROUND = 20
"""Local steps; with as many or fewer, momentum of 0.9 and more goes too far."""


def advice(
    trainer: pl.Trainer,
    settings: RoundSettings,
    worker: int,
    layout: FlatLayout,
    shown: Literal["average", "outer", "local"],
) -> Iterator[str]:
    """What of a run's settings is likely to disappoint, and what to use instead.

    Args:
        trainer: Right before its first step.
        settings: Of the rounds, prepared.
        worker: This worker.
        layout: Of the exchanged parameters.
        shown: What a validation shows: the average of all workers' parameters, outer parameters, or
            this worker's own.
    """
    schedule = settings.schedule.of_worker(worker)
    every = schedule.sync_every_of(worker)
    if every is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    steps = trainer.estimated_stepping_batches
    batches = trainer.num_training_batches / trainer.accumulate_grad_batches
    if steps < FEWEST_ROUNDS * every:
        fitting = max(1, int(steps) // FEWEST_ROUNDS)
        yield (
            f"sync_every={every} leaves {int(steps) // every} rounds in this run of {steps:.0f} "
            f"local steps, and the workers train mostly alone. Use sync_every={fitting} or less."
        )
    elif every > batches:
        yield (
            f"sync_every={every} is longer than an epoch of {batches:.0f} local steps: workers are "
            f"far apart in validations at the ends of epochs. Use sync_every={batches:.0f} or less."
        )
    momentum = getattr(settings.algorithm, "outer_momentum", 0.0)
    if momentum >= 0.9 and every <= SHORT_ROUND:
        yield (
            f"outer_momentum={momentum:g} suits hundreds of local steps between rounds, and "
            f"sync_every is {every}. Use outer_momentum=0.5, or a longer sync_every."
        )
    between = _steps_between_validations(trainer)
    monitors = _monitors(trainer) if shown == "outer" else []
    staggered = schedule if isinstance(schedule, Staggered) else None
    gap = every if staggered is None else staggered.shortest_gap
    if monitors and between < gap:
        yield (
            "Validations show the outer parameters, which only rounds change: "
            f"{' and '.join(monitors)} may see the same value again and again. "
            f"Validate every {gap} local steps or less often."
        )
    if shown == "average" and settings.compression is not None and math.isfinite(between):
        of_rounds = settings.compression.codec.num_bytes(layout.numel) * between / every
        times = layout.num_bytes / of_rounds
        if times > 1:
            yield (
                f"The average of the workers that a validation needs takes {times:.1f} times the "
                "bytes of the compressed rounds between two validations. Validate every "
                f"{math.ceil(between * times)} local steps or less often, or use evaluate='outer'."
            )


def _monitors(trainer: pl.Trainer) -> list[str]:
    """The callbacks that decide by the value of a metric, in words."""
    callbacks = [*trainer.early_stopping_callbacks, *trainer.checkpoint_callbacks]
    found = [(type(one).__name__, getattr(one, "monitor", None)) for one in callbacks]
    return [f"{kind}(monitor={name!r})" for kind, name in found if name not in NO_METRICS]


def _steps_between_validations(trainer: pl.Trainer) -> float:
    """Local steps; infinite if there is no validation."""
    batches = trainer.val_check_batch
    if not trainer.enable_validation or batches is None:
        return math.inf
    is_at_end = batches == trainer.num_training_batches
    epochs = trainer.check_val_every_n_epoch or 1
    return batches * (epochs if is_at_end else 1) / trainer.accumulate_grad_batches
