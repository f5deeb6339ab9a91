"""Which samples each rank reads where members share one stream of data."""

from __future__ import annotations

import threading


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
        # The round thread reads the position, while the training thread, or a loader, advances it.
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
        """Record how many positions the last round used, to estimate the number of the next one."""
        with self._lock:
            # Rounds differ in length if steps per round do, so the longest one counts.
            used = self._used - self._used_before_round
            self._most_per_round = max(used, self._most_per_round)
            self._used_before_round = self._used

    @property
    def first_unused(self) -> int:
        """The first position that no reader uses before the result of the round is applied."""
        with self._lock:
            # The members change at the end of a round, until which local steps go on.
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
