"""Rendezvous: how the ranks of a job find each other before any process group exists."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from lightning_loco.distributed.devices import check_same_kind
from lightning_loco.distributed.store import StoreTimeout, TimeoutStore, store_host
from lightning_loco.distributed.watchdog import WorkerFailure

POLL_INTERVAL_S = 0.02
"""Pause between two requests to the store, in seconds."""

_STORE_TIMEOUT_S = 1.0
_LEAVE_TIMEOUT_S = 2.0
SHORTEST_POLL_INTERVAL_S = 0.001


class Rendezvous:
    """An attempt of the set-up that all workers join, and in which they exchange one value.

    Worker 0 starts an attempt whenever it constructs a rendezvous. The others join the newest
    attempt that they have not joined before. So it does no harm if an error has kept one of them
    from an earlier attempt.

    Args:
        store: Key-value store shared by all workers.
        worker: Number of this worker.
        names: Names of all workers, for messages.
        timeout_s: Longest wait for the others, in seconds.
        poll: Called repeatedly while this worker waits; it may raise an error to end the wait.

    Attributes:
        attempt: Number of the attempt, the same on all workers after :meth:`all_gather`.
    """

    def __init__(
        self,
        store: TimeoutStore,
        worker: int,
        names: Sequence[str],
        timeout_s: float,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._poll = poll
        self._worker = worker
        self._names = names
        self._timeout_s = timeout_s
        self._is_complete = False
        self._last_attempt = self.attempt = store.add(f"joined/{worker}", 0, timeout_s)
        store.set(f"waiting/{worker}", "", timeout_s)
        if worker == 0:
            store.add("attempt", 1, timeout_s)

    def check_device(self, device: torch.device) -> None:
        """Check that the devices of all workers are of one kind; all must call it.

        Args:
            device: Device of this worker.

        Raises:
            ValueError: On all workers, if some are on a CPU and others on a GPU, say.
            WorkerFailure: If a worker does not join in time.
        """
        try:
            check_same_kind(self._names, self.all_gather(device.type))
        except ValueError:
            self._wait_before_common_error()
            raise

    def all_gather(self, value: str) -> list[str]:
        """Join an attempt and exchange a value with all workers; to be called once.

        Returns:
            The values of all workers, in order.

        Raises:
            WorkerFailure: If a worker does not join in time; the message says which.
            Exception: Any error that ``poll`` raises.
        """
        started = time.monotonic()
        try:
            while not self._have_all_joined():
                self._join_newest_attempt(value)
                waited_s = time.monotonic() - started
                if waited_s > self._timeout_s:
                    raise WorkerFailure(self.explain())
                self._poll()
                time.sleep(min(max(waited_s, SHORTEST_POLL_INTERVAL_S), POLL_INTERVAL_S))
            self._is_complete = True
            self._store.delete_key(f"waiting/{self._worker}", self._timeout_s)
            values = self._store.get_all(self._value_keys(), self._timeout_s)
            return [item.decode() for item in values]
        except WorkerFailure:
            raise
        except RuntimeError as error:
            raise WorkerFailure(self.explain()) from error

    def _have_all_joined(self) -> bool:
        is_new = self.attempt > self._last_attempt
        return is_new and self._store.check(self._value_keys(), self._timeout_s)

    def _join_newest_attempt(self, value: str) -> None:
        newest = self._store.add("attempt", 0, self._timeout_s)
        if newest > self.attempt:
            self._store.add(f"joined/{self._worker}", newest - self.attempt, self._timeout_s)
            self.attempt = newest
            self._store.set(self._value_keys()[self._worker], value, self._timeout_s)

    def _value_keys(self) -> list[str]:
        return [f"{self.attempt}/{worker}" for worker in range(len(self._names))]

    def _wait_before_common_error(self) -> None:
        """Let worker 0, which may host the store, raise an error of all workers last."""
        store = self._store.with_prefix(f"leaving/{self.attempt}")
        with suppress(RuntimeError):
            wait_until_others_know(store, self._worker, len(self._names))

    def explain(self) -> str:
        """Return an error message that names the workers that have not joined."""
        return explain_missing(self._find_missing(), self._timeout_s)

    def _find_missing(self) -> str:
        workers = range(len(self._names))
        try:
            waiting = [self._store.check([f"waiting/{w}"], _STORE_TIMEOUT_S) for w in workers]
            pairs = zip(self._names, waiting, strict=True)
            missing = [name for name, waits in pairs if not (waits or self._is_complete)]
            store = self._store.with_prefix(f"missing/{self.attempt}")
            wait_until_others_know(store, self._worker, len(self._names) - len(missing))
        except RuntimeError as error:
            return explain_lost_store(self._names[0], error)
        return (
            ", ".join(missing)
            or "any worker (all have joined: one has ended since, or a network fault)"
        )


def explain_lost_store(host: str, error: RuntimeError) -> str:
    """Name the host of a store that does not answer, and whether it is unreachable or has ended.

    Args:
        host: Name of the worker that hosts the store.
        error: The error of a call of the store.
    """
    what = "is unreachable" if isinstance(error, StoreTimeout) else "has ended"
    return f"{store_host(host)}, which hosts the job's key-value store and {what}"


def explain_missing(names: str, timeout_s: float) -> str:
    """Return the error message for ranks that have not joined.

    Args:
        names: The ranks.
        timeout_s: How long they were waited for, in seconds.
    """
    return (
        f"No message in the set-up within {timeout_s:.0f} s from {names}. Check that every worker "
        "runs the same script, or raise timeout_s."
    )


def wait_until_others_know(store: TimeoutStore, worker: int, num_present: int) -> None:
    """Record that this worker knows of an error, before it ends with that error.

    Worker 0 waits up to 2 seconds until the others know, since the store may end with it.

    Args:
        store: Key-value store with a prefix for this error alone.
        worker: Number of this worker.
        num_present: How many workers are not missing, including this one.
    """
    num_informed = store.add("informed", 1, _STORE_TIMEOUT_S)
    deadline = time.monotonic() + _LEAVE_TIMEOUT_S
    while worker == 0 and num_informed < num_present and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
        num_informed = store.add("informed", 0, _STORE_TIMEOUT_S)
