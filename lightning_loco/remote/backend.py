"""Where a server's mean gradients go, whatever makes the step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from lightning_loco.remote.calls import Call
from lightning_loco.remote.optimizer_state import OptimizerState


class Backend(Protocol):
    """Makes the steps of a server, message by message."""

    def join(self, checksum: int) -> dict[str, Any]:
        """Have the parameters ready.

        Returns:
            What to tell the clients: ``hyperparameters`` of the optimizer, and whether it
            ``steps_at_once``, message by message.
        """

    def begin(self, call: Call | None) -> None:
        """A step begins; None if what is wanted will be known at its end only."""

    def push(self, index: int) -> Iterable[int]:
        """The mean gradient of a message is in the accumulator.

        Returns:
            Messages whose parameters are known now; not yet the last one.
        """

    def finish(self, call: Call) -> dict[str, Any]:
        """All gradients are there; returns what to tell the clients about the step."""

    def remaining(self) -> Iterable[int]:
        """The messages that :meth:`push` has not returned, as their parameters become known."""

    def weights(self, index: int) -> Tensor:
        """The parameters of a message."""

    def state(self) -> OptimizerState:
        """What the optimizer remembers."""

    def load_state(self, state: OptimizerState) -> None:
        """Make the optimizer remember."""

    def parameters(self) -> Iterable[Tensor]:
        """All parameters in full precision."""

    def end(self, farewell: dict[str, Any]) -> None:
        """All clients have left."""
