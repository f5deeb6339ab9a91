"""A thread that publishes this worker's heartbeats, and knows which other worker has failed.

An error of a collective does not say which worker is missing, and comes only when a collective is
called. The watchdog keeps a heartbeat of every worker in the job's key-value store, independently
of the training thread. Through the same store, the workers report errors and agree where to stop.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import Store

from lightning_loco._util.background import BackgroundThread
from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.distributed.store import StoreTimeout, TimeoutStore, store_host

log = logging.getLogger(__name__)

_HEARTBEAT_INTERVAL_S = 1.0
_MISSING_AFTER_S = 2.5
_SUSPENDED_AFTER_S = 5.0
_STORE_TIMEOUT_S = 1.0
_MAX_REPORT = 60_000
_MAX_REASON = 200
_MAX_LABEL = 300

_HEARTBEAT = re.compile(r"(\d{1,15})\|(\d{1,15})\|(.{0,300})", re.DOTALL | re.ASCII)
_REPORT = re.compile(r"(\d{1,6})\|(.*)", re.DOTALL | re.ASCII)
_STOP_POSITION = re.compile(r"(\d{1,15})/([1-9]\d{0,14})\|(\d{1,9})", re.ASCII)

LONGEST_WAY_S = 10.0
"""How long the slowest worker may need to the step at which all stop, if none waits for others."""


class WorkerFailure(RuntimeError):
    """Another worker has failed or is missing; the message says which."""


class Heartbeat(NamedTuple):
    """The last heartbeat of a worker.

    Attributes:
        number: How many heartbeats it has sent.
        num_exchanges: How many exchanges it has started.
        label: Its last wait, in words.
    """

    number: int
    num_exchanges: int
    label: str


class Watchdog(BackgroundThread):
    """A thread that sends heartbeats, reads reports of other workers, and agrees where to stop.

    To stop together, every worker publishes the earliest position at which it can stop, in rounds,
    after the local step it is in. All stop at the latest of these positions. No worker is then left
    waiting in a round, and each worker's state is one that an uninterrupted run passes through. If
    workers do not wait for each other, one may be far behind: if it needs more than
    :data:`LONGEST_WAY_S` to the latest position, each worker stops at its own.

    Args:
        store: Key-value store shared by all workers. Unless it is a ``TimeoutStore``, no other
            thread may use this connection.
        worker: Number of this worker, 0 to ``num_workers`` - 1.
        num_workers: Number of workers.
        replica_size: How many consecutive ones stop together in any case, as ranks of one worker.
        names: Names of the workers for messages. Default: worker 0, worker 1, ...
        timeout_s: How long the store may be silent while no worker waits for another, in seconds.
        monitor: Whether the thread reads the heartbeats of all workers all the time, so that
            missing workers are known at once. Default: they are read when an exchange has failed.
        clock: Clock for waits, also in the store unless that is a ``TimeoutStore``.

    Attributes:
        failure: The error that another worker has reported, or None.
        label: The present or last wait of this worker, in words; set by the engine.
        num_exchanges: How many exchanges this worker has started; set by the engine.
        position: ``(rounds, local steps since the last round, sync_every)``; set by the engine.
        step_s: Seconds of a local step, if workers do not wait for each other; else 0.
        stop_reason: Why this worker was asked to stop, or None; set by the engine.
        stop_seen: Whether this worker knows that some worker was asked to stop.
        stop_at: Position at which all stop, and the reason; None until all have answered.
    """

    def __init__(
        self,
        store: Store | TimeoutStore,
        worker: int,
        num_workers: int,
        names: Sequence[str] | None = None,
        timeout_s: float = math.inf,
        *,
        monitor: bool = False,
        replica_size: int = 1,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        super().__init__("loco-watchdog")
        self.failure: str | None = None
        self.label = "setup"
        self.num_exchanges = 0
        self.position = (0, 0, 1)
        self.step_s = 0.0
        self.stop_reason: str | None = None
        self.stop_seen = False
        self.stop_at: tuple[Fraction, str] | None = None
        self._owns_store = not isinstance(store, TimeoutStore)
        self._store = store if isinstance(store, TimeoutStore) else TimeoutStore(store, clock=clock)
        self._worker = worker
        self._num_workers = num_workers
        first = worker - worker % replica_size
        self._together = slice(first, first + replica_size)
        self._watched = [other for other in range(num_workers) if other != worker]
        self._names = names or worker_names(num_workers)
        self._timeout_s = timeout_s
        self._monitor = monitor
        self._clock = clock
        self._end = threading.Event()
        self._num_heartbeats = 0
        self._suspended: tuple[float, float] = (-math.inf, 0.0)  # until when, for how long
        self._warned_keys: set[str] = set()
        # Number of each worker's last heartbeat, and when this worker read it first.
        self._first_seen: dict[int, tuple[int, float]] = {}
        self._read_at = -math.inf
        self._report_deadline = math.inf

    # --------------------------------------------------------------- the thread

    def run(self) -> None:
        """Send a heartbeat every second until ended; more often while a stop is being agreed."""
        while not self._end.is_set():
            try:
                self._num_heartbeats += 1
                self._store.set(f"heartbeat/{self._worker}", self._heartbeat())
                self._read_report()
                if self._monitor:
                    self._read_heartbeats()
                self._agree_on_stop()
            except (StoreTimeout, dist.DistStoreError):
                pass  # raise_if_failed and explain report a silent store
            except RuntimeError as error:
                if not self._end.is_set():
                    self._record_lost_store(error)
                return
            except Exception as error:
                self._warn_once("the job's key-value store", repr(error))
            is_agreeing = self.stop_seen and self.stop_at is None
            self._pause(_HEARTBEAT_INTERVAL_S / 20 if is_agreeing else _HEARTBEAT_INTERVAL_S)

    def _pause(self, seconds: float) -> None:
        """Wait for the next heartbeat; record if the process was suspended meanwhile."""
        started = self._clock.now()
        self._clock.wait(self._end, seconds)
        ended = self._clock.now()
        if ended - started > seconds + _SUSPENDED_AFTER_S:
            self._suspended = (ended, ended - started)

    def _heartbeat(self) -> str:
        return f"{self._num_heartbeats}|{self.num_exchanges}|{self.label[:_MAX_LABEL]}"

    def _read_report(self) -> None:
        if self.failure is None and self._store.check(["failure"]):
            report = self._parse("failure", _REPORT, self._store.get("failure"))
            if report is None or int(report[1]) >= self._num_workers:
                return
            if (worker := int(report[1])) != self._worker:
                self.failure = f"{capitalized(self._names[worker])} failed:\n{report[2]}"
                self._store.set(f"read/{self._worker}", "")

    def _record_lost_store(self, error: RuntimeError) -> None:
        self.failure = self.failure or (
            f"The job's key-value store no longer answers, so {store_host(self._names[0])}, which "
            f"hosts it, has ended ({type(error).__name__})."
        )

    def _agree_on_stop(self) -> None:
        if self.stop_reason is not None and not self.stop_seen:
            self._store.compare_set("stop", "", self.stop_reason)
        if self.stop_at is not None or not self._store.check(["stop"]):
            return
        if not self.stop_seen:
            # Set before the position is read: the training thread writes the position first, and
            # reads this attribute last.
            self.stop_seen = True
            rounds, steps, sync_every = self.position
            earliest = rounds + Fraction(steps + 1, sync_every)
            step_ms = round(1000 * min(self.step_s, 1e5))
            value = f"{earliest.numerator}/{earliest.denominator}|{step_ms}"
            self._store.set(f"stop/{self._worker}", value)
        keys = [f"stop/{worker}" for worker in range(self._num_workers)]
        if self._store.check(keys):
            values = zip(keys, self._store.get_all(keys), strict=True)
            matches = [self._parse(key, _STOP_POSITION, value) for key, value in values]
            if None in matches:
                return
            found = [m for m in matches if m is not None]
            positions = [Fraction(int(m[1]), int(m[2])) for m in found]
            latest = max(positions)
            ways_ms = [(latest - p) * int(m[3]) for p, m in zip(positions, found, strict=True)]
            if max(ways_ms) > LONGEST_WAY_S * 1000:
                latest = max(positions[self._together])
                if self._worker == 0:
                    log.warning(
                        "Each worker stops at its own local step: the slowest is more than %g s "
                        "behind. After a resume, save and validate only at the ends of epochs.",
                        LONGEST_WAY_S,
                    )
            reason = self._store.get("stop").decode(errors="replace")
            self.stop_at = (latest, reason[:_MAX_REASON])

    def _parse(self, key: str, pattern: re.Pattern[str], value: bytes) -> re.Match[str] | None:
        """Match a value of the store; warn and return None if another program has written it."""
        text = value[: 4 * _MAX_REPORT].decode(errors="replace")
        if (match := pattern.fullmatch(text)) is None:
            self._warn_once(key, repr(text[:100]))
        return match

    def _warn_once(self, key: str, what: str) -> None:
        if key not in self._warned_keys:
            self._warned_keys.add(key)
            log.warning(
                "Ignored the value of %r in the job's key-value store, which is not of this "
                "program: %s. Does another program use the port of this job?",
                key,
                what,
            )

    # ------------------------------------------------- called by other threads

    def wait_for_stop_point(self, timeout_s: float) -> tuple[Fraction, str]:
        """Wait until all workers have published where they can stop.

        Returns:
            The position at which all stop, and the reason.

        Raises:
            WorkerFailure: If a worker does not answer in time, or has failed; it is named.
        """
        deadline = self._clock.now() + timeout_s
        while self.stop_at is None:
            self.raise_if_failed()
            if self._clock.now() > deadline:
                raise self.blame("the agreement to stop", timeout_s)
            self._clock.sleep(_HEARTBEAT_INTERVAL_S / 100)
        return self.stop_at

    def report(self, text: str) -> None:
        """Report an error of this worker to all others; only the first report of a job counts.

        Worker 0, which may host the store, waits until the workers that are not missing have read
        a report: at most three heartbeats, in all calls together.
        """
        if self._store.silent_s > _STORE_TIMEOUT_S:
            return
        missing = self._missing
        readers = [f"read/{other}" for other in self._watched if other not in missing]
        deadline = self._clock.now() + 3 * _HEARTBEAT_INTERVAL_S
        self._report_deadline = min(self._report_deadline, deadline)
        with suppress(RuntimeError):
            entry = f"{self._worker}|{text[-_MAX_REPORT:]}"
            self._store.compare_set("failure", "", entry, _STORE_TIMEOUT_S)
            self._store.set(f"read/{self._worker}", "", _STORE_TIMEOUT_S)
            while self._worker == 0 and self._clock.now() < self._report_deadline:
                if self._store.check(readers, _STORE_TIMEOUT_S):
                    return
                self._clock.sleep(_HEARTBEAT_INTERVAL_S / 20)

    def raise_if_failed(self) -> None:
        """Raise an error if another worker has reported one, or the store is silent.

        Raises:
            WorkerFailure: With the reported traceback, or the name of the store's host.
        """
        if self.failure is not None:
            raise WorkerFailure(self.failure)
        if self._store.silent_s > self._timeout_s:
            # If this process was suspended together with the store's host, the host answers now.
            self._clock.sleep(_STORE_TIMEOUT_S)
            if self._store.silent_s > self._timeout_s:
                raise WorkerFailure(self._describe_silent_store(self.label, self._timeout_s))

    def blame(self, label: str, waited_s: float) -> WorkerFailure:
        """Return the error to raise for an exchange that has failed; it names who is at fault.

        Worker 0 reports it to the others as well, because the store may end with worker 0.

        Args:
            label: The wait, in words: ``"round 12"``.
            waited_s: For how long, in seconds.
        """
        text = self.explain(label, waited_s)
        if self._worker == 0:
            self.report(text)
        else:
            with suppress(RuntimeError):  # a report need not wait for this worker to read it
                self._store.set(f"read/{self._worker}", "", _STORE_TIMEOUT_S)
        return WorkerFailure(text)

    def explain(self, label: str, waited_s: float) -> str:
        """Explain why an exchange has failed: the report of a failure, or who is missing.

        Args:
            label: The wait, in words: ``"round 12"``.
            waited_s: For how long, in seconds.
        """
        heartbeats = self._watch_for_failure()
        if self.failure is not None:
            return self.failure
        if heartbeats is None:
            return self._describe_silent_store(label, waited_s)
        late, ahead = [], []
        for worker in self._watched:
            _, num_exchanges, where = heartbeats.get(worker, (0, -1, ""))
            if worker in self._missing:
                seen = f"; last seen in {where}" if where else " so far"
                late.append(f"{self._names[worker]} (no sign of life{seen})")
            elif num_exchanges < self.num_exchanges:
                late.append(f"{self._names[worker]} (alive, last exchange: {where})")
            elif num_exchanges == self.num_exchanges and where != self.label[:_MAX_LABEL]:
                late.append(f"{self._names[worker]} (alive, but waiting in {where})")
            elif num_exchanges > self.num_exchanges:
                ahead.append(f"{self._names[worker]} in {where}")
        suspended = self._describe_suspension(waited_s)
        why = f"; ahead are {', '.join(ahead)}" if ahead else ": a network fault" * (not suspended)
        return (
            f"No message in {label} after {waited_s:.0f} s from "
            f"{', '.join(late) or f'any worker (all are alive{why})'}.{suspended} Check "
            "that every worker runs and reaches the same rounds, or raise timeout_s."
        )

    def _describe_suspension(self, waited_s: float) -> str:
        until, seconds = self._suspended
        if until < self._clock.now() - waited_s - 2 * _MISSING_AFTER_S:
            return ""
        return f" This process was suspended for {seconds:.0f} s: it or its machine was stopped."

    def _describe_silent_store(self, label: str, waited_s: float) -> str:
        return (
            f"No message in {label} after {waited_s:.0f} s, and {self._names[0]} is unreachable: "
            "the job's key-value store, which it or the launcher on its machine hosts, has not "
            f"answered for {self._store.silent_s:.0f} s. Check that it runs and that nothing "
            "holds it or the network to it up, or raise timeout_s."
        )

    def silent(self) -> list[str]:
        """Watch for a moment, and return the names of the workers that are missing.

        They are those without a new heartbeat; there are none if a failure is known.
        """
        heartbeats = self._watch_for_failure()
        missing = [0] if heartbeats is None else sorted(self._missing)
        return [self._names[worker] for worker in missing] if self.failure is None else []

    def labels(self) -> dict[int, str]:
        """Return the label of the last heartbeat of each worker that has sent one."""
        heartbeats = self._read_heartbeats() or {}
        return {worker: heartbeat.label for worker, heartbeat in heartbeats.items()}

    def lost(self, silent_s: float) -> list[str]:
        """Return the names of workers that have sent heartbeats, but none for ``silent_s``."""
        if not self._monitor:
            self._read_heartbeats()
        return [
            self._names[worker]
            for worker, number, age_s in self._heartbeat_ages()
            if number and age_s > silent_s
        ]

    def wait_for_failure(self) -> str | None:
        """Return the error that another worker reports, now or within a moment; None without one.

        No worker can report to a store that is silent; the error then names the store's host.
        """
        if self.failure is None:
            self._watch_for_failure()
        if self.failure is None and self._store.silent_s > _MISSING_AFTER_S:
            return self._describe_silent_store(self.label, self._store.silent_s)
        return self.failure

    def leave(self, label: str) -> None:
        """Publish where this worker ends, for the errors of workers that wait for it."""
        self.label = label
        with suppress(RuntimeError):
            self._store.set(f"heartbeat/{self._worker}", self._heartbeat(), _STORE_TIMEOUT_S)

    def end(self) -> None:
        """End the thread and wait for it."""
        self._end.set()
        if self._owns_store:
            self._store.close()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout=10 * _HEARTBEAT_INTERVAL_S)

    def end_with_process(self) -> float:
        """Send no more heartbeats."""
        self._end.set()
        return super().end_with_process()

    # ------------------------------------------------------ reading heartbeats

    def _watch_for_failure(self) -> dict[int, Heartbeat] | None:
        """Wait until a failure is reported, or it is known which workers are missing.

        Returns:
            The last heartbeat of every worker that has sent one; None if the store is silent.
        """
        heartbeats = self._read_heartbeats()
        deadline = self._clock.now() + _MISSING_AFTER_S
        while self.failure is None and self._clock.now() < deadline and self.is_alive():
            if self._store.silent_s > _MISSING_AFTER_S:
                break
            if self._monitor and self._missing:
                return heartbeats
            self._clock.sleep(0.1)
        return self._read_heartbeats()

    def _read_heartbeats(self) -> dict[int, Heartbeat] | None:
        if self._store.silent_s > _MISSING_AFTER_S:
            return None
        heartbeats: dict[int, Heartbeat] = {}
        keys = [f"heartbeat/{worker}" for worker in range(self._num_workers)]
        try:
            if not self._store.check(keys, _STORE_TIMEOUT_S):
                keys = [key for key in keys if self._store.check([key], _STORE_TIMEOUT_S)]
            values = self._store.get_all(keys, _STORE_TIMEOUT_S) if keys else []
        except StoreTimeout:
            return None
        except RuntimeError as error:
            self._record_lost_store(error)
            return None
        for key, value in zip(keys, values, strict=True):
            if (match := self._parse(key, _HEARTBEAT, value)) is not None:
                heartbeat = Heartbeat(int(match[1]), int(match[2]), match[3])
                heartbeats[int(key.partition("/")[2])] = heartbeat
        now = self._clock.now()
        for worker in self._watched:
            number = heartbeats[worker].number if worker in heartbeats else 0
            if worker not in self._first_seen or self._first_seen[worker][0] != number:
                self._first_seen[worker] = (number, now)
        self._read_at = now  # written last: another thread computes ages from it
        return heartbeats

    @property
    def _missing(self) -> set[int]:
        """The workers whose last heartbeat was too old when the heartbeats were last read."""
        return {worker for worker, _, age_s in self._heartbeat_ages() if age_s >= _MISSING_AFTER_S}

    def _heartbeat_ages(self) -> list[tuple[int, int, float]]:
        """Each watched worker, its number of heartbeats, and the age of the last one when read."""
        read_at = self._read_at
        seen = [(worker, *self._first_seen.get(worker, (0, math.inf))) for worker in self._watched]
        return [(worker, number, read_at - since) for worker, number, since in seen]


def worker_names(num_workers: int) -> list[str]:
    """Return ``["worker 0", "worker 1", ...]``."""
    return [f"worker {number}" for number in range(num_workers)]


def rank_names(num_workers: int, replica_size: int = 1) -> list[str]:
    """Return the names of all ranks, of which ``replica_size`` consecutive ones are a worker.

    Example:
        >>> rank_names(2)
        ['worker 0', 'worker 1']
        >>> rank_names(1, 2)
        ['worker 0, place 0 (rank 0)', 'worker 0, place 1 (rank 1)']
    """
    names = worker_names(num_workers)
    if replica_size == 1:
        return names
    return [
        f"{name}, place {place} (rank {worker * replica_size + place})"
        for worker, name in enumerate(names)
        for place in range(replica_size)
    ]


def capitalized(name: str) -> str:
    """Return a name as it starts a sentence; ``str.capitalize`` would change the other letters."""
    return name[0].upper() + name[1:]
