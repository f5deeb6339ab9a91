"""Clipping and scaling of gradients (16-mixed) where the step is made on another rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from lightning_loco.parameter_server import RemoteOptimizer
from lightning_loco.strategies import lightning_compat


class RemotePrecision:
    """Makes a precision plugin clip and scale through a remote optimizer; :meth:`end` undoes it.

    Args:
        plugin: That of this rank; some of its attributes are replaced.
        remote: Clips the mean gradient where it is, and knows whether all gradients are finite.
    """

    def __init__(self, plugin: Any, remote: RemoteOptimizer) -> None:
        self._plugin = plugin
        self._remote = remote
        self._plugin.clip_gradients = self._clip_gradients
        self._scaler = getattr(plugin, "scaler", None)
        if isinstance(self._scaler, torch.amp.GradScaler):
            self._plugin.scaler = AgreedGradScaler(self._scaler)

    @property
    def scales(self) -> bool:
        """Whether gradients are scaled, and have to be looked at before they are sent."""
        return self._scaler is not None

    def end(self) -> None:
        """Leave the plugin as it was."""
        del self._plugin.clip_gradients
        if self.scales:
            self._plugin.scaler = self._scaler

    def _clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if clip_val > 0 and gradient_clip_algorithm == "value":
            self._remote.clip_grad_value_(clip_val)
        elif clip_val > 0:
            self._remote.clip_grad_norm_(clip_val)


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
        notes = lightning_compat.found_inf(self.scaler, optimizer)
        if not optimizer.are_finite(not any(bool(note) for note in notes)):
            for note in notes:
                note.fill_(1.0)

    def __getattr__(self, name: str) -> Any:
        """Take every other attribute from the wrapped scaler."""
        return getattr(self.scaler, name)
