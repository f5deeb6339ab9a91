"""What a rank that serves does under a Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_loco.parameter_server import Serving, Tiers, Transport, serve
from lightning_loco.strategies import lightning_compat

_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path", "dirpath")


def serve_fit(
    trainer: pl.Trainer, tiers: Tiers, rank: int, transport: Transport, serving: Serving
) -> None:
    """Serve until all workers have left ``fit``, then know what worker 0 has logged and saved."""
    (optimizer,) = trainer.optimizers
    groups = optimizer.param_groups
    farewell = serve(groups, lambda _: optimizer, tiers, rank, transport=transport, serving=serving)
    take_in_farewell(trainer, farewell)


def farewell_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What the ranks that serve should know after ``fit``: metrics and paths of checkpoints."""
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "checkpoints": [
            {name: str(getattr(callback, name) or "") for name in _PATHS}
            for callback in _checkpoints(trainer)
        ],
    }


def take_in_farewell(trainer: pl.Trainer, farewell: dict[str, Any]) -> None:
    """Make ``callback_metrics`` and ``ckpt_path="best"`` work here as well."""
    metrics = {name: torch.tensor(v) for name, v in farewell.get("metrics", {}).items()}
    lightning_compat.set_callback_metrics(trainer, metrics)
    callbacks = _checkpoints(trainer)
    for callback, paths in zip(callbacks, farewell.get("checkpoints", []), strict=False):
        for name, path in paths.items():
            setattr(callback, name, path)


def _checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
