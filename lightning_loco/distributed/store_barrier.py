"""A notice board in the job's key-value store: who makes a round, who waits at a sync point.

An all-reduce must be called by all workers, and those at a sync point cannot know whether another
one has a round to make. So those at a sync point leave a notice, with what they have to tell, and
wait for the notices of all. A worker with a round leaves one only when its all-reduce is late,
since somebody may then be at a sync point.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_loco.distributed import notes
from lightning_loco.distributed.store import StoreTimeout, TimeoutStore
from lightning_loco.distributed.watchdog import Watchdog

_PAUSE_FOR_EACH_S = 0.0001
_LONGEST_PAUSE_S = 0.01
_WITH_A_ROUND = 2**32
_A_ROUND = b"round"


class StoreBarrier:
    """The notices of all workers.

    The store counts the notices of an exchange; who leaves the last one sums up what they say.

    Args:
        store: Key-value store shared by all workers.
        worker: Number of this worker, out of ``num_workers``.

    Attributes:
        exchange: How many exchanges this worker has begun; all workers count alike.
    """

    def __init__(self, store: TimeoutStore, worker: int, num_workers: int) -> None:
        self._store = store
        self._worker = worker
        self._num_workers = num_workers
        self._opened: list[int] = []
        self.exchange = 0

    def call_to_round(self, timeout_s: float) -> None:
        """Say that this worker makes a round in the exchange that has begun; once."""
        self._post(1 + _WITH_A_ROUND, timeout_s)

    def meet(
        self, numbers: Sequence[float], watchdog: Watchdog, label: str, timeout_s: float
    ) -> list[list[float]] | None:
        """Wait until all workers have left a notice for this exchange; an error says who has not.

        Nobody can be further than this worker: every exchange needs all of them.

        Args:
            numbers: What this worker has to tell; as many on all workers.
            watchdog: Says who is late.
            label: Where this worker is, in words.
            timeout_s: Longest wait, in seconds.

        Returns:
            The numbers of all workers; None if any of them makes a round.

        Raises:
            WorkerFailure: If a worker is late, or has failed.
            RuntimeError: If there is something else on the board.
        """
        deadline = time.monotonic() + timeout_s
        # Nobody changes its numbers before the last notice of this exchange is summed up.
        said = notes.write(list(map(float, numbers))).decode()
        self._store.set(self._key_of(self._worker), said, timeout_s)
        num_missing = self._post(1, timeout_s)
        pause_s = _PAUSE_FOR_EACH_S * num_missing
        key = f"{self.exchange}/all"
        while True:
            time.sleep(min(pause_s, _LONGEST_PAUSE_S))
            pause_s = 2 * pause_s
            watchdog.raise_if_failed()
            left_s = deadline - time.monotonic()
            try:
                if self._store.check([key], left_s):
                    found = self._store.get(key, left_s)
                    break
            except StoreTimeout:
                left_s = 0.0
            if left_s <= 0:
                raise watchdog.blame(label, timeout_s)
        return None if found == _A_ROUND else _table(found, self._num_workers, len(numbers))

    def _key_of(self, worker: int) -> str:
        return f"numbers/{worker}"

    def _post(self, notice: int, timeout_s: float) -> int:
        """Leave a notice, and sum them up if it is the last one; how many are missing."""
        number, store = self.exchange, self._store
        notices = store.add(f"{number}/notices", notice, timeout_s)
        num_rounds, num_posted = divmod(notices, _WITH_A_ROUND)
        if num_posted == self._num_workers:
            said = _A_ROUND
            if not num_rounds:
                keys = [self._key_of(worker) for worker in range(self._num_workers)]
                said = b"[" + b",".join(store.get_all(keys, timeout_s)) + b"]"
            store.set(f"{number}/all", said.decode(), timeout_s)
        if num_posted == 1:
            self._opened.append(number)
        # Whoever is in the exchange before this one has read everything that is older.
        while self._opened and self._opened[0] < number - 1:
            old = self._opened.pop(0)
            for key in (f"{old}/notices", f"{old}/all"):
                store.delete_key(key, timeout_s)
        return self._num_workers - num_posted


def _table(said: bytes, num_workers: int, width: int) -> list[list[float]]:
    """The numbers of all workers, if it is those."""
    found = notes.read(said, "The notice board")
    rows = found if isinstance(found, list) else []
    fitting = [r for r in rows if isinstance(r, list) and [type(n) for n in r] == [float] * width]
    if len(fitting) != num_workers or len(rows) != num_workers:
        raise RuntimeError(
            f"The notice board has {str(found)[:200]!r} instead of {width} numbers of each of "
            f"{num_workers} workers. Does another program use the port of this job?"
        )
    return fitting
