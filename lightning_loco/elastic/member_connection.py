"""What a training loop knows of the connection with the other members, also without torchft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from lightning_loco.elastic.data_shard import DataShard


class LoopPosition(Protocol):
    """Position of the training loop around an engine, such as learning rates and their schedules.

    The position is read between two local steps, after the first one is complete.
    """

    def read(self) -> Any:
        """Return the current position as plain values."""

    def resume_from(self, position: Any, member: str) -> None:
        """Continue at a result of :meth:`read` on another member, which is named."""

    def finish_step(self) -> None:
        """Advance the learning rate schedules by one local step."""

    def count_steps(self) -> None:
        """Set the step count of the loop to the engine's."""


class MemberConnection(ABC):
    """The connection of one engine with the other members: the engine's ``exchange``.

    Attributes:
        loop: Position of the training loop around the engine, which is sent to joining workers;
            None if there is no such loop.
        data_shard: This member's part of the training data.
    """

    loop: LoopPosition | None
    data_shard: DataShard

    @property
    @abstractmethod
    def has_joined(self) -> bool:
        """Whether this worker takes part in rounds."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the run after the pending round."""
