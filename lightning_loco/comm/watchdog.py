"""A thread that tells of life: who failed, who is late, and who was asked to stop.

Collectives only say that *somebody* is missing, and only when they are called. The watchdog keeps
a small note of every worker in the job's key-value store, off the training thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction

from torch.distributed import Store

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_SETTLE_S = 2.5

Beats = dict[int, tuple[int, int, str]]
"""By worker: how many beats, how many exchanges, and where it was."""


class Watchdog(threading.Thread):
    """Publish where this worker is and watch for messages of the others.

    To stop together, every worker names the earliest point at which it can stop, its *position* in
    rounds after the step that is under way. The latest of these is where all stop: nobody is then
    left waiting in a round, and each worker's state is one that an unbroken run passes through.

    Args:
        store: Key-value store shared by all workers; no other thread may use this connection.
        worker: Number of this worker, out of ``num_workers``.
        names: What to call them in messages. Default: worker 0, worker 1, ...

    Attributes:
        failure: What another worker reported before it died, or None.
        place: Where this worker is, in words; set by the engine.
        meetings: How many exchanges this worker has started; set by the engine.
        position: ``(rounds, local steps since the last round, sync_every)``; set by the engine.
        stop_reason: Why this worker was asked to stop, or None; set by the engine.
        stop_seen: True once this worker knows that some worker was asked to stop.
        stop_at: Position at which all stop, and the reason; None until all have answered.
    """

    def __init__(
        self, store: Store, worker: int, num_workers: int, names: Sequence[str] | None = None
    ) -> None:
        super().__init__(name="loco-watchdog", daemon=True)
        self.failure: str | None = None
        self.place = "setup"
        self.meetings = 0
        self.position = (0, 0, 1)
        self.stop_reason: str | None = None
        self.stop_seen = False
        self.stop_at: tuple[Fraction, str] | None = None
        self._store = store
        self._lock = threading.Lock()
        self._worker = worker
        self._num_workers = num_workers
        self._others = [other for other in range(num_workers) if other != worker]
        self._names = names or [f"worker {worker}" for worker in range(num_workers)]
        self._end = threading.Event()
        self._beats = 0

    def run(self) -> None:
        """Beat once a second until ended; faster while a stop is being agreed."""
        while not self._end.is_set():
            try:
                with self._lock:
                    self._beat()
                    self._agree_on_stop()
            except RuntimeError as error:
                if not self._end.is_set():
                    self.failure = (
                        "The job's key-value store no longer answers, so worker 0, which hosts "
                        f"it, has ended ({type(error).__name__})."
                    )
                return
            agreeing = self.stop_seen and self.stop_at is None
            self._end.wait(_INTERVAL_S / 20 if agreeing else _INTERVAL_S)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._worker}", f"{self._beats}|{self.meetings}|{self.place}")
        if self.failure is None and self._store.check(["failure"]):
            worker, _, text = self._store.get("failure").decode().partition("|")
            if int(worker) != self._worker:
                name = self._names[int(worker)]
                self.failure = f"{name[0].upper()}{name[1:]} failed:\n{text}"
                self._store.set(f"read/{self._worker}", "")

    def _agree_on_stop(self) -> None:
        if self.stop_reason is not None and not self.stop_seen:
            self._store.compare_set("stop", "", self.stop_reason)
        if self.stop_at is not None or not self._store.check(["stop"]):
            return
        if not self.stop_seen:
            self.stop_seen = True  # before the position is read: the training thread looks last
            rounds, steps, sync_every = self.position
            answer = rounds + Fraction(steps + 1, sync_every)
            self._store.set(f"stop/{self._worker}", str(answer))
        keys = [f"stop/{worker}" for worker in range(self._num_workers)]
        if self._store.check(keys):
            latest = max(Fraction(self._store.get(key).decode()) for key in keys)
            self.stop_at = (latest, self._store.get("stop").decode())

    def wait_for_stop_point(self, timeout_s: float) -> tuple[Fraction, str]:
        """Block until all have said where they can stop; a RuntimeError names who does not."""
        deadline = time.monotonic() + timeout_s
        while self.stop_at is None:
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise RuntimeError(self.explain("the agreement to stop", timeout_s))
            time.sleep(_INTERVAL_S / 100)
        return self.stop_at

    def report(self, text: str) -> None:
        """Tell all workers that this one has failed; only the first report counts.

        Worker 0, whose end is the end of the store, gives the others a moment to read it.
        """
        with suppress(RuntimeError), self._lock:
            self._store.compare_set("failure", "", f"{self._worker}|{text}")
            self._store.set(f"read/{self._worker}", "")
        others = [f"read/{other}" for other in self._others]
        deadline = time.monotonic() + 3 * _INTERVAL_S
        while self._worker == 0 and time.monotonic() < deadline:
            with suppress(RuntimeError), self._lock:
                if self._store.check(others):
                    return
            time.sleep(_INTERVAL_S / 20)

    def raise_if_failed(self) -> None:
        """Raise RuntimeError with the traceback that another worker has reported, if any."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def explain(self, place: str, waited_s: float) -> str:
        """Say why an exchange failed (in ``"round 12"``, say): whose failure, or who is missing."""
        first, second = self._watch_for_a_moment()
        if self.failure is not None:
            return self.failure
        late = []
        for worker in self._others:
            count, meetings, where = second.get(worker, (0, -1, "never seen"))
            if count == first.get(worker, (0, 0, ""))[0]:
                late.append(f"{self._names[worker]} (no sign of life; last seen in {where})")
            elif meetings < self.meetings:
                late.append(f"{self._names[worker]} (alive, last exchange: {where})")
        who = ", ".join(late) if late else "any worker (all are alive: a network fault)"
        return (
            f"No message in {place} after {waited_s:.0f} s from {who}. Check that every worker "
            "runs and reaches the same rounds, or raise timeout_s."
        )

    def silent(self) -> list[str]:
        """Names of those that give no sign of life for a moment; none if a failure is known."""
        first, second = self._watch_for_a_moment()
        if self.failure is not None:
            return []
        still = [w for w in self._others if second.get(w, (0,))[0] == first.get(w, (0,))[0]]
        return [self._names[worker] for worker in still]

    def wait_for_failure(self) -> str | None:
        """What another worker reports before it ends, given a moment; None if nothing comes."""
        deadline = time.monotonic() + _SETTLE_S
        while self.failure is None and time.monotonic() < deadline and self.is_alive():
            time.sleep(0.1)
        return self.failure

    def _watch_for_a_moment(self) -> tuple[Beats, Beats]:
        first = self._read_beats()
        self.wait_for_failure()
        return first, self._read_beats()

    def _read_beats(self) -> Beats:
        beats: Beats = {}
        with suppress(RuntimeError), self._lock:
            for worker in range(self._num_workers):
                key = f"beat/{worker}"
                if self._store.check([key]):
                    count, meetings, place = self._store.get(key).decode().split("|", 2)
                    beats[worker] = (int(count), int(meetings), place)
        return beats

    def end(self) -> None:
        """End the thread and wait for it."""
        self._end.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout=10 * _INTERVAL_S)
