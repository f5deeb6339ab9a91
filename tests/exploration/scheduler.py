"""Runs the tasks of all workers one at a time; what happens next is chosen event by event.

A task is a function in a thread of its own. It runs until it waits by :meth:`Scheduler.wait`, and
then another task continues, or a message arrives, or time passes, or a fault happens. Only one
thread runs at any time, so a run depends on nothing but the choices, and can be repeated.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from lightning_loco._util.clock import Clock

TIME = "time"
"""The choice that lets time pass until the next wait with a timeout is over."""

_MAX_EVENTS = 20_000


class Killed(BaseException):
    """Raised in the tasks of a host that was killed, wherever they wait."""


class Stuck(Exception):
    """Some tasks have not ended, and nothing can happen any more, or they take too long."""


@dataclass
class Fault:
    """Something that may happen to a run.

    Attributes:
        action: Makes it happen.
        is_repair: Whether it ends another fault, such as a partition. Repairs are not counted, and
            a run that would wait forever without one gets it.
    """

    action: Callable[[], object]
    is_repair: bool = False


class Options(NamedTuple):
    """What may happen next.

    Attributes:
        events: Names of the tasks that can continue, and of the events that were posted.
        can_wait: Whether a task waits with a timeout, so that time can pass.
        faults: Names of the faults.
        repairs: Names of the faults that are repairs.
    """

    events: list[str]
    can_wait: bool
    faults: list[str]
    repairs: list[str]


class Choices(Protocol):
    """Chooses what happens next."""

    def __call__(self, options: Options) -> str:
        """Return one of the names in ``options``, or :data:`TIME`."""


@dataclass(eq=False)
class Task:
    """A function that runs in a thread of its own, on a host, while no other task runs.

    Attributes:
        why: What it waits for, in words.
        until: Whether it can continue; None if at once.
        deadline: When it continues at the latest.
        is_done: Whether it has ended.
        result: What it returned.
        error: The error with which it ended.
    """

    name: str
    host: str
    work: Callable[[], Any]
    why: str = "its start"
    until: Callable[[], bool] | None = None
    deadline: float = math.inf
    is_done: bool = False
    result: Any = None
    error: BaseException | None = None
    thread: threading.Thread | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.turn.acquire()


@dataclass(eq=False)
class Event:
    """An action that happens when it is chosen: a message arrives at a host, say."""

    name: str
    host: str
    action: Callable[[], object]


class Step(NamedTuple):
    """One choice of a run, for people: when, what, and what the task had been waiting for."""

    time_s: float
    name: str
    why: str


class Scheduler:
    """Runs tasks and events in an order that ``choices`` decide.

    Args:
        choices: Chooses among what is possible.
        get_faults: Returns the faults that are possible now, by name.
        max_events: After so many events a run counts as stuck.
        limit_s: Longest virtual time from the last fault, or the beginning, to the end, without
            ``stalled_s``.
        longest_stall_s: How far time may pass at once while something else could happen, as on a
            slow machine; otherwise it passes to the next end of a wait.

    Attributes:
        now: The time in seconds; it is 0 at the beginning.
        stalled_s: How much of it has passed although something else could happen, as on a machine
            that is too slow.
        taken: The choices so far.
        steps: The same with time and reason.
        after_event: Called after every event, in the scheduler's thread.
        is_prompt: Whether time passes only when nothing else can happen. A world sets it once the
            faults are over: without it, a machine may be too slow for every timeout.
        delayed_s: How long each host was frozen, or had a task that could continue, while time
            passed: what it was late for that long is not its fault.
    """

    def __init__(
        self,
        choices: Choices,
        get_faults: Callable[[], Mapping[str, Fault]] = dict,
        *,
        max_events: int = _MAX_EVENTS,
        limit_s: float = 3600.0,
        longest_stall_s: float = math.inf,
    ) -> None:
        self.now = 0.0
        self.stalled_s = 0.0
        self.taken: list[str] = []
        self.steps: list[Step] = []
        self.tasks: list[Task] = []
        self.after_event: Callable[[], object] | None = None
        self.is_prompt = False
        self.delayed_s: dict[str, float] = defaultdict(float)
        self._choices, self._get_faults = choices, get_faults
        self._max_events, self._limit_s = max_events, limit_s
        self._longest_stall_s = longest_stall_s
        self._last_fault_s = 0.0
        self._events: list[Event] = []
        self._alive: list[Task] = []
        self._killed: set[str] = set()
        self._frozen: set[str] = set()
        self._current: Task | None = None
        self._ended = threading.Lock()
        self._ended.acquire()
        self._is_closing = False

    # ------------------------------------------------------------- called by worlds

    def start(self, name: str, work: Callable[[], Any], host: str | None = None) -> Task:
        """Add a task, which may begin at any time; ``host`` is its own name by default."""
        task = Task(name, host or name, work)
        self.tasks.append(task)
        self._alive.append(task)
        return task

    def post(self, name: str, action: Callable[[], object], host: str = "") -> Event:
        """Let an action happen at any later time, while its ``host`` is neither frozen nor killed.

        The action must not wait. Two pending events should not have the same name.
        """
        event = Event(name, host, action)
        self._events.append(event)
        return event

    def cancel(self, event: Event) -> None:
        """Forget an event that has not happened."""
        if event in self._events:
            self._events.remove(event)

    def kill(self, host: str) -> None:
        """End all tasks of a host where they wait; what they do while they end must not count.

        Only events and faults may call it, and no task.
        """
        self._killed.add(host)
        self._frozen.discard(host)
        self._events = [event for event in self._events if event.host != host]
        for task in self.tasks:
            if task.host == host:
                self._end(task)

    def revive(self, host: str) -> None:
        """Let a host that was killed have tasks again."""
        self._killed.discard(host)

    def freeze(self, host: str) -> None:
        """Let no task of a host continue, and no event of it happen, until :meth:`thaw`."""
        self._frozen.add(host)

    def thaw(self, host: str) -> None:
        """End :meth:`freeze`."""
        self._frozen.discard(host)

    def is_killed(self, host: str) -> bool:
        """Whether a host was killed."""
        return host in self._killed

    def is_frozen(self, host: str) -> bool:
        """Whether a host is frozen."""
        return host in self._frozen

    def clock(self) -> TaskClock:
        """Return a clock by which tasks wait."""
        return TaskClock(self)

    # -------------------------------------------------------------- called by tasks

    @property
    def is_in_task(self) -> bool:
        """Whether the caller is a task, and not the scheduler or another thread."""
        task = self._current
        return task is not None and task.thread is threading.current_thread()

    @property
    def current(self) -> Task:
        """The task that runs now; Killed if its host was killed."""
        task = self._current
        assert task is not None, "no task is running"
        if self._is_closing or task.host in self._killed:
            raise Killed
        return task

    def wait(
        self, why: str, until: Callable[[], bool] | None = None, timeout_s: float = math.inf
    ) -> bool:
        """Let others continue until a condition holds, by default at any time.

        The condition must not wait, and costs little: it is asked after every event.

        Returns:
            Whether it holds; False once ``timeout_s`` has passed.
        """
        task = self.current
        task.why, task.until, task.deadline = why, until, self.now + timeout_s
        self._ended.release()
        task.turn.acquire()
        # Killed while it waited, or the run is over.
        if self._is_closing or task.host in self._killed:
            raise Killed
        return until is None or until()

    # ------------------------------------------------------------------------- a run

    def run(self) -> None:
        """Run until all tasks have ended; :class:`Stuck` if they do not."""
        while self._has_tasks():
            self._step()

    def close(self) -> None:
        """End the threads of all tasks."""
        self._is_closing = True
        for task in self.tasks:
            self._end(task)

    def _has_tasks(self) -> bool:
        # A run may have thousands of short tasks, so those that have ended are not looked at again.
        self._alive = [task for task in self._alive if not task.is_done]
        return bool(self._alive)

    def _step(self) -> None:
        ready = {task.name: task for task in reversed(self._alive) if self._can_continue(task)}
        posted = {
            event.name: event for event in reversed(self._events) if event.host not in self._frozen
        }
        names = [*reversed(ready), *(name for name in reversed(posted) if name not in ready)]
        faults = self._get_faults()
        until = self._next_deadline()
        can_wait = until < math.inf and not (self.is_prompt and names)
        repairs = [name for name, fault in faults.items() if fault.is_repair]
        if not names and not can_wait and not repairs:
            raise Stuck(f"Nothing can happen any more. {self.describe_waits()}")
        if len(self.taken) >= self._max_events:
            raise Stuck(f"No end after {self._max_events} events. {self.describe_waits()}")
        options = Options(names, can_wait, [n for n in faults if n not in repairs], repairs)
        name = self._choices(options)
        self.taken.append(name)
        if name in faults:
            self.steps.append(Step(self.now, name, "a fault"))
            self._last_fault_s = self.now - self.stalled_s
            faults[name].action()
        elif name == TIME:
            until = min(until, self.now + self._longest_stall_s) if names else until
            self.steps.append(Step(self.now, name, f"until {until:.6g} s"))
            if names:
                self.stalled_s += until - self.now
            for host in {*self._frozen, *(task.host for task in ready.values())}:
                self.delayed_s[host] += until - self.now
            self.now = until
            if self.now - self.stalled_s > self._last_fault_s + self._limit_s:
                raise Stuck(
                    f"No end {self._limit_s:g} s after the last fault. {self.describe_waits()}"
                )
        elif name in ready:
            self.steps.append(Step(self.now, name, ready[name].why))
            self._continue(ready[name])
        else:
            self.steps.append(Step(self.now, name, "an event"))
            self._events.remove(posted[name])
            posted[name].action()
        if self.after_event is not None:
            self.after_event()

    def _can_continue(self, task: Task) -> bool:
        if task.is_done or task.host in self._frozen:
            return False
        return task.until is None or task.deadline <= self.now or task.until()

    def _next_deadline(self) -> float:
        deadlines = [
            task.deadline
            for task in self._alive
            if not task.is_done and task.host not in self._frozen and task.until is not None
        ]
        return min((limit for limit in deadlines if limit > self.now), default=math.inf)

    def _continue(self, task: Task) -> None:
        """Run a task until it waits again, or ends."""
        before, self._current = self._current, task
        if task.thread is None:
            task.thread = threading.Thread(
                target=self._run, args=(task,), name=f"task-{task.name}", daemon=True
            )
            task.thread.start()
        else:
            task.turn.release()
        self._ended.acquire()
        self._current = before

    def _run(self, task: Task) -> None:
        try:
            task.result = task.work()
        except BaseException as error:
            task.error = error
        task.is_done = True
        self._ended.release()

    def _end(self, task: Task) -> None:
        """Let a task raise Killed where it waits, until it has ended."""
        while not task.is_done:
            if task.thread is None:
                task.is_done, task.error = True, Killed()
            else:
                self._continue(task)
        if task.thread is not None:
            task.thread.join()

    def describe_waits(self) -> str:
        """Say which tasks have not ended, and what each waits for."""
        waits = [
            f"{task.name} waits for {task.why}"
            + (" (frozen)" if task.host in self._frozen else "")
            + (f" until {task.deadline:.6g} s" if task.deadline < math.inf else "")
            for task in self._alive
            if not task.is_done
        ]
        return f"At {self.now:.6g} s: " + "; ".join(waits)


class TaskClock(Clock):
    """A clock by which tasks wait: their waits let others continue."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.now = self.wall_time = lambda: scheduler.now
        self.sleep = lambda seconds: self._sleep(seconds)
        self._scheduler = scheduler

    def _sleep(self, seconds: float) -> None:
        self._scheduler.wait(f"{seconds:.3g} s", lambda: False, seconds)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until an event is set, at most ``timeout_s``; return whether it is set."""
        self._scheduler.wait(f"{timeout_s:.3g} s, or an event", event.is_set, timeout_s)
        return event.is_set()
