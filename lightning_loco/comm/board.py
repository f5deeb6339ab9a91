"""A notice board in the job's key-value store: who makes a round, who waits at a meeting.

An all-reduce must be called by all workers, and those at a meeting cannot know whether another one
has a round to make. So everybody leaves a notice before an exchange, which costs a worker with a
round next to nothing; only those at a meeting stop to read the notices of all.
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
        worker: Number of this worker.
        num_workers: Number of workers.
    """

    def __init__(self, store: Store, worker: int, num_workers: int) -> None:
        self._store = store
        self._key = f"at/{worker}"
        self._keys = [f"at/{w}" for w in range(num_workers)]
        self._exchanges = 0

    def post(self, makes_round: bool) -> None:
        """Say what this worker does in the next exchange, before it starts."""
        self._exchanges += 1
        self._store.set(self._key, f"{self._exchanges}|{int(makes_round)}")

    def anyone_makes_round(self, watchdog: Watchdog, place: str, timeout_s: float) -> bool:
        """Wait until all workers have posted for this exchange.

        Nobody can be further than this worker: every exchange needs all of them.

        Args:
            watchdog: Asked for failed and missing workers.
            place: Where this worker is, in words.
            timeout_s: Longest wait, in seconds.

        Raises:
            RuntimeError: If a worker has failed, or does not come in time.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0002
        missing = list(self._keys)
        found = False
        while missing:
            watchdog.raise_if_failed()
            missing = [key for key in missing if not self._has_posted(key)]
            if missing:
                if time.monotonic() > deadline:
                    raise RuntimeError(watchdog.explain(place, timeout_s))
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        for key in self._keys:
            found = found or self._read(key)[1]
        return found

    def _has_posted(self, key: str) -> bool:
        return self._store.check([key]) and self._read(key)[0] == self._exchanges

    def _read(self, key: str) -> tuple[int, bool]:
        exchanges, makes_round = self._store.get(key).decode().split("|")
        return int(exchanges), makes_round == "1"
