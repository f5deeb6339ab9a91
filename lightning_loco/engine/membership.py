"""Who takes part in rounds, where that may change while a run goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning_loco.algorithms import Algorithm
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.exchanges.base import Exchange
from lightning_loco.topology import Topology

if TYPE_CHECKING:
    from lightning_loco.engine.engine import Engine
    from lightning_loco.engine.settings import RoundSettings


class Host(Protocol):
    """The program around an engine, with a position of its own: schedules of learning rates.

    Its rounds are made between two local steps, when all is done that belongs to the first one.
    """

    def read(self) -> Any:
        """The present position, as plain values."""

    def go_on(self, position: Any, who: str) -> None:
        """Go on from the position of another worker, which has come with the state of the run.

        Args:
            position: What :meth:`read` has returned there.
            who: That worker.
        """

    def end_step(self) -> None:
        """Let schedules do what they do after a local step."""

    def count(self) -> None:
        """Count as many local steps as the engine."""


class DataShare:
    """This member's positions in the stream of samples that all members share.

    Member i of N takes the positions ``base + k N + i``. When the members change, all begin at a
    new base beyond everything that anyone may have taken until then, so that no two members ever
    take the same position.

    Attributes:
        sizes: How many samples the data have that are read so; equal on all members.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sizes: list[int] = []
        self._base, self._place, self._count = 0, 0, 1
        self._taken = self._taken_before = self._taken_in_round = 0

    def add_data(self, size: int) -> None:
        """The stream is one of so many samples, epoch after epoch."""
        if size not in self.sizes:
            self.sizes.append(size)

    def take(self) -> int:
        """The next position of this member."""
        with self._lock:
            position = self._base + self._taken * self._count + self._place
            self._taken += 1
            return position

    def begin_round(self) -> None:
        """Learn from the round before how much is taken in one."""
        with self._lock:
            self._taken_in_round = max(self._taken - self._taken_before, self._taken_in_round)
            self._taken_before = self._taken

    @property
    def reach(self) -> int:
        """The first position that nobody reaches before the next round."""
        with self._lock:
            return self._base + self._count * (self._taken + self._taken_in_round + 1)

    def begin_at(self, position: int) -> None:
        """Go on from a position, when a run is resumed."""
        self.deal(position, 0, 1)

    def deal(self, base: int, place: int, count: int) -> None:
        """Go on from a new base, as one of so many members."""
        with self._lock:
            self._base, self._place, self._count = base, place, count
            self._taken = self._taken_before = 0


class Link(Exchange, Protocol):
    """One engine's connection with those who take part at present; carries messages and rows.

    Attributes:
        host: Whose position newcomers get; None if there is none.
        share: This member's part of the data.
    """

    host: Host | None
    share: DataShare

    @property
    def has_joined(self) -> bool:
        """Whether this worker takes part."""

    def join(self, engine: Engine) -> None:
        """Take part from now on; a worker that knows nothing of the run gets its state."""

    def catch_up(self) -> None:
        """Wait for the round under way; who is left behind goes on from that of the run."""

    def finish(self) -> None:
        """The last rounds of this worker follow: they wait for no more workers than there are."""

    def leave(self) -> None:
        """Take part no longer, when the round under way is over."""

    def close(self) -> None:
        """Take part no longer; at once, but after :meth:`finish`."""


@runtime_checkable
class Membership(Protocol):
    """Where an engine learns who takes part; without one, all ranks do, from begin to end."""

    @property
    def min_workers(self) -> int:
        """With fewer, rounds wait."""

    def prepare(self, algorithm: Algorithm, topology: Topology | None) -> Algorithm:
        """Check and fill in ``"auto"`` settings, as :meth:`Algorithm.prepare` does.

        The result must not depend on how many workers there are at present.

        Raises:
            ValueError: If the settings do not work with every number of workers.
        """

    def connect(self, settings: RoundSettings, group: WorkerGroup) -> Link:
        """Connect an engine; it does not take part before :meth:`Link.join`.

        Args:
            settings: Prepared.
            group: The ranks of this job.

        Raises:
            ValueError: If the settings or the number of ranks do not work with it.
        """
