"""A key-value store whose calls end in time, even when its server is frozen or unreachable.

A client of PyTorch's store waits without a deadline for a server that is connected and says
nothing. So one thread makes the calls, and those who want something wait for that thread.
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

from lightning_loco.background import BackgroundThread
from lightning_loco.clock import REAL_CLOCK, Clock

T = TypeVar("T")

PATIENCE_S = 5.0
"""How long a call may take, in seconds, unless its caller says otherwise."""

_FAREWELL_S = 0.2
_YOUNG_S = 0.7


class StoreTimeout(RuntimeError):
    """The store has not answered in time."""


class TimeoutStore:
    """A connection to a key-value store that several threads may use.

    Every method raises :class:`StoreTimeout` if there is no answer in time, and whatever the store
    itself raises, such as ``DistNetworkError`` for a server that has ended.

    Args:
        store: Used by nobody else from now on.
        clock: What answers are waited for by.
    """

    def __init__(self, store: Store, *, clock: Clock = REAL_CLOCK) -> None:
        self._store = store
        self._line = _Line(clock)
        self._line.start()

    @classmethod
    def connected_to(
        cls, store: Store, patience_s: float, *, clock: Clock = REAL_CLOCK
    ) -> TimeoutStore:
        """A connection of its own to the server of a store that others use.

        Where the kind of store has no such thing, it is the same connection.
        """
        return cls(with_timeout(lambda: _own_connection(store), patience_s), clock=clock)

    def with_prefix(self, prefix: str) -> TimeoutStore:
        """The same connection, for keys that begin with ``prefix/``."""
        part = TimeoutStore.__new__(TimeoutStore)
        part._store = PrefixStore(prefix, self._store)
        part._line = self._line
        return part

    @property
    def silent_s(self) -> float:
        """For how long the store has owed an answer, in seconds; 0 if it owes none."""
        return self._line.silent_s

    def set(self, key: str, value: str, patience_s: float = PATIENCE_S) -> None:
        """Write a value; a server that is frozen may read it later."""
        self._line.ask(lambda: self._store.set(key, value), patience_s)

    def get(self, key: str, patience_s: float = PATIENCE_S) -> bytes:
        """Read a value that is there."""
        return self._line.ask(lambda: self._store.get(key), patience_s)

    def get_all(self, keys: Sequence[str], patience_s: float = PATIENCE_S) -> list[bytes]:
        """Read values that are there, at once."""
        return self._line.ask(lambda: self._store.multi_get(list(keys)), patience_s)

    def check(self, keys: Sequence[str], patience_s: float = PATIENCE_S) -> bool:
        """Whether all these keys are there."""
        return self._line.ask(lambda: self._store.check(list(keys)), patience_s)

    def compare_set(
        self, key: str, expected: str, value: str, patience_s: float = PATIENCE_S
    ) -> None:
        """Write a value unless there is another one than ``expected``."""
        self._line.ask(lambda: self._store.compare_set(key, expected, value), patience_s)

    def add(self, key: str, amount: int, patience_s: float = PATIENCE_S) -> int:
        """Add to a counter, which begins at 0; what it is then."""
        return self._line.ask(lambda: self._store.add(key, amount), patience_s)

    def delete_key(self, key: str, patience_s: float = PATIENCE_S) -> bool:
        """Remove a key; whether it was there."""
        return self._line.ask(lambda: self._store.delete_key(key), patience_s)

    def close(self) -> None:
        """End the thread; whoever waits for an answer gets an error. Twice does no harm."""
        self._line.end()


def store_host(worker: str) -> str:
    """Who hosts the job's key-value store, in words: this worker, or torchrun in its place."""
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"torchrun on the machine of {worker}" if by_torchrun else worker


def connect_to_default_store(timeout_s: float) -> TimeoutStore:
    """A connection of its own to the key-value store of the default process group."""
    return TimeoutStore.connected_to(dist.distributed_c10d._get_default_store(), timeout_s)


def publish(store: Store | TimeoutStore, key: str, value: str) -> None:
    """Write a value, and return once whoever asks finds it.

    A store does not answer a ``set``, and this question only when it has read what came before.
    """
    store.set(key, value)
    store.check([key])


def with_timeout(work: Callable[[], T], patience_s: float) -> T:
    """Do something that asks a store by itself, in another thread.

    Raises:
        StoreTimeout: If it takes longer than ``patience_s``; the thread is left alone.
    """
    line = _Line()
    line.start()
    try:
        return line.ask(work, patience_s)
    finally:
        line.end()


def _own_connection(store: Store) -> Store:
    if not hasattr(store, "clone"):
        return store
    clone: Store = store.clone()
    clone.set_timeout(timedelta(seconds=PATIENCE_S))  # for a value that somebody has removed
    return clone


class _Call:
    """Something to do, and what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = threading.Event()

    def make(self) -> None:
        work = self.work
        if work is None:
            return
        try:
            self.result = work()
        except BaseException as error:
            self.error = error
        self.is_over.set()

    def withdraw(self) -> None:
        """Do not make it any more; if it is being made, its result is lost."""
        self.work = None
        self.is_over.set()


class _Line(BackgroundThread):
    """Makes one call after the other.

    Attributes:
        asked_at: When the call that is under way has begun; None if there is none.
    """

    def __init__(self, clock: Clock = REAL_CLOCK) -> None:
        super().__init__("loco-store")
        self._clock = clock
        self.asked_at: float | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._current: _Call | None = None
        self._has_ended = False

    @property
    def silent_s(self) -> float:
        """For how long the call that is under way has been made, in seconds; 0 without one."""
        asked_at = self.asked_at
        return 0.0 if asked_at is None else self._clock.now() - asked_at

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._current, self.asked_at = call, self._clock.now()
            call.make()
            self._current = self.asked_at = None
            del call

    def ask(self, work: Callable[[], T], patience_s: float) -> T:
        """Have a call made, and wait for its result."""
        call = _Call(work)
        if not self._has_ended:
            self._calls.put(call)
            self._clock.wait(call.is_over, patience_s)
        if not call.is_over.is_set() or call.work is None:
            call.withdraw()
            raise StoreTimeout(
                f"The job's key-value store has not answered for {patience_s:.0f} s."
            )
        if call.error is not None:
            try:
                raise call.error
            finally:
                del call  # a circle, from the error's frames back to the error
        result: T = call.result
        return result

    def end(self) -> None:
        """Make no more calls; one that hangs is left alone with its thread until the process ends.

        One that has begun just now is waited for.
        """
        self._has_ended = True
        asked_at = self.asked_at
        self._calls.put(None)
        if threading.current_thread() is not self:
            age_s = math.inf if asked_at is None else self._clock.now() - asked_at
            self.join(max(_FAREWELL_S, _YOUNG_S - age_s))
        if (current := self._current) is not None:
            current.withdraw()
        with suppress(Empty):
            while True:
                if (later := self._calls.get_nowait()) is not None:
                    later.withdraw()
        self._calls.put(None)

    def end_with_process(self) -> float:
        """Make no more calls; only one that has not hung for long is waited for."""
        self._has_ended = True
        silent_s = self.silent_s
        self._calls.put(None)
        return PATIENCE_S - silent_s
