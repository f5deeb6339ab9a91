"""The contract of every codec, between what an algorithm proposes and what an exchange sends."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

from torch import Tensor

from lightning_loco.algorithms import State


@dataclasses.dataclass(frozen=True)
class Codec(ABC):
    """How a message is written on the wire, and what of it is lost there.

    Subclasses are frozen dataclasses of settings. What a codec remembers, such as the residual of
    an error feedback, is a state of each worker: tensors of shape ``(P,)``, cut along with the
    parameters and kept in the worker's own checkpoint file.
    """

    @property
    def granularity(self) -> int:
        """What the length of a slice must be a multiple of (the last one may be shorter)."""
        return 1

    def init(self, params: Tensor) -> State:
        """Make the state of a worker.

        Args:
            params: Start parameters ``(P,)``; only shape, dtype and device matter.
        """
        return {}

    @abstractmethod
    def encode(self, message: Tensor, state: State) -> State:
        """Replace a message by what the others will read of it.

        Args:
            message: Flat ``(P,)`` or a slice; overwritten.
            state: The same slice of the state; only read, since the round may fail.

        Returns:
            The state once the round has landed: new tensors for the entries that change.
        """


@dataclasses.dataclass(frozen=True)
class Identity(Codec):
    """Every message arrives as it is.

    Example:
        >>> import torch
        >>> message = torch.tensor([1.5])
        >>> Identity().encode(message, {}), message
        ({}, tensor([1.5000]))
    """

    def encode(self, message: Tensor, state: State) -> State:
        """Change nothing."""
        return {}
