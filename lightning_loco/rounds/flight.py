"""A round between its begin and its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.comm.rows import PendingRows, Row
from lightning_loco.rounds.exchange import Handle


@dataclasses.dataclass
class Flight:
    """Messages of one lane under way, and what their landing needs to know.

    Attributes:
        index: Number of the round.
        rows: What the workers tell with it.
        valid: Whether this worker's message is one of its own progress, with weight in a mean.
        finite: Whether its parameters were finite when it began.
        began_at: Local steps of this worker when it began.
        handles: The parcels under way, in order.
        received: What they have brought; None before it is here.
        stayed: Whether local steps were made while it was under way.
        told: The algorithm's own numbers of all workers; None before they are known.
        is_divided: Whether what has arrived is divided by the total weight already, and what was
            lost on the wire is taken care of.
    """

    index: int
    rows: PendingRows
    valid: bool
    began_at: int
    handles: list[Handle] = dataclasses.field(default_factory=list)
    received: list[Tensor] | None = None
    stayed: bool = False
    told: list[tuple[float, ...]] | None = None
    is_divided: bool = False
    finite: bool = True

    def has_arrived(self) -> bool:
        """Whether everything is here; never waits, and calls others who may not know of it."""
        are_rows_here = self.rows.has_arrived()  # whatever the handles say: this is the call
        return all(handle.has_arrived() for handle in self.handles) and are_rows_here

    def state_dict(self) -> dict[str, Any]:
        """What to know of it besides what it brings."""
        return {
            name: getattr(self, name) for name in ("index", "valid", "began_at", "told", "finite")
        }

    @classmethod
    def arrived(cls, saved: dict[str, Any], received: Sequence[Tensor]) -> Flight:
        """A flight of which only the landing is left, as from a checkpoint.

        ``received`` has arrived, parcel by parcel, and is divided by the total weight.
        """
        rows = PendingRows(lambda: torch.zeros(0, Row.width(0)), f"round {saved['index']}")
        told = saved["told"] and [tuple(numbers) for numbers in saved["told"]]
        flight = cls(saved["index"], rows, saved["valid"], saved["began_at"], told=told)
        flight.finite = saved["finite"]
        flight.handles = [Arrived(tensor) for tensor in received]
        flight.stayed = flight.is_divided = True
        return flight


class Arrived(NamedTuple):
    """A handle whose wait is over."""

    received: Tensor
    lost: None = None

    def has_arrived(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> Tensor:
        """What was received."""
        return self.received

    def release(self) -> None:
        """The memory belongs to someone else."""
