"""What makes a server's steps: an optimizer in its process, or a connection to one elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_loco.remote.calls import Call
from lightning_loco.remote.optimizer_state import OptimizerState
from lightning_loco.remote.wire import Sending


class Backend(Protocol):
    """Takes in mean gradients message by message and knows the parameters after the step.

    Attributes:
        shapes: Tensors of the parameters' shapes and dtypes.
    """

    shapes: Sequence[Tensor]

    def join(self, checksum: int) -> dict[str, Any]:
        """Have the parameters ready for clients that begin.

        Args:
            checksum: Tells the model.

        Returns:
            What to tell the clients: ``hyperparameters`` of the optimizer, and whether it
            ``steps_at_once``, message by message.
        """

    def begin(self, call: Call | None) -> None:
        """Begin a step.

        Args:
            call: What the workers want of it; None if they say so only at its end.
        """

    def push(self, index: int) -> Iterable[int]:
        """Take in the mean gradient of a message from the accumulator.

        Returns:
            Numbers of the messages whose parameters are known now; never the last one.
        """

    def finish(self, call: Call) -> dict[str, Any]:
        """End the step, now that all gradients are there.

        Returns:
            What to tell the clients about it, such as changed ``hyperparameters``.
        """

    def remaining(self) -> Iterable[int]:
        """The messages that :meth:`push` has not returned, as their parameters become known."""

    def weights(self, index: int) -> Tensor:
        """The parameters of a message, as they travel."""

    def state(self) -> OptimizerState:
        """What the optimizer remembers."""

    def load_state(self, state: OptimizerState) -> None:
        """Give the optimizer a state to go on from."""

    def parameters(self) -> Iterable[Tensor]:
        """All parameters in full precision."""

    def load_parameters(self, values: Iterable[Tensor]) -> None:
        """Replace parameters, except where a value is what the workers were sent."""

    def end(self, farewell: dict[str, Any]) -> None:
        """All clients have left, with a last word for whoever has the optimizer."""

    def fail(self, text: str) -> list[Sending]:
        """The server ends because of an error; returns what is on its way to the optimizer."""
