"""Threads, futures and queues for code that makes its own: their waits are those of a scheduler."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

from tests.exploration.scheduler import Killed, Scheduler, Task

T = TypeVar("T")


class Done(NamedTuple):
    """As the result of ``concurrent.futures.wait``."""

    done: set[Future[Any]]
    not_done: set[Future[Any]]


class Threads:
    """Makes tasks in place of threads, on the host of the task that asks for them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def start(self, label: str, work: Callable[[], object]) -> Task:
        """Start a task with a name that no other running task has."""
        host = self._scheduler.current.host
        taken = {task.name for task in self._scheduler.tasks if not task.is_done}
        name, number = f"{host} {label}", 1
        while name in taken:
            number += 1
            name = f"{host} {label} {number}"
        return self._scheduler.start(name, work, host)

    def run_in_thread(self, work: Callable[[], T], exit_timeout_s: float = 0.0) -> Future[T]:
        """In place of the function of this name in ``_util.background``."""
        future: Future[T] = TaskFuture(self._scheduler)

        def run() -> None:
            try:
                result = work()
            except Killed:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.start(_label_of(work), run)
        return future

    def wait(
        self,
        futures: Iterable[Future[Any]],
        timeout: float | None = None,
        return_when: str = ALL_COMPLETED,
    ) -> Done:
        """In place of ``concurrent.futures.wait``."""
        waited = list(futures)
        enough = any if return_when == FIRST_COMPLETED else all

        def is_over() -> bool:
            return enough(future.done() for future in waited)

        self._wait("a thread", is_over, timeout)
        done = {future for future in waited if future.done()}
        return Done(done, set(waited) - done)

    def queue_module(self) -> Any:
        """In place of the module ``queue``."""
        return SimpleNamespace(SimpleQueue=lambda: TaskQueue(self._scheduler), Empty=queue.Empty)

    def background_thread(self, name: str, work: Callable[[], object]) -> Any:
        """In place of ``BackgroundThread``."""
        return SimpleNamespace(start=lambda: self.start(name, work))

    def _wait(self, why: str, until: Callable[[], bool], timeout: float | None) -> bool:
        limit = {} if timeout is None else {"timeout_s": timeout}
        return self._scheduler.wait(why, until, **limit)


class TaskFuture(Future[T]):
    """A future for which a task waits."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, and return it."""
        wait_in_task(self._scheduler, self, timeout)
        return super().result(0)


def wait_in_task(
    scheduler: Scheduler, future: Future[Any], timeout: float | None = None, why: str = "a thread"
) -> None:
    """Let the task that runs wait for a future."""
    if scheduler.is_in_task and not future.done():
        limit = {} if timeout is None else {"timeout_s": timeout}
        scheduler.wait(why, future.done, **limit)


class TaskQueue(Generic[T]):
    """In place of ``queue.SimpleQueue``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: list[T] = []

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)

    def get(self, timeout: float | None = None) -> T:
        """Wait for an item, and remove it."""
        limit = {} if timeout is None else {"timeout_s": timeout}
        if not self._scheduler.wait("a request", lambda: bool(self._items), **limit):
            raise queue.Empty
        return self._items.pop(0)


def _label_of(work: Any) -> str:
    """A short name of a function, that of the function around it for a lambda."""
    work = getattr(work, "func", work)  # of a partial
    parts = [part for part in work.__qualname__.split(".") if not part.startswith("<")]
    return parts[-1].strip("_")
