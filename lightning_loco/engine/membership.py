"""Membership: which workers take part in rounds, where that may change during a run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning_loco.algorithms import Algorithm
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.exchanges.exchange import Exchange
from lightning_loco.topology import Topology

if TYPE_CHECKING:
    from lightning_loco.engine.engine import Engine
    from lightning_loco.engine.settings import RoundSettings


@runtime_checkable
class Membership(Protocol):
    """What an engine needs to find the workers that take part; by default all ranks do."""

    @property
    def min_workers(self) -> int:
        """Rounds wait while there are fewer workers."""

    def prepare(self, algorithm: Algorithm, topology: Topology | None, is_late: bool) -> Algorithm:
        """Check an algorithm and fill in ``"auto"`` settings, as :meth:`Algorithm.prepare` does.

        The result must not depend on the current number of workers; ValueError if that cannot be.
        """

    def connect(self, settings: RoundSettings, group: WorkerGroup) -> MemberConnection:
        """Create the connection of an engine; :meth:`MemberConnection.join` then joins the run.

        ValueError if the settings, or the ranks of this job, are not supported.
        """


class MemberConnection(Exchange, Protocol):
    """The connection of one engine with the other members: sends its messages and statuses.

    Attributes:
        loop: Position of the training loop around the engine, which is sent to joining workers;
            None if there is no such loop.
        data_shard: This member's part of the training data.
    """

    loop: LoopPosition | None
    data_shard: DataShard

    @property
    def has_joined(self) -> bool:
        """Whether this worker takes part in rounds."""

    def join(self, engine: Engine) -> None:
        """Join the run; a worker that has no state, or an older one, receives that of the run."""

    def catch_up(self) -> None:
        """Wait for the pending round; a worker that is behind then resumes from the run's state."""

    def finish(self) -> None:
        """Announce that the next rounds are the last of this worker.

        They do not wait for further workers to join.
        """

    def leave(self) -> None:
        """Leave the run after the pending round."""

    def close(self) -> None:
        """Leave the run: at once, or after the pending round if :meth:`finish` was called."""


class LoopPosition(Protocol):
    """Position of the training loop around an engine, such as learning rates and their schedules.

    The position is read between two local steps, after the first one is complete.
    """

    def read(self) -> Any:
        """Return the current position as plain values."""

    def resume_from(self, position: Any, member: str) -> None:
        """Continue at what :meth:`read` has returned on another member, which is named."""

    def finish_step(self) -> None:
        """Advance the learning rate schedules by one local step."""

    def count_steps(self) -> None:
        """Set the step count of the loop to that of the engine."""


class DataShard:
    """The positions of this rank in the stream of samples that all members share.

    Reader i of N, of all members, uses the positions ``base + k N + i``. When the members change,
    all continue at a new base, beyond every position that any of them may have used, so that no two
    readers ever use the same position.

    Args:
        reader: Number of this rank among the readers of its member. Ranks that read the same data
            are one reader.
        num_readers: Number of readers of each member.

    Attributes:
        dataset_sizes: Number of samples of each data set that is read this way; equal on all
            members.
        num_readers: Number of readers of each member.
    """

    def __init__(self, reader: int = 0, num_readers: int = 1) -> None:
        self._lock = threading.Lock()
        self.dataset_sizes: list[int] = []
        self._base, self._member, self._num_members = 0, 0, 1
        self._used = self._used_before_round = self._most_per_round = 0
        self.set_reader(reader, num_readers)

    def set_reader(self, reader: int, num_readers: int) -> None:
        """Set the number of this rank among the readers of its member, and how many they are."""
        self._reader, self.num_readers = reader, num_readers

    def add_dataset(self, size: int) -> None:
        """Register a data set of ``size`` samples, which the stream repeats in every epoch."""
        if size not in self.dataset_sizes:
            self.dataset_sizes.append(size)

    def next_position(self) -> int:
        """Return the next position of this rank."""
        with self._lock:
            row = self._used * self._num_members + self._member
            self._used += 1
            return self._base + row * self.num_readers + self._reader

    def start_round(self) -> None:
        """Record how many positions the last round used, to estimate those of the next one."""
        with self._lock:
            used = self._used - self._used_before_round
            self._most_per_round = max(used, self._most_per_round)
            self._used_before_round = self._used

    @property
    def first_unused(self) -> int:
        """The first position that no reader uses before the result of the round is applied."""
        with self._lock:
            rows = self._num_members * (self._used + self._most_per_round + 1)
            return self._base + rows * self.num_readers

    def start_at(self, position: int) -> None:
        """Continue at a position, when a run is resumed."""
        self.reassign(position, 0, 1)

    def reassign(self, base: int, member: int, num_members: int) -> None:
        """Continue at a new base, as a reader of this ``member`` of ``num_members``."""
        with self._lock:
            self._base, self._member, self._num_members = base, member, num_members
            self._used = self._used_before_round = 0
