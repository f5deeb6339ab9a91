"""A round between its begin and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.comm.rows import PendingRows, Row
from lightning_loco.rounds.exchange import Handle


class Flight:
    """Messages of one lane under way, and what their landing needs to know.

    Args:
        index: Number of the round.
        rows: What the workers tell with it.
        valid: Whether this worker's message is one of its own progress.
        began_at: Local steps of this worker when it began.

    Attributes:
        handles: The parcels under way, in order.
        stayed: Whether local steps were made while it was under way.
        told: The algorithm's own numbers of all workers; None before they are known.
        is_divided: Whether what has arrived is divided by the total weight already.
    """

    def __init__(self, index: int, rows: PendingRows, valid: bool, began_at: int) -> None:
        self.index = index
        self.rows = rows
        self.valid = valid
        self.began_at = began_at
        self.handles: list[Handle] = []
        self.stayed = False
        self.told: list[tuple[float, ...]] | None = None
        self.is_divided = False
        self._received: list[Tensor] | None = None

    @classmethod
    def arrived(cls, saved: dict[str, Any], received: Sequence[Tensor]) -> Flight:
        """A flight of which only the landing is left, as from a checkpoint.

        Args:
            saved: Of :meth:`state_dict`.
            received: What has arrived, parcel by parcel, divided by the total weight.
        """
        rows = PendingRows(lambda: torch.zeros(0, Row.width(0)), f"round {saved['index']}")
        flight = cls(saved["index"], rows, saved["valid"], saved["began_at"])
        flight.handles = [Arrived(tensor) for tensor in received]
        flight.told = saved["told"] and [tuple(numbers) for numbers in saved["told"]]
        flight.stayed = flight.is_divided = True
        return flight

    def state_dict(self) -> dict[str, Any]:
        """What to know of it besides what it brings."""
        names = ("index", "valid", "began_at", "told")
        return {name: getattr(self, name) for name in names}

    def has_arrived(self) -> bool:
        """Whether everything is here; never waits, and calls others who may not know of it."""
        return all(handle.has_arrived() for handle in self.handles) and self.rows.has_arrived()

    def receive(self) -> list[Tensor]:
        """Wait for all parcels, once; what each has brought.

        Raises:
            RuntimeError: If a worker is missing or has failed; nothing has changed then.
        """
        if self._received is None:
            self._received = [handle.wait() for handle in self.handles]
        return self._received

    def total_weight(self) -> float:
        """What sums that have arrived are to be divided by; waits for the rows.

        Raises:
            RuntimeError: If no worker has a valid message.
        """
        return 1.0 if self.is_divided else self.rows.total_weight()

    def release(self) -> None:
        """Give the memory of what was received back to the exchange."""
        for handle in self.handles:
            handle.release()
        self._received = None


class Arrived(NamedTuple):
    """A handle whose wait is over."""

    received: Tensor

    def has_arrived(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> Tensor:
        """What was received."""
        return self.received

    def release(self) -> None:
        """The memory belongs to someone else."""
