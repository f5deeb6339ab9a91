"""What a flight brings, in the form in which rounds wait for it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_loco.comm.rows import PendingRows
from lightning_loco.comm.waiting import Timed
from lightning_loco.elastic.flight import Flight
from lightning_loco.rounds.engine import Engine


class Carried:
    """A handle of what a flight brings.

    Args:
        flight: It.
        engine: Whose message it carries.
        note: Is told of the flight when it is over.
    """

    def __init__(self, flight: Flight, engine: Engine, note: Callable[[Flight], None]) -> None:
        self.flight = flight
        self._engine = engine
        self._note = note

    @property
    def lost(self) -> Tensor | None:
        """What was lost of the message."""
        lost = self.flight.lost
        return None if lost is None else lost.to(self._engine.worker.replica.layout.device)

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        return self.flight.is_over()

    def wait(self) -> Tensor:
        """What the messages have come to."""
        statistics = self._engine.statistics
        with Timed(statistics):
            self.flight.wait()
        self._note(self.flight)
        received = self.flight.received
        assert received is not None
        statistics.bytes_sent += self.flight.bytes_sent
        statistics.bytes_saved += self.flight.bytes_saved
        return received.to(self._engine.worker.replica.layout.device)

    def release(self) -> None:
        """The memory belongs to the flight."""


def rows_of(flight: Flight, engine: Engine, place: str) -> PendingRows:
    """The rows of all members, which come with a flight."""

    def receive() -> Tensor:
        if not flight.is_sent.is_set():
            raise RuntimeError("Rows of members are known when the round is over.")
        with Timed(engine.statistics):
            flight.wait()
        assert flight.rows is not None
        return flight.rows

    return PendingRows(receive, place, flight.is_over)
