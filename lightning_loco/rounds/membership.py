"""Who takes part in rounds, where that may change while a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rows import RowCarrier
from lightning_loco.rounds.exchange import Exchange

if TYPE_CHECKING:
    from lightning_loco.rounds.engine import Engine
    from lightning_loco.rounds.settings import RoundSettings


class Link(RowCarrier, Exchange, Protocol):
    """One engine's connection with those who take part at present; carries messages and rows."""

    def join(self, engine: Engine) -> None:
        """Take part from now on; a worker that knows nothing of the run gets its state."""

    def catch_up(self) -> bool:
        """Wait for the round under way; whether it shows this worker left behind by the others."""

    def close(self) -> None:
        """Take part no longer."""


@runtime_checkable
class Membership(Protocol):
    """Where an engine learns who takes part; without one, all ranks do, from begin to end."""

    def connect(self, settings: RoundSettings, group: WorkerGroup) -> Link:
        """Connect an engine; it does not take part before :meth:`Link.join`.

        Args:
            settings: Prepared.
            group: The ranks of this job.

        Raises:
            ValueError: If the settings or the number of ranks do not work with it.
        """
