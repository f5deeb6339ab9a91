"""Who has come to the set-up, and what each tells, for an error that says who has not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from lightning_loco.distributed.store import StoreTimeout, TimeoutStore, store_host
from lightning_loco.distributed.watchdog import WorkerFailure

_LOOK_S = 1.0
_FAREWELL_S = 2.0
_PAUSE_S = 0.02
_SHORT_PAUSE_S = 0.001


class Rendezvous:
    """Brings all workers to one attempt of the set-up, whatever became of the earlier ones.

    Worker 0 begins an attempt whenever it comes. The others join the newest attempt that they have
    not joined before, so an error that keeps one of them from an attempt does not matter later.

    Args:
        store: Key-value store shared by all workers.
        worker: Number of this worker; it has come.
        names: What to call the workers in messages.
        timeout_s: Longest wait for them, in seconds.
        look: Called again and again while this worker waits; it may raise why to end that.

    Attributes:
        attempt: Number of the attempt, the same on all workers after :meth:`exchange`.
    """

    def __init__(
        self,
        store: TimeoutStore,
        worker: int,
        names: Sequence[str],
        timeout_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._look = look
        self._worker = worker
        self._names = names
        self._timeout_s = timeout_s
        self._has_met_all = False
        self._last_joined = self.attempt = store.add(f"joined/{worker}", 0, timeout_s)
        store.set(f"waits/{worker}", "", timeout_s)
        if worker == 0:
            store.add("attempt", 1, timeout_s)

    def exchange(self, word: str) -> list[str]:
        """Tell all workers a word, once; returns those of all, in order.

        Raises:
            WorkerFailure: If one does not come in time; the message says which.
            Exception: What ``look`` raises.
        """
        began = time.monotonic()
        try:
            while not self._all_have_joined():
                self._join_newest(word)
                waited_s = time.monotonic() - began
                if waited_s > self._timeout_s:
                    raise WorkerFailure(self.explain())
                self._look()
                time.sleep(min(max(waited_s, _SHORT_PAUSE_S), _PAUSE_S))
            self._has_met_all = True
            self._store.delete_key(f"waits/{self._worker}", self._timeout_s)
            told = self._store.get_all(self._words(), self._timeout_s)
            return [item.decode() for item in told]
        except WorkerFailure:
            raise
        except RuntimeError as error:
            raise WorkerFailure(self.explain()) from error

    def _all_have_joined(self) -> bool:
        is_new = self.attempt > self._last_joined
        return is_new and self._store.check(self._words(), self._timeout_s)

    def _join_newest(self, word: str) -> None:
        newest = self._store.add("attempt", 0, self._timeout_s)
        if newest > self.attempt:
            self._store.add(f"joined/{self._worker}", newest - self.attempt, self._timeout_s)
            self.attempt = newest
            self._store.set(self._words()[self._worker], word, self._timeout_s)

    def _words(self) -> list[str]:
        return [f"{self.attempt}/{worker}" for worker in range(len(self._names))]

    def part(self) -> None:
        """Before an error that all workers raise: worker 0 hosts the store, and ends last."""
        parted = self._store.with_prefix(f"parted/{self.attempt}")
        with suppress(RuntimeError):
            wait_until_others_know(parted, self._worker, len(self._names))

    def explain(self) -> str:
        """Say who has not come."""
        return explain_missing(self._who(), self._timeout_s)

    def _who(self) -> str:
        try:
            waits = [self._store.check([f"waits/{w}"], _LOOK_S) for w in range(len(self._names))]
            pairs = zip(self._names, waits, strict=True)
            late = [name for name, waits in pairs if not (waits or self._has_met_all)]
            looked = self._store.with_prefix(f"looked/{self.attempt}")
            wait_until_others_know(looked, self._worker, len(self._names) - len(late))
        except RuntimeError as error:
            return explain_lost_store(self._names[0], error)
        return (
            ", ".join(late) or "any worker (all have come: one has ended since, or a network fault)"
        )


def explain_missing(who: str, timeout_s: float) -> str:
    """The message for a set-up in which some have not come in time."""
    return (
        f"No message in the set-up within {timeout_s:.0f} s from {who}. Check that every worker "
        "runs the same script, or raise timeout_s."
    )


def wait_until_others_know(store: TimeoutStore, worker: int, present: int) -> None:
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


def explain_lost_store(host: str, error: RuntimeError) -> str:
    """Whom to blame, in words, when the store has not answered at all.

    Args:
        host: Name of the worker that hosts it.
        error: What a call of the store has raised.
    """
    what = "is unreachable" if isinstance(error, StoreTimeout) else "has ended"
    return f"{store_host(host)}, which hosts the job's key-value store and {what}"
