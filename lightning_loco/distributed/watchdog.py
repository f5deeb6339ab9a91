"""A thread that tells of life: who failed, who is late, and who was asked to stop.

Collectives only say that *somebody* is missing, and only when they are called. The watchdog keeps
a small note of every worker in the job's key-value store, off the training thread.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction

import torch.distributed as dist
from torch.distributed import Store

from lightning_loco.background import BackgroundThread
from lightning_loco.clock import REAL_CLOCK, Clock
from lightning_loco.distributed.store import StoreTimeout, TimeoutStore, store_host

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_SETTLE_S = 2.5
_LOOK_S = 1.0
_STOPPED_S = 5.0
_LONGEST_REPORT = 60_000
_LONGEST_REASON = 200
_LONGEST_PLACE = 300

_BEAT = re.compile(r"(\d{1,15})\|(\d{1,15})\|(.{0,300})", re.DOTALL | re.ASCII)
_REPORT = re.compile(r"(\d{1,6})\|(.*)", re.DOTALL | re.ASCII)
_POINT = re.compile(r"(\d{1,15})/([1-9]\d{0,14})", re.ASCII)

Beats = dict[int, tuple[int, int, str]]
"""By worker: how many beats, how many exchanges, and where it was."""


class WorkerFailure(RuntimeError):
    """Another worker has failed or is missing; the message says which."""


class Watchdog(BackgroundThread):
    """Publish where this worker is and watch for messages of the others.

    To stop together, every worker names the earliest point at which it can stop, its *position* in
    rounds after the step that is under way. The latest of these is where all stop: nobody is then
    left waiting in a round, and each worker's state is one that an unbroken run passes through.

    Args:
        store: Key-value store shared by all workers. If it is no ``TimeoutStore``, no other thread
            may use this connection.
        worker: Number of this worker, out of ``num_workers``.
        names: What to call them in messages. Default: worker 0, worker 1, ...
        timeout_s: How long the store may be silent while nobody waits for anybody, in seconds.
        follows: Whether its thread reads every worker's notes all the time, so that who has become
            silent is known at once. Default: only when an exchange has failed.
        clock: What it waits by, and the store, too, unless that is a ``TimeoutStore``.

    Attributes:
        failure: What another worker reported before it died, or None.
        label: Where this worker is, in words; set by the engine.
        sync points: How many exchanges this worker has started; set by the engine.
        position: ``(rounds, local steps since the last round, sync_every)``; set by the engine.
        stop_reason: Why this worker was asked to stop, or None; set by the engine.
        stop_seen: True once this worker knows that some worker was asked to stop.
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
        follows: bool = False,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        super().__init__("loco-watchdog")
        self.failure: str | None = None
        self.label = "setup"
        self.meetings = 0
        self.position = (0, 0, 1)
        self.stop_reason: str | None = None
        self.stop_seen = False
        self.stop_at: tuple[Fraction, str] | None = None
        self._owns_store = not isinstance(store, TimeoutStore)
        self._store = store if isinstance(store, TimeoutStore) else TimeoutStore(store, clock=clock)
        self._worker = worker
        self._num_workers = num_workers
        self._others = [other for other in range(num_workers) if other != worker]
        self._names = names or [f"worker {worker}" for worker in range(num_workers)]
        self._timeout_s = timeout_s
        self._follows = follows
        self._clock = clock
        self._end = threading.Event()
        self._beats = 0
        self._stood_still: tuple[float, float] = (-math.inf, 0.0)  # until when, for how long
        self._complaints: set[str] = set()
        self._life: dict[int, tuple[int, float]] = {}
        self._looked_at = -math.inf
        self._read_by = math.inf

    def run(self) -> None:
        """Beat once a second until ended; faster while a stop is being agreed."""
        while not self._end.is_set():
            try:
                self._beat()
                if self._follows:
                    self._read_beats()
                self._agree_on_stop()
            except (StoreTimeout, dist.DistStoreError):
                pass  # whoever waits for somebody says so
            except RuntimeError as error:
                if not self._end.is_set():
                    self._note_the_end_of_the_store(error)
                return
            except Exception as error:
                self._complain("the job's key-value store", repr(error))
            agreeing = self.stop_seen and self.stop_at is None
            self._pause(_INTERVAL_S / 20 if agreeing else _INTERVAL_S)

    def _pause(self, seconds: float) -> None:
        """Wait until the next beat, and notice if that takes as long as only a stop can."""
        began = self._clock.now()
        self._clock.wait(self._end, seconds)
        ended = self._clock.now()
        if ended - began > seconds + _STOPPED_S:
            self._stood_still = (ended, ended - began)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._worker}", self._sign_of_life())
        if self.failure is None and self._store.check(["failure"]):
            found = self._parse("failure", _REPORT, self._store.get("failure"))
            if found is None or int(found[1]) >= self._num_workers:
                return
            if (worker := int(found[1])) != self._worker:
                name = self._names[worker]
                self.failure = f"{name[0].upper()}{name[1:]} failed:\n{found[2]}"
                self._store.set(f"read/{self._worker}", "")

    def _sign_of_life(self) -> str:
        return f"{self._beats}|{self.meetings}|{self.label[:_LONGEST_PLACE]}"

    def _note_the_end_of_the_store(self, error: RuntimeError) -> None:
        self.failure = self.failure or (
            f"The job's key-value store no longer answers, so {store_host('worker 0')}, which "
            f"hosts it, has ended ({type(error).__name__})."
        )

    def _agree_on_stop(self) -> None:
        if self.stop_reason is not None and not self.stop_seen:
            self._store.compare_set("stop", "", self.stop_reason)
        if self.stop_at is not None or not self._store.check(["stop"]):
            return
        if not self.stop_seen:
            self.stop_seen = True  # before the position is read: the training thread looks last
            rounds, steps, sync_every = self.position
            point = rounds + Fraction(steps + 1, sync_every)
            self._store.set(f"stop/{self._worker}", f"{point.numerator}/{point.denominator}")
        keys = [f"stop/{worker}" for worker in range(self._num_workers)]
        if self._store.check(keys):
            values = zip(keys, self._store.get_all(keys), strict=True)
            found = [self._parse(key, _POINT, value) for key, value in values]
            if None in found:
                return
            points = [Fraction(int(one[1]), int(one[2])) for one in found if one is not None]
            reason = self._store.get("stop").decode(errors="replace")
            self.stop_at = (max(points), reason[:_LONGEST_REASON])

    def _parse(self, key: str, pattern: re.Pattern[str], value: bytes) -> re.Match[str] | None:
        """What is in a value, or None if it is none of ours; that is said once."""
        text = value[: 4 * _LONGEST_REPORT].decode(errors="replace")
        if (found := pattern.fullmatch(text)) is None:
            self._complain(key, repr(text[:100]))
        return found

    def _complain(self, key: str, what: str) -> None:
        if key not in self._complaints:
            self._complaints.add(key)
            log.warning(
                "Ignored what is under %r in the job's key-value store, which is none of this "
                "program's: %s. Does another program use the port of this job?",
                key,
                what,
            )

    def wait_for_stop_point(self, timeout_s: float) -> tuple[Fraction, str]:
        """Block until all have said where they can stop; a WorkerFailure names who does not."""
        deadline = self._clock.now() + timeout_s
        while self.stop_at is None:
            self.raise_if_failed()
            if self._clock.now() > deadline:
                raise self.blame("the agreement to stop", timeout_s)
            self._clock.sleep(_INTERVAL_S / 100)
        return self.stop_at

    def report(self, text: str) -> None:
        """Tell all workers that this one has failed; only the first report counts.

        Worker 0, whose end is that of the store, gives the living a moment to read, once in all.
        """
        if self._store.silent_s > _LOOK_S:
            return
        lifeless = self._lifeless
        others = [f"read/{other}" for other in self._others if other not in lifeless]
        self._read_by = min(self._read_by, self._clock.now() + 3 * _INTERVAL_S)
        with suppress(RuntimeError):
            entry = f"{self._worker}|{text[-_LONGEST_REPORT:]}"
            self._store.compare_set("failure", "", entry, _LOOK_S)
            self._store.set(f"read/{self._worker}", "", _LOOK_S)
            while self._worker == 0 and self._clock.now() < self._read_by:
                if self._store.check(others, _LOOK_S):
                    return
                self._clock.sleep(_INTERVAL_S / 20)

    def raise_if_failed(self) -> None:
        """Raise WorkerFailure if another worker has reported an error, or cannot be reached.

        The message is the traceback that was reported.
        """
        if self.failure is not None:
            raise WorkerFailure(self.failure)
        if self._store.silent_s > self._timeout_s:
            self._clock.sleep(_LOOK_S)  # one that was stopped together with this process answers
            if self._store.silent_s > self._timeout_s:
                raise WorkerFailure(self._unreachable(self.label, self._timeout_s))

    def blame(self, label: str, waited_s: float) -> WorkerFailure:
        """What to raise for an exchange that has failed; worker 0, before it ends, tells all."""
        text = self.explain(label, waited_s)
        if self._worker == 0:
            self.report(text)
        else:
            with suppress(RuntimeError):
                self._store.set(f"read/{self._worker}", "", _LOOK_S)  # who knows need not be told
        return WorkerFailure(text)

    def explain(self, label: str, waited_s: float) -> str:
        """Say why an exchange failed (in ``"round 12"``, say): whose failure, or who is missing."""
        beats = self._watch_for_a_moment()
        if self.failure is not None:
            return self.failure
        if beats is None:
            return self._unreachable(label, waited_s)
        late = []
        for worker in self._others:
            _, meetings, where = beats.get(worker, (0, -1, ""))
            if worker in self._lifeless:
                seen = f"; last seen in {where}" if where else " so far"
                late.append(f"{self._names[worker]} (no sign of life{seen})")
            elif meetings < self.meetings:
                late.append(f"{self._names[worker]} (alive, last exchange: {where})")
            elif meetings == self.meetings and where != self.label[:_LONGEST_PLACE]:
                late.append(f"{self._names[worker]} (alive, but waiting in {where})")
        stopped = self._describe_stop(waited_s)
        who = ", ".join(late) or f"any worker (all are alive{': a network fault' * (not stopped)})"
        return (
            f"No message in {label} after {waited_s:.0f} s from {who}.{stopped} Check that every "
            "worker runs and reaches the same rounds, or raise timeout_s."
        )

    def _describe_stop(self, waited_s: float) -> str:
        until, seconds = self._stood_still
        if until < self._clock.now() - waited_s - 2 * _SETTLE_S:
            return ""
        return f" This process stood still for {seconds:.0f} s: it or its machine was stopped."

    def _unreachable(self, label: str, waited_s: float) -> str:
        return (
            f"No message in {label} after {waited_s:.0f} s, and {self._names[0]} is unreachable: "
            "the job's key-value store, which it or the launcher on its machine hosts, has not "
            f"answered for {self._store.silent_s:.0f} s. Check that it runs and that nothing "
            "holds it or the network to it up, or raise timeout_s."
        )

    def silent(self) -> list[str]:
        """Names of those that give no sign of life for a moment; none if a failure is known."""
        beats = self._watch_for_a_moment()
        lifeless = [0] if beats is None else sorted(self._lifeless)
        return [self._names[worker] for worker in lifeless] if self.failure is None else []

    def lost(self, silent_s: float) -> list[str]:
        """Names of those that have given signs of life, and then none for so many seconds."""
        return [
            self._names[worker]
            for worker, beats, age_s in self._ages()
            if beats and age_s > silent_s
        ]

    def forget(self, workers: Sequence[int]) -> None:
        """Do not look after these any more: the others have gone on without them."""
        self._others = [other for other in self._others if other not in workers]

    @property
    def _lifeless(self) -> set[int]:
        """Those whose last beat was old already when somebody looked at it."""
        return {worker for worker, _, age_s in self._ages() if age_s >= _SETTLE_S}

    def _ages(self) -> list[tuple[int, int, float]]:
        """The others, how often each has beaten, and how old its last beat was when looked at."""
        looked_at = self._looked_at
        life = [(worker, *self._life.get(worker, (0, math.inf))) for worker in self._others]
        return [(worker, beats, looked_at - since) for worker, beats, since in life]

    def wait_for_failure(self) -> str | None:
        """What another worker reports before it ends, given a moment; None if nothing comes.

        While the store is silent nobody can report: its host is what is said to have failed then.
        """
        if self.failure is None:
            self._watch_for_a_moment()
        if self.failure is None and self._store.silent_s > _SETTLE_S:
            return self._unreachable(self.label, self._store.silent_s)
        return self.failure

    def _watch_for_a_moment(self) -> Beats | None:
        """Wait for a failure, or see who is lifeless; the last beats if the store has answered."""
        beats = self._read_beats()
        deadline = self._clock.now() + _SETTLE_S
        while self.failure is None and self._clock.now() < deadline and self.is_alive():
            if self._store.silent_s > _SETTLE_S:
                break
            if self._follows and self._lifeless:
                return beats
            self._clock.sleep(0.1)
        return self._read_beats()

    def _read_beats(self) -> Beats | None:
        if self._store.silent_s > _SETTLE_S:
            return None
        beats: Beats = {}
        keys = [f"beat/{worker}" for worker in range(self._num_workers)]
        try:
            if not self._store.check(keys, _LOOK_S):
                keys = [key for key in keys if self._store.check([key], _LOOK_S)]
            values = self._store.get_all(keys, _LOOK_S) if keys else []
        except StoreTimeout:
            return None
        except RuntimeError as error:
            self._note_the_end_of_the_store(error)
            return None
        for key, value in zip(keys, values, strict=True):
            if (found := self._parse(key, _BEAT, value)) is not None:
                beats[int(key.partition("/")[2])] = (int(found[1]), int(found[2]), found[3])
        now = self._clock.now()
        for worker in self._others:
            count = beats.get(worker, (0,))[0]
            if worker not in self._life or self._life[worker][0] != count:
                self._life[worker] = (count, now)
        self._looked_at = now  # last: another thread compares
        return beats

    def leave(self, label: str) -> None:
        """Say where this worker ends, for those who will look for it."""
        self.label = label
        with suppress(RuntimeError):
            self._store.set(f"beat/{self._worker}", self._sign_of_life(), _LOOK_S)

    def end(self) -> None:
        """End the thread and wait for it."""
        self._end.set()
        if self._owns_store:
            self._store.close()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout=10 * _INTERVAL_S)

    def end_with_process(self) -> float:
        """Beat no more."""
        self._end.set()
        return super().end_with_process()
