"""A barrier in the job's key-value store at which a worker with a round can call the others.

An all-reduce must be called by all workers, and workers at a sync point cannot know whether another
one runs a round. So a worker at a sync point writes its status to the store and waits for the
statuses of all. A worker in a round comes to the barrier only when its all-reduce is late, because
some workers may then be at a sync point.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.distributed import json_messages
from lightning_loco.distributed.store import StoreTimeout, TimeoutStore
from lightning_loco.distributed.watchdog import Watchdog

_SHORTEST_PAUSE_PER_WORKER_S = 0.0001
_LONGEST_PAUSE_S = 0.01
_ROUND_COUNT = 2**32
_ROUND = b"round"


class StoreBarrier:
    """One worker's access to the barrier.

    A counter in the store counts the workers that have come to an exchange of statuses; it grows by
    ``_ROUND_COUNT`` more for each that runs a round. The last one writes the result.

    Args:
        store: Key-value store shared by all workers.
        worker: Number of this worker.
        num_workers: Number of workers N.
        clock: Clock for the waits.

    Attributes:
        exchange: How many exchanges of statuses this worker has begun; all workers count alike.
    """

    def __init__(
        self, store: TimeoutStore, worker: int, num_workers: int, clock: Clock = REAL_CLOCK
    ) -> None:
        self._store = store
        self._worker = worker
        self._num_workers = num_workers
        self._clock = clock
        self._counted: list[int] = []
        self.exchange = 0

    def call_to_round(self, timeout_s: float) -> None:
        """Come to the barrier with a round; once per exchange."""
        self._come(1 + _ROUND_COUNT, timeout_s)

    def wait(
        self, numbers: Sequence[float], watchdog: Watchdog, label: str, timeout_s: float
    ) -> list[list[float]] | None:
        """Wait for all workers; return the numbers of all, or None if any of them runs a round.

        No worker can be further than this one: every exchange needs all of them. ``numbers`` are
        this worker's status, as many on all workers. WorkerFailure if a worker is late or has
        failed, RuntimeError if the store holds something else.
        """
        deadline = self._clock.now() + timeout_s
        # They may be overwritten: the last worker of the exchange before has read the old ones.
        own = json_messages.write(list(map(float, numbers))).decode()
        self._store.set(self._key_of(self._worker), own, timeout_s)
        num_missing = self._come(1, timeout_s)
        pause_s = _SHORTEST_PAUSE_PER_WORKER_S * num_missing
        key = f"{self.exchange}/all"
        while True:
            self._clock.sleep(min(pause_s, _LONGEST_PAUSE_S))
            pause_s = 2 * pause_s
            watchdog.raise_if_failed()
            left_s = deadline - self._clock.now()
            try:
                if self._store.check([key], left_s):
                    found = self._store.get(key, left_s)
                    break
            except StoreTimeout:
                left_s = 0.0
            if left_s <= 0:
                raise watchdog.blame(label, timeout_s)
        return None if found == _ROUND else _table(found, self._num_workers, len(numbers))

    def _key_of(self, worker: int) -> str:
        return f"numbers/{worker}"

    def _come(self, count: int, timeout_s: float) -> int:
        """Add to the counter, and write the result if all have come; how many are missing."""
        number, store = self.exchange, self._store
        num_rounds, num_present = divmod(
            store.add(f"{number}/count", count, timeout_s), _ROUND_COUNT
        )
        if num_present == self._num_workers:
            result = _ROUND
            if not num_rounds:
                keys = [self._key_of(worker) for worker in range(self._num_workers)]
                result = b"[" + b",".join(store.get_all(keys, timeout_s)) + b"]"
            store.set(f"{number}/all", result.decode(), timeout_s)
        if num_present == 1:
            self._counted.append(number)
        # A worker in exchange n has read all results up to n - 2.
        while self._counted and self._counted[0] < number - 1:
            old = self._counted.pop(0)
            for key in (f"{old}/count", f"{old}/all"):
                store.delete_key(key, timeout_s)
        return self._num_workers - num_present


def _table(text: bytes, num_workers: int, width: int) -> list[list[float]]:
    """The numbers of all workers; RuntimeError if the text holds something else."""
    found = json_messages.read(text, "The barrier in the job's key-value store")
    rows = found if isinstance(found, list) else []
    fitting = [r for r in rows if isinstance(r, list) and [type(n) for n in r] == [float] * width]
    if len(fitting) != num_workers or len(rows) != num_workers:
        raise RuntimeError(
            f"The barrier in the job's key-value store holds {str(found)[:200]!r} instead of "
            f"{width} numbers of each of {num_workers} workers. Does another program use the port "
            "of this job?"
        )
    return fitting
