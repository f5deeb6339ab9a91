"""A key-value store whose calls return in time, even if its server is frozen or unreachable.

A client of PyTorch's store waits without a timeout for a connected server that does not answer. So
a thread makes the calls, and the callers wait for that thread with a timeout.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lightning_loco._util.background import BackgroundThread
from lightning_loco._util.clock import REAL_CLOCK, Clock

T = TypeVar("T")

TIMEOUT_S = 5.0
"""Default timeout of a call, in seconds."""

_CLOSE_TIMEOUT_S = 0.2
_RECENT_S = 0.7


class StoreTimeout(RuntimeError):
    """The store has not answered in time."""


class TimeoutStore:
    """A connection to a key-value store that several threads may use.

    Every method raises :class:`StoreTimeout` if the store does not answer within ``timeout_s``
    seconds, and any error of the store itself, such as ``DistNetworkError`` if its server has
    ended.

    Args:
        store: The connection; nothing else may use it from now on.
        clock: Clock for the waits.
    """

    def __init__(self, store: Store, *, clock: Clock = REAL_CLOCK) -> None:
        self._store = store
        self._thread = _CallThread(clock)
        self._thread.start()

    @classmethod
    def from_clone(
        cls, store: Store, timeout_s: float, *, clock: Clock = REAL_CLOCK
    ) -> TimeoutStore:
        """Open another connection to the server of a store that others use.

        A store that cannot be cloned is used itself.
        """
        return cls(with_timeout(lambda: _clone(store), timeout_s), clock=clock)

    def with_prefix(self, prefix: str) -> TimeoutStore:
        """Return the same connection for keys that start with ``prefix/``."""
        prefixed = TimeoutStore.__new__(TimeoutStore)
        prefixed._store = PrefixStore(prefix, self._store)
        prefixed._thread = self._thread
        return prefixed

    @property
    def silent_s(self) -> float:
        """For how long the current call has been waiting for an answer, in seconds; 0 without."""
        return self._thread.silent_s

    def set(self, key: str, value: str | bytes, timeout_s: float = TIMEOUT_S) -> None:
        """Write a value without waiting for an answer, so a frozen server may read it later."""
        self._thread.call(lambda: self._store.set(key, value), timeout_s)  # type: ignore[arg-type]

    def get(self, key: str, timeout_s: float = TIMEOUT_S) -> bytes:
        """Read an existing value."""
        return self._thread.call(lambda: self._store.get(key), timeout_s)

    def get_all(self, keys: Sequence[str], timeout_s: float = TIMEOUT_S) -> list[bytes]:
        """Read several existing values in one call."""
        return self._thread.call(lambda: self._store.multi_get(list(keys)), timeout_s)

    def check(self, keys: Sequence[str], timeout_s: float = TIMEOUT_S) -> bool:
        """Return whether all these keys exist."""
        return self._thread.call(lambda: self._store.check(list(keys)), timeout_s)

    def compare_set(
        self, key: str, expected: str, value: str, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Write a value unless the key has another value than ``expected``."""
        self._thread.call(lambda: self._store.compare_set(key, expected, value), timeout_s)

    def add(self, key: str, amount: int, timeout_s: float = TIMEOUT_S) -> int:
        """Add to a counter that starts at 0, and return its new value."""
        return self._thread.call(lambda: self._store.add(key, amount), timeout_s)

    def delete_key(self, key: str, timeout_s: float = TIMEOUT_S) -> bool:
        """Delete a key, and return whether it existed."""
        return self._thread.call(lambda: self._store.delete_key(key), timeout_s)

    def close(self) -> None:
        """End the thread; pending calls raise :class:`StoreTimeout`. May be called twice."""
        self._thread.end()


def connect_to_default_store(timeout_s: float) -> TimeoutStore:
    """Open another connection to the key-value store of the default process group."""
    return TimeoutStore.from_clone(dist.distributed_c10d._get_default_store(), timeout_s)


def store_host(worker: str) -> str:
    """Name the host of the job's key-value store: ``worker``, or the torchrun that started it."""
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"torchrun on the machine of {worker}" if by_torchrun else worker


def publish(store: Store | TimeoutStore, key: str, value: str) -> None:
    """Write a value, and return once other connections can read it.

    A store does not answer a ``set``, but it answers a ``check`` only after all earlier calls.
    """
    store.set(key, value)
    store.check([key])


def with_timeout(work: Callable[[], T], timeout_s: float) -> T:
    """Call a function that waits for a store itself, in another thread.

    StoreTimeout if it takes longer than ``timeout_s``; the thread then keeps running.
    """
    thread = _CallThread()
    thread.start()
    try:
        return thread.call(work, timeout_s)
    finally:
        thread.end()


def _clone(store: Store) -> Store:
    if not hasattr(store, "clone"):
        return store
    clone: Store = store.clone()
    clone.set_timeout(timedelta(seconds=TIMEOUT_S))  # limits `get` of a key that was deleted
    return clone


class _Call:
    """A function to be called by the thread, and its result or error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        work = self.work
        if work is None:
            return
        try:
            self.result = work()
        except BaseException as error:
            self.error = error
        self.done.set()

    def cancel(self) -> None:
        """Do not run it; if it is running, discard its result."""
        self.work = None
        self.done.set()


class _CallThread(BackgroundThread):
    """Runs one call after the other; the current one, if any, was ``started_at``."""

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        super().__init__("loco-store")
        self._clock = clock
        self.started_at: float | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._current: _Call | None = None
        self._is_ending = False

    @property
    def silent_s(self) -> float:
        """For how long the current call has been running, in seconds; 0 without one."""
        started_at = self.started_at
        return 0.0 if started_at is None else self._clock.now() - started_at

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._current, self.started_at = call, self._clock.now()
            call.run()
            self._current = self.started_at = None
            del call

    def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Have the thread call a function, and wait for its result."""
        call = _Call(work)
        if not self._is_ending:
            self._calls.put(call)
            self._clock.wait(call.done, timeout_s)
        if not call.done.is_set() or call.work is None:
            call.cancel()
            raise StoreTimeout(f"The job's key-value store has not answered for {timeout_s:.0f} s.")
        if call.error is not None:
            try:
                raise call.error
            finally:
                del call  # or the error's traceback would refer to the error
        result: T = call.result
        return result

    def end(self) -> None:
        """Cancel all calls and end the thread.

        Waits for a call that was started less than 0.7 s ago. A thread with an older one, which
        hangs, is left alone until the process ends.
        """
        self._is_ending = True
        started_at = self.started_at
        self._calls.put(None)
        if threading.current_thread() is not self:
            age_s = math.inf if started_at is None else self._clock.now() - started_at
            self.join(max(_CLOSE_TIMEOUT_S, _RECENT_S - age_s))
        if (current := self._current) is not None:
            current.cancel()
        with suppress(Empty):
            while True:
                if (later := self._calls.get_nowait()) is not None:
                    later.cancel()
        self._calls.put(None)

    def end_with_process(self) -> float:
        """Make no more calls; return how long to wait for the current one, in seconds."""
        self._is_ending = True
        silent_s = self.silent_s
        self._calls.put(None)
        return TIMEOUT_S - silent_s
