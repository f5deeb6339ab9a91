"""Who has come to the set-up of the groups, for an error that says who has not."""

from __future__ import annotations

from contextlib import suppress

from lightning_loco.comm.store import PromptStore


class Arrivals:
    """Counts how often each worker has come to the set-up.

    Args:
        store: Key-value store shared by all workers.
        worker: Number of this worker, out of ``num_workers``; it has come.
        num_workers: Number of workers.
        timeout_s: Longest wait for them, in seconds.
    """

    def __init__(self, store: PromptStore, worker: int, num_workers: int, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._keys = [str(w) for w in range(num_workers)]
        self._own = store.add(self._keys[worker], 1, timeout_s)

    def explain(self) -> str:
        """Say who has not come."""
        who = "any worker (all have come: one has ended since, or a network fault)"
        with suppress(RuntimeError):
            counts = [self._store.add(key, 0, patience_s=1.0) for key in self._keys]
            late = [f"worker {w}" for w, count in enumerate(counts) if count < self._own]
            who = ", ".join(late) if late else who
        if self._store.silent_s > 0:
            who = "worker 0, which hosts the job's key-value store and is unreachable"
        return (
            f"No message in the set-up within {self._timeout_s:.0f} s from {who}. Check that every "
            "worker runs the same script, or raise timeout_s."
        )
