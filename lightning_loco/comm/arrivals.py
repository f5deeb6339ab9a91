"""Who has come to the set-up, and what each tells, for an error that says who has not come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from lightning_loco.comm.store import PromptStore, StoreSilent
from lightning_loco.comm.watchdog import WorkerFailure

_LOOK_S = 1.0
_FAREWELL_S = 2.0
_PAUSE_S = 0.02


class Arrivals:
    """Counts how often each worker has come to the set-up.

    Args:
        store: Key-value store shared by all workers.
        worker: Number of this worker; it has come.
        names: What to call the workers in messages.
        timeout_s: Longest wait for them, in seconds.

    Attributes:
        times: How often this worker has come.
    """

    def __init__(
        self, store: PromptStore, worker: int, names: Sequence[str], timeout_s: float
    ) -> None:
        self._store = store
        self._worker = worker
        self._names = names
        self._timeout_s = timeout_s
        self._keys = [str(w) for w in range(len(names))]
        self.times = store.add(self._keys[worker], 1, timeout_s)

    def exchange(self, word: str) -> list[str]:
        """Tell all workers a word, once; returns those of all, in order.

        Raises:
            WorkerFailure: If one does not come in time; the message says which.
        """
        keys = [f"{self.times}/{key}" for key in self._keys]
        deadline = time.monotonic() + self._timeout_s
        try:
            self._store.set(keys[self._worker], word, self._timeout_s)
            while not self._store.check(keys, self._timeout_s):
                if time.monotonic() > deadline:
                    raise WorkerFailure(self.explain())
                time.sleep(_PAUSE_S)
            return [told.decode() for told in self._store.get_all(keys, self._timeout_s)]
        except WorkerFailure:
            raise
        except RuntimeError as error:
            raise WorkerFailure(self.explain()) from error

    def part(self) -> None:
        """Before an error that all workers raise: worker 0 hosts the store, and ends last."""
        parted = self._store.under(f"parted/{self.times}")
        with suppress(RuntimeError):
            let_the_others_look(parted, self._worker, len(self._names))

    def explain(self) -> str:
        """Say who has not come."""
        return (
            f"No message in the set-up within {self._timeout_s:.0f} s from {self._who()}. Check "
            "that every worker runs the same script, or raise timeout_s."
        )

    def _who(self) -> str:
        try:
            counts = [self._store.add(key, 0, _LOOK_S) for key in self._keys]
            pairs = zip(self._names, counts, strict=True)
            late = [name for name, count in pairs if count < self.times]
            looked = self._store.under(f"looked/{self.times}")
            let_the_others_look(looked, self._worker, len(self._names) - len(late))
        except RuntimeError as error:
            return lost_store(self._names[0], error)
        return (
            ", ".join(late) or "any worker (all have come: one has ended since, or a network fault)"
        )


def let_the_others_look(store: PromptStore, worker: int, present: int) -> None:
    """Say that this worker has seen who is missing, before it ends with an error.

    Worker 0, whose end is the end of the store, stays for a moment until the others have seen it.

    Args:
        store: Key-value store with keys of its own for this error.
        worker: Number of this worker.
        present: How many workers are not missing, this one included.
    """
    seen = store.add("seen", 1, _LOOK_S)
    deadline = time.monotonic() + _FAREWELL_S
    while worker == 0 and seen < present and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        seen = store.add("seen", 0, _LOOK_S)


def lost_store(host: str, error: RuntimeError) -> str:
    """Whom to blame, in words, when the store has not answered at all.

    Args:
        host: Name of the worker that hosts it.
        error: What a call of the store has raised.
    """
    what = "is unreachable" if isinstance(error, StoreSilent) else "has ended"
    return f"{host}, which hosts the job's key-value store and {what}"
