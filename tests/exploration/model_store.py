"""A model of the job's key-value store, and the threads that use it as tasks.

:class:`~lightning_loco.distributed.store.TimeoutStore` is the real one. Its thread is a task, and
the server reads what each connection has sent, one message after the other, as events of its host.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import Any

import torch.distributed as dist

from lightning_loco._util.background import BackgroundThread
from lightning_loco.distributed import store as module
from lightning_loco.distributed.store import TimeoutStore
from lightning_loco.distributed.watchdog import Watchdog
from tests.exploration.scheduler import Scheduler, Task


class Server:
    """The store, in the process of a worker."""

    def __init__(self, scheduler: Scheduler, host: str, life: str = "") -> None:
        self.scheduler, self.host, self.life = scheduler, host, life
        self.data: dict[str, bytes] = {}
        self.has_ended = False


class Connection:
    """One worker's connection, with the methods of ``dist.Store`` that are used.

    A call to a server that has ended raises ``DistNetworkError``; one to a frozen server waits. A
    ``set`` is not answered, so it does not wait.
    """

    def __init__(self, server: Server, name: str) -> None:
        self._server, self._name = server, name
        self._sent: list[Callable[[], object]] = []
        self._number = 0

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._send(lambda: self._server.data.__setitem__(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Read a value; wait for it as long as the real one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values."""
        data, scheduler = self._server.data, self._server.scheduler

        def read() -> list[bytes] | None:
            return [data[key] for key in keys] if all(key in data for key in keys) else None

        if (found := self._ask(read)) is not None:
            return found
        if scheduler.wait(
            f"the keys {keys}", lambda: all(key in data for key in keys), module.TIMEOUT_S
        ):
            return self.multi_get(keys)
        raise dist.DistStoreError(f"wait timeout for {keys}")

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._ask(lambda: all(key in self._server.data for key in keys))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value if the present one is as expected, or there is none."""
        data = self._server.data

        def compare() -> bytes:
            if data.get(key, _bytes(expected)) == _bytes(expected):
                data[key] = _bytes(value)
            return data[key]

        return self._ask(compare)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        data = self._server.data

        def add() -> int:
            data[key] = str(int(data.get(key, b"0")) + amount).encode()
            return int(data[key])

        return self._ask(add)

    def delete_key(self, key: str) -> bool:
        """Delete a value."""
        return self._ask(lambda: self._server.data.pop(key, None) is not None)

    def _send(self, work: Callable[[], object]) -> None:
        server = self._server
        _ = server.scheduler.current  # a killed worker sends nothing
        if server.has_ended:
            raise dist.DistNetworkError("Connection reset by peer")
        self._sent.append(work)
        self._number += 1
        name = f"store{server.life}: {self._name} {self._number}"
        server.scheduler.post(name, lambda: self._sent.pop(0)(), server.host)

    def _ask(self, work: Callable[[], Any]) -> Any:
        server, answers = self._server, list[Any]()
        self._send(lambda: answers.append(work()))
        server.scheduler.wait("the store", lambda: bool(answers) or server.has_ended)
        if not answers:
            raise dist.DistNetworkError("Connection reset by peer")
        return answers[0]


class PrefixedConnection:
    """A connection whose keys start with a prefix, as ``dist.PrefixStore``."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._store = prefix, store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(keys: str | list[str], *others: Any) -> Any:
            if isinstance(keys, str):
                return method(f"{self._prefix}/{keys}", *others)
            return method([f"{self._prefix}/{key}" for key in keys], *others)

        return call


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


class _Queue:
    """A queue from which tasks read."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._items = scheduler, list[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        self._scheduler.wait("a call", lambda: bool(self._items))
        return self._items.pop(0)

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.pop(0)


class AsTask(BackgroundThread):
    """What makes a thread a task; the first base class of one."""

    scheduler: Scheduler
    task_name: str
    host: str
    task: Task | None = None

    def run_as_task(self, scheduler: Scheduler, name: str, host: str) -> None:
        """Say where the task runs once it is started."""
        self.scheduler, self.task_name, self.host = scheduler, name, host

    def start(self) -> None:
        """Start the task."""
        self.task = self.scheduler.start(self.task_name, self.run, self.host)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.task is not None and not self.task.is_done

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        limit_s = float("inf") if timeout is None else timeout
        self.scheduler.wait(f"the end of {self.task_name}", lambda: not self.is_alive(), limit_s)


class _CallTask(AsTask, module._CallThread):
    """The thread of a :class:`TimeoutStore`."""


class TaskStore(TimeoutStore):
    """The real store on a model of a connection."""

    def __init__(self, server: Server, name: str, host: str) -> None:
        scheduler = server.scheduler
        self._store = Connection(server, name)
        self._thread = _CallTask(scheduler.clock())
        self._thread._calls = _Queue(scheduler)
        self._thread.run_as_task(scheduler, f"{name} store", host)
        self._thread.start()

    def with_prefix(self, prefix: str) -> TaskStore:
        """Return the same connection for keys that start with ``prefix/``."""
        prefixed = TaskStore.__new__(TaskStore)
        prefixed._store = PrefixedConnection(prefix, self._store)
        prefixed._thread = self._thread
        return prefixed


class TaskWatchdog(AsTask, Watchdog):
    """The real watchdog.

    Attributes:
        report_s: How long this worker has waited in all its reports, in seconds.
    """

    report_s = 0.0

    def report(self, text: str) -> None:
        """Report an error."""
        started = self._clock.now()
        super().report(text)
        self.report_s += self._clock.now() - started
