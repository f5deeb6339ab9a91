"""Gradient scaling (16-mixed) that skips a step on all workers or on none."""

from __future__ import annotations

from typing import Any

import torch

from lightning_loco.remote import RemoteOptimizer
from lightning_loco.strategies import lightning_private


class AgreedGradScaler:
    """A gradient scaler whose infinities are those of all workers.

    The scale then moves alike everywhere, and a step is skipped everywhere.

    Args:
        scaler: Does all the rest.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, and note when those of any worker are not finite."""
        assert isinstance(optimizer, RemoteOptimizer)
        self.scaler.unscale_(optimizer)
        notes = lightning_private.found_inf(self.scaler, optimizer)
        if not optimizer.are_finite(not any(bool(note) for note in notes)):
            for note in notes:
                note.fill_(1.0)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the scaler's."""
        return getattr(self.scaler, name)
