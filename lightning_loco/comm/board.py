"""A notice board in the job's key-value store: who makes a round, who waits at a meeting.

An all-reduce must be called by all workers, and those at a meeting cannot know whether another one
has a round to make. So those at a meeting leave a notice and wait for the notices of all. A worker
with a round leaves one only when its all-reduce is late, since somebody may then be at a meeting.
"""

from __future__ import annotations

import time

from lightning_loco.comm.store import PromptStore, StoreSilent
from lightning_loco.comm.watchdog import Watchdog, WorkerFailure

_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.01
_WITH_A_ROUND = 2**32


class Board:
    """The notices of all workers.

    The store counts the notices of an exchange; who leaves the last one writes what they say.

    Args:
        store: Key-value store shared by all workers.
        worker: Number of this worker, out of ``num_workers``.

    Attributes:
        exchange: How many exchanges this worker has begun; all workers count alike.
    """

    def __init__(self, store: PromptStore, worker: int, num_workers: int) -> None:
        self._store = store
        self._worker = worker
        self._num_workers = num_workers
        self._posted: list[int] = []
        self.exchange = 0

    def post(self, makes_round: bool, timeout_s: float) -> None:
        """Say what this worker does in the exchange that has begun; once."""
        number, notice = self.exchange, 1 + _WITH_A_ROUND * makes_round
        notices = self._store.add(f"{number}/notices", notice, timeout_s)
        if notices % _WITH_A_ROUND == self._num_workers:
            self._store.set(f"{number}/all", str(int(notices >= _WITH_A_ROUND)), timeout_s)
        self._posted.append(number)
        # Whoever is in the exchange before this one has read everything that is older.
        while self._posted[0] < number - 1:
            old = self._posted.pop(0)
            for key in (f"{old}/notices", f"{old}/all"):
                self._store.delete_key(key, timeout_s)

    def anyone_makes_round(self, watchdog: Watchdog, place: str, timeout_s: float) -> bool:
        """Wait until all workers have posted for this exchange; an error says who has not.

        Nobody can be further than this worker: every exchange needs all of them.

        Raises:
            WorkerFailure: If a worker is late, or has failed.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = _SHORTEST_PAUSE_S
        key = f"{self.exchange}/all"
        while True:
            watchdog.raise_if_failed()
            left_s = deadline - time.monotonic()
            try:
                if self._store.check([key], left_s):
                    return self._store.get(key, left_s) != b"0"
            except StoreSilent:
                left_s = 0.0
            if left_s <= 0:
                raise WorkerFailure(watchdog.explain(place, timeout_s))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
