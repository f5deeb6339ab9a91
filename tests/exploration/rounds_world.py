"""Rounds of 2 to 4 workers: real engines, groups, watchdogs and barriers, on models of gloo and of
the store."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from lightning_loco._util.fault_points import on_reach
from lightning_loco.distributed import store_barrier as barrier_module
from lightning_loco.engine import settings as settings_module
from lightning_loco.engine.exchanges import compressed, neighbor
from tests.exploration.choices import RecordedChoices
from tests.exploration.model_groups import Groups, registered
from tests.exploration.model_store import Server
from tests.exploration.model_threads import Threads
from tests.exploration.records import (
    Compared,
    Failed,
    Gone,
    Harmed,
)
from tests.exploration.rounds_methods import draw_method, is_by_clock
from tests.exploration.rounds_worker import TIMEOUT_S, Saved, WorkerRun
from tests.exploration.scheduler import Fault, Killed, Scheduler
from tests.exploration.world import World

_LONG_FREEZE_S = 3.0
_MAX_LIVES = 3


class RoundsWorld(World):
    """A job whose workers train, meet at sync points, save, and may be started again.

    A worker's program is a list of actions: local steps, validations and saves, the same meetings
    on all. It ends with the consensus in the model. After a fault all may be started again from the
    last state that all have saved; after an agreed stop, from where they stopped.

    Attributes:
        trace: Digests of the values that each worker has had after so many local steps.
        final: Digest of the values at the end, by worker.
        has_postponed: Whether a worker has gone on after the agreed step, which ended its epoch.
    """

    name = "rounds"
    covered = (
        "lightning_loco.engine.engine",
        "lightning_loco.engine.fragment_sync",
        "lightning_loco.engine.exchanges.all_reduce",
        "lightning_loco.engine.exchanges.compressed",
        "lightning_loco.engine.exchanges.gather",
        "lightning_loco.engine.exchanges.neighbor",
        "lightning_loco.distributed.graceful_stop",
        "lightning_loco.distributed.store",
        "lightning_loco.distributed.store_barrier",
        "lightning_loco.distributed.watchdog",
        "lightning_loco.distributed.work",
        "lightning_loco.distributed.worker_status",
        "lightning_loco.model.worker",
    )
    limit_s: ClassVar[float] = 90.0

    @classmethod
    def draw(cls, draw: random.Random) -> dict[str, Any]:
        """Draw a method, how many batches each worker has, and which faults may happen."""
        focus = draw.choice(["", "", "", "lost", "torn", "nan", "stop"])
        wanted: dict[str, Any] = {
            # A worker is lost while others are at sync points, and no error is reported.
            "lost": {"codec": None, "overlap": False, "schedule": "steps"},
            "torn": {"overlap": False, "schedule": "steps", "bucket_bytes": 16},
            "nan": draw.choice(
                [
                    {"dtype": "bfloat16", "schedule": "staggered", "merge": "mix"},
                    {"overlap": True, "merge": "keep"},
                    {"schedule": "clock"},
                ]
            ),
        }
        workers = 3 if focus == "lost" else draw.choice([2, 2, 3, 3, 4])
        method = draw_method(draw, workers, wanted.get(focus, {}))
        is_even = focus == "nan" or (focus not in ("lost", "stop") and draw.random() < 0.5)
        epochs = []
        for _ in range(3 if focus == "nan" else draw.choice([1, 2, 3])):  # NaN needs time to heal
            batches = 6 if focus == "nan" else draw.choice([1, 2, 3, 4, 6])
            epochs.append(
                [batches if is_even else draw.choice([1, 2, 3, 5]) for _ in range(workers)]
            )
        steps = min(5, sum(map(min, epochs)))
        kinds = ["kill", "error", "freeze", "stop", "cut"]
        may = sorted(draw.sample(kinds, draw.choice([0, 1, 1, 1, 2, 3])))
        may = {"lost": ["kill"], "torn": ["kill"], "stop": ["stop"]}.get(focus, may)
        has_nan = focus == "nan" or draw.random() < 0.2
        return {
            "workers": workers,
            **method,
            "epochs": epochs,
            "step_s": [draw.choice([0.0, 0.01, 0.2]) for _ in range(workers)],
            "validates": focus in ("lost", "stop") or draw.random() < 0.4,
            "saves": draw.random() < 0.4,
            "nan": [draw.randrange(workers), draw.randrange(steps)] if has_nan else [],
            "may": may,
            "reports": focus == "torn" or (focus != "lost" and draw.random() < 0.6),
            "measures": draw.random() < 0.2,
        }

    def start(self) -> None:
        """Start the workers."""
        self.by_clock = is_by_clock(self.settings)
        self.dtype = getattr(torch, self.settings["dtype"])
        self.num_workers = self.settings["workers"]
        self.is_even = not isinstance(self.settings["sync_every"], list) and all(
            len(set(epoch)) == 1 for epoch in self.settings["epochs"]
        )
        self.program = [self._program(number) for number in range(self.num_workers)]
        self.trace: dict[tuple[int, int, int], set[str]] = {}
        self.final: dict[int, str] = {}
        self.sent: dict[tuple[int, int], int] = {}
        self.saved: dict[str, dict[int, Saved]] = {}
        self.frozen: dict[int, float] = {}
        self.frozen_s = 0.0
        self.life = -1
        self._patches, threads = ExitStack(), Threads(self.scheduler)
        self._random_state = torch.get_rng_state()
        torch.manual_seed(0)
        self._patches.enter_context(registered())
        for module, name, value in (
            (settings_module, "_FEWEST_ELEMENTS", 2),  # so that eight numbers are several buckets
            (barrier_module, "_LONGEST_PAUSE_S", 0.2),  # so that a long wait has few events
            (neighbor, "run_in_thread", threads.run_in_thread),
            (compressed, "run_in_thread", threads.run_in_thread),
            (neighbor, "wait", threads.wait),
            (compressed, "wait", threads.wait),
        ):
            self._patches.enter_context(patch.object(module, name, value))
        self.is_over = self.has_postponed = False
        self.scheduler.start("job", self._wait_for_end)  # a life may follow the end of all tasks
        self._begin_life({})

    def _wait_for_end(self) -> None:
        self.scheduler.wait("the end of the job", lambda: self.is_over)

    def close(self) -> None:
        """Undo what was replaced for the run."""
        self._patches.close()
        torch.set_rng_state(self._random_state)

    def _program(self, worker: int) -> list[tuple[str, int]]:
        settings, actions = self.settings, list[tuple[str, int]]()
        for number, epoch in enumerate(settings["epochs"]):
            actions += [("step", epoch[worker] - 1 - i) for i in range(epoch[worker])]
            actions += [("validate", number)] * settings["validates"]
            actions += [("save", number)] * settings["saves"]
        return [*actions, ("finish", 0)]

    # ---------------------------------------------------------------------- lives

    def _begin_life(self, states: Mapping[int, Saved]) -> None:
        self.life += 1
        name = f".{self.life}" if self.life else ""
        self.server = Server(self.scheduler, "w0", name)
        self.groups = Groups(self.scheduler, TIMEOUT_S, name)
        self.outcomes: dict[int, str] = {}
        self.running = set(range(self.num_workers))
        self.runs = [
            WorkerRun(self, number, f"w{number}{name}", states.get(number))
            for number in range(self.num_workers)
        ]
        for run in self.runs:
            self.scheduler.revive(run.host)
            self.scheduler.start(run.name, run.run, run.host)

    def exit_later(self, run: WorkerRun, outcome: str) -> None:
        """Let the process of a worker end."""
        self.outcomes[run.number] = outcome
        self.scheduler.post(f"exit {run.name}", lambda: self._end_process(run), run.host)

    def _end_process(self, run: WorkerRun) -> None:
        self._thaw(run.number)
        self.running.discard(run.number)
        self.history.add(Gone(run.host, self.life, self.scheduler.now))
        self.scheduler.kill(run.host)
        self.groups.end(run.host)
        if run.number == 0:
            self.server.has_ended = True
        if not self.running:
            self._end_life()

    def _end_life(self) -> None:
        outcomes = set(self.outcomes.values())
        if outcomes == {"finished"} or self.life + 1 >= _MAX_LIVES:
            self.is_over = True
            return
        if outcomes == {"stopped"}:
            self._begin_life({run.number: run.left for run in self.runs if run.left is not None})
            return
        assert not {"stopped", "finished"} <= outcomes or self._has_harm(), (
            f"Some have stopped and others finished: {self.outcomes}"
        )
        whole = [states for states in self.saved.values() if len(states) == self.num_workers]
        self._begin_life(whole[-1] if whole else {})

    def _has_harm(self) -> bool:
        return any(
            h.life == self.life and h.kind in ("kill", "error", "frozen for long", "ends at once")
            for h in self.history.of(Harmed)
        )

    # --------------------------------------------------------------------- faults

    def faults(self) -> Mapping[str, Fault]:
        """Return what may happen now to workers that run."""
        faults: dict[str, Fault] = {}
        may = self.settings["may"]
        for number in sorted(self.running):
            run = self.runs[number]
            if number in self.frozen:
                faults[f"thaw {run.host}"] = Fault(functools.partial(self._thaw, number), True)
            elif "freeze" in may:
                faults[f"freeze {run.host}"] = Fault(functools.partial(self._freeze, number))
            if "kill" in may:
                faults[f"kill {run.host}"] = Fault(functools.partial(self._kill, number))
            if "error" in may and not run.next_fails:
                faults[f"error {run.host}"] = Fault(run.fail_next)
            if "stop" in may and run.can_stop:
                faults[f"stop {run.host}"] = Fault(run.request_stop)
        if "cut" in may and self.running and self.life + 1 < _MAX_LIVES:
            faults["cut"] = Fault(self._cut)
        return faults

    def harm(self, number: int, kind: str) -> None:
        """Record what was done to a worker."""
        self.history.add(Harmed(f"w{number}", self.life, kind, self.scheduler.now))

    def _kill(self, number: int) -> None:
        self.harm(number, "kill")
        self.outcomes[number] = "killed"
        self._end_process(self.runs[number])

    def _cut(self) -> None:
        for number in sorted(self.running):
            self._kill(number)

    def _freeze(self, number: int) -> None:
        self.frozen[number] = self.scheduler.now
        self.harm(number, "freeze")
        self.scheduler.freeze(f"w{number}")

    def _thaw(self, number: int) -> None:
        if (since := self.frozen.pop(number, None)) is not None:
            self._count_freeze(number, since)
            self.scheduler.thaw(f"w{number}")

    def _count_freeze(self, number: int, since: float) -> None:
        self.frozen_s += self.scheduler.now - since
        if self.frozen_s > _LONG_FREEZE_S:  # all together: some may have waited for each
            life = self.life
            self.history.add(Harmed(f"w{number}", life, "frozen for long", since))

    # ------------------------------------------------------------------------ end

    @classmethod
    def forget(cls) -> None:
        """Forget the runs without faults."""
        reference_of.cache_clear()

    def end(self) -> None:
        """Compare with the same run in the usual order, without faults."""
        for number, since in self.frozen.items():
            self._count_freeze(number, since)
        if self.scheduler.stalled_s > _LONG_FREEZE_S:  # as if all had been frozen
            self._count_as_harmed("frozen for long")
        if self.by_clock:
            finals = sorted(set(self.final.values()))
            for number, digest in self.final.items():
                self.history.add(Compared(f"w{number}", "the consensus", digest, (finals[0],)))
            return
        if self.settings.get("is_reference"):
            return
        if self.has_postponed and not self.is_even and not self.settings.get("open"):
            # Known to differ: others have stopped, and are called to a round too early by the one
            # that went on. "open" in the settings compares nevertheless.
            return
        reference = reference_of(json.dumps(self.settings, sort_keys=True))
        if any(reference.history.of(Failed)):  # NaN of one worker has ended the run of all
            assert self.settings["nan"], next(reference.history.of(Failed)).text
            self._count_as_harmed("error")
            return
        for number, digest in self.final.items():
            expected = (reference.final[number],)
            self.history.add(Compared(f"w{number}", "the consensus", digest, expected))
        for (number, steps, fragment), digests in self.trace.items():
            known = reference.trace.get((number, steps, fragment), set())
            what = f"fragment {fragment} after {steps} steps"
            for digest in sorted(digests):
                self.history.add(Compared(f"w{number}", what, digest, tuple(sorted(known))))

    def _count_as_harmed(self, kind: str) -> None:
        for life in range(self.life + 1):
            for number in range(self.num_workers):
                self.history.add(Harmed(f"w{number}", life, kind, 0.0))


@functools.lru_cache(maxsize=256)
def reference_of(settings: str) -> RoundsWorld:
    """Run a job in the usual order, without faults."""
    world = RoundsWorld({**json.loads(settings), "may": [], "is_reference": True})
    scheduler = world.scheduler = Scheduler(RecordedChoices([]), max_events=world.max_events)
    with on_reach(world.on_point):
        try:
            world.start()
            scheduler.run()
        finally:
            scheduler.close()
            world.close()
    for task in scheduler.tasks:
        if task.error is not None and not isinstance(task.error, Killed):
            raise task.error
    return world
