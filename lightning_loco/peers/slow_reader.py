"""Fetches that take as long as they would on slower links."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_loco.clock import REAL_CLOCK, Clock
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.link_times import LinkTimes
from lightning_loco.peers.counts import FetchCounts
from lightning_loco.peers.directory import worker_name
from lightning_loco.peers.reader import Reader, ReaderStopped, Received
from lightning_loco.peers.settings import PairwiseSettings

FetchSeconds = Callable[[str, int, int], float]
"""From a peer's name, the bytes and the number of the fetch to seconds."""


def fetch_seconds(settings: PairwiseSettings, group: WorkerGroup) -> FetchSeconds | None:
    """How long fetches take on the links of the settings; None if none are emulated."""
    if settings.link is None:
        return None
    names = [peer.name for peer in settings.peers]
    own = settings.node_number if names else group.worker
    names = names or [worker_name(worker) for worker in range(group.num_workers)]
    times = LinkTimes(settings.link, len(names))

    def seconds(peer: str, num_bytes: int, count: int) -> float:
        return times.fetch(own, names.index(peer), num_bytes, count).seconds

    return seconds


class SlowReader:
    """A reader whose fetches end when they would over a slower link, or after the timeout.

    Bytes travel as fast as they can; what they bring is handed over later, in the reader's thread,
    which sleeps until then.

    Args:
        reader: Makes the fetches.
        seconds: How long a fetch takes.
        clock: The reader's.
    """

    def __init__(self, reader: Reader, seconds: FetchSeconds, *, clock: Clock = REAL_CLOCK) -> None:
        self._reader = reader
        self._seconds = seconds
        self._clock = clock
        self._count = 0
        self._stopped = threading.Event()

    @property
    def counts(self) -> FetchCounts:
        """As those of the reader; one that would take too long there is a timeout."""
        return self._reader.counts

    @property
    def fetch_timeout_s(self) -> float:
        """The longest fetch, in seconds."""
        return self._reader.fetch_timeout_s

    def fetch(self, deadline: float) -> Received | None:
        """As :meth:`Reader.fetch`, later."""
        started = self._clock.now()
        received = self._reader.fetch(deadline)
        if received is None:
            return None
        seconds = self._seconds(received.peer, received.received_bytes, self._count)
        self._count += 1
        left_s = min(started + seconds, deadline) - self._clock.now()
        if self._clock.wait(self._stopped, max(0.0, left_s)):
            raise ReaderStopped
        if started + seconds > deadline:
            self.counts.fetches -= 1
            self.counts.timeouts += 1
            return None
        fetch_s = max(seconds, received.fetch_s)
        return received._replace(fetch_s=fetch_s, emulated_s=seconds)

    @property
    def look_after_s(self) -> float | None:
        """As that of the reader."""
        return self._reader.look_after_s

    def look(self) -> None:
        """As :meth:`Reader.look`."""
        self._reader.look()

    def stop(self) -> None:
        """Have the fetch under way, and every later one, end soon; for any thread."""
        self._stopped.set()
        self._reader.stop()

    def close(self) -> None:
        """Close all connections."""
        self._reader.close()
