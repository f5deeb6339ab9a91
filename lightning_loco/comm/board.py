"""A notice board in the job's key-value store: who makes a round, who waits at a meeting.

An all-reduce must be called by all workers, and those at a meeting cannot know whether another one
has a round to make. So those at a meeting leave a notice and wait for the notices of all. A worker
with a round leaves one only when its all-reduce is late, since somebody may then be at a meeting.
"""

from __future__ import annotations

import time

from torch.distributed import Store

from lightning_loco.comm.watchdog import Watchdog

_LONGEST_PAUSE_S = 0.01


class Board:
    """The notices of all workers.

    Args:
        store: Key-value store shared by all workers; no other thread may use this connection.
        worker: Number of this worker, out of ``num_workers``.

    Attributes:
        exchange: How many exchanges this worker has begun; all workers count alike.
    """

    def __init__(self, store: Store, worker: int, num_workers: int) -> None:
        self._store = store
        self._worker = worker
        self._keys = [f"at/{w}" for w in range(num_workers)]
        self.exchange = 0
        self._all_have_posted = False

    def post(self, makes_round: bool) -> None:
        """Say what this worker does in the exchange that has begun."""
        self._store.set(self._keys[self._worker], f"{self.exchange}|{int(makes_round)}")

    def anyone_makes_round(self, watchdog: Watchdog, place: str, timeout_s: float) -> bool:
        """Wait until all workers have posted for this exchange; a RuntimeError says who has not.

        Nobody can be further than this worker: every exchange needs all of them.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0002
        while True:
            watchdog.raise_if_failed()
            if self._all_have_posted or self._store.check(self._keys):
                self._all_have_posted = True
                notices = [n.decode().split("|") for n in self._store.multi_get(self._keys)]
                if all(int(exchange) == self.exchange for exchange, _ in notices):
                    return any(makes_round == "1" for _, makes_round in notices)
            if time.monotonic() > deadline:
                raise RuntimeError(watchdog.explain(place, timeout_s))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
