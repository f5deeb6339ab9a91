"""Background threads as tasks of a scheduler: the real classes, which wait in other ways."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_loco._util import background
from lightning_loco._util.background import BackgroundThread
from tests.exploration.scheduler import Scheduler, Task


class Threads:
    """Lets every ``BackgroundThread`` be a task, on the host of the task that starts it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers: dict[str, Iterator[int]] = {}

    def start(self, thread: BackgroundThread) -> None:
        """Start a task that runs a thread."""
        host = self._scheduler.current.host
        number = next(self._numbers.setdefault(host, itertools.count(1)))
        kind = thread.name.rpartition("-")[2]
        thread.__dict__["task"] = self._scheduler.start(f"{host} {kind} {number}", thread.run, host)

    def join(self, thread: BackgroundThread, timeout_s: float | None = None) -> None:
        """Wait until the task of a thread has ended."""
        limit_s = float("inf") if timeout_s is None else timeout_s
        task = _task_of(thread)
        assert task is not None, "it was not started"
        self._scheduler.wait(f"the end of {task.name}", lambda: task.is_done, limit_s)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """A context in which threads, and the queues and futures on which they wait, are these."""
        scheduler = self._scheduler

        class TaskQueue:
            """A queue on which tasks wait."""

            def __init__(self) -> None:
                self._items: deque[Any] = deque()

            def put(self, item: Any) -> None:
                self._items.append(item)

            def get(self) -> Any:
                scheduler.wait("something to do", lambda: bool(self._items))
                return self._items.popleft()

        class TaskFuture(Future):  # type: ignore[type-arg]
            """A future for which tasks wait."""

            def _hold(self, timeout: float | None) -> None:
                limit_s = float("inf") if timeout is None else timeout
                if not self.done() and not scheduler.wait("a result", self.done, limit_s):
                    raise futures.TimeoutError

            def exception(self, timeout: float | None = None) -> BaseException | None:
                self._hold(timeout)
                return super().exception(0)

            def result(self, timeout: float | None = None) -> Any:
                self._hold(timeout)
                return super().result(0)

        methods: dict[str, Any] = {
            "start": lambda thread: self.start(thread),
            "join": lambda thread, timeout=None: self.join(thread, timeout),
            "is_alive": lambda thread: (task := _task_of(thread)) is not None and not task.is_done,
            "ident": property(lambda thread: None if _task_of(thread) is None else 1),
        }
        with (
            mock.patch.multiple(BackgroundThread, create=True, **methods),
            mock.patch.multiple(background, SimpleQueue=TaskQueue, Future=TaskFuture),
        ):
            yield


def _task_of(thread: BackgroundThread) -> Task | None:
    return thread.__dict__.get("task")
