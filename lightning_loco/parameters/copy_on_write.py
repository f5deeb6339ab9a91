"""Copies of the parameters, for what happens while gradients are computed from the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_loco.parameters.flat import FlatLayout


class CopyOnWrite:
    """Keeps parameters as they are between a forward pass and the end of the optimizer's step.

    A round that would change them in between (another worker makes one, and this one calls a
    collective in its ``training_step``) works on copies instead. At the end of the step the
    parameters move by what the round has changed, so that it lands right before the step, whose
    gradients it does not know. Without such a round no copies are made.

    Args:
        layout: The parameters; its ``tensors`` are the copies while there are any.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._parameters: list[Tensor] = []
        self._start: list[Tensor] = []

    def hold(self) -> None:
        """From here on the parameters must stay; a second call does nothing."""
        self._layout.before_write = self._replace

    @torch.no_grad()
    def release(self) -> None:
        """The step is over: let the parameters move by what has changed, if anything has."""
        self._layout.before_write = None
        if not self._parameters:
            return
        changed = self._layout.tensors
        for parameter, now, start in zip(self._parameters, changed, self._start, strict=True):
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.copy_(parameter.to(wide) + (now.to(wide) - start.to(wide)))
        self._layout.tensors = self._parameters
        self._layout.chunks()
        self._parameters, self._start = [], []

    def _replace(self) -> None:
        if not self._parameters:
            self._parameters = self._layout.tensors
            self._start = [_copy(parameter) for parameter in self._parameters]
            self._layout.tensors = [_copy(parameter) for parameter in self._parameters]
            self._layout.chunks()


def _copy(tensor: Tensor) -> Tensor:
    """With the same strides, so that the flat vector keeps its order and its cuts."""
    data = tensor.detach()
    memory = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
    return memory.copy_(data)
