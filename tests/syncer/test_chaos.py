"""A run whose learners and syncer are killed, frozen and started again, in an order by a seed."""

from __future__ import annotations

import itertools
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest

from lightning_loco.syncer.merge_rounds import Reason
from lightning_loco.syncer.service import SyncerClient
from lightning_loco.syncer.snapshot import Snapshot
from lightning_loco.syncer.tape import hash_of, replay
from tests.harness.programs import Program, free_ports
from tests.harness.sources import ROOT
from tests.syncer.chaos_learner import ROUNDS

LIMIT_S = 60.0
REFUSED = {
    "epoch": "the syncer was restarted",
    "learner": "the syncer was restarted, or the learner was frozen for longer than its lease",
    "base": "a learner continues from before a push that was merged, or a version was lost",
    "duplicate": "a learner continues from before a push that is there",
    "not open": "the round was open at the syncer before",
    "attempt": "the round was opened again",
}
"""What may be refused in such a run, and why."""


class Chaos:
    """The processes of a run, and what is done to them."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int) -> None:
        self.folder, self.stack, self.random = folder, stack, random.Random(seed)
        (self.port,) = free_ports()
        self.learners: dict[str, Program] = {}
        self.step_s: dict[str, float] = {}
        self.done: list[str] = []
        self.begin_syncer()

    def begin_syncer(self) -> None:
        command = [sys.executable, str(ROOT / "command.py"), "syncer", "--keep-pushes"]
        own = [f"--folder={self.folder / 'run'}", f"--bind=127.0.0.1:{self.port}"]
        self.syncer = self.stack.enter_context(Program([*command, *own]))
        self.syncer.wait_for("listens at")

    def begin(self, name: str) -> None:
        step_s = self.step_s.setdefault(name, self.random.choice([0.01, 0.02, 0.04]))
        script = Path(__file__).with_name("chaos_learner.py")
        values = map(str, (self.port, name, step_s, self.folder))
        self.learners[name] = self.stack.enter_context(
            Program([sys.executable, str(script), *values])
        )

    def committed(self) -> int:
        lines = read(self.folder / "run/tape/tape.jsonl")
        return max((line["round"] for line in lines if line["event"] == "merge"), default=0)

    def go_on(self, rounds: int) -> None:
        goal = self.committed() + rounds
        self.until(lambda: self.committed() >= goal, f"round {goal}")

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            for name, program in self.learners.items():
                assert program.process.poll() is None, (name, program.finish()[1])
            assert time.monotonic() < deadline, f"no {what} after {self.done}"
            time.sleep(0.05)

    # What is done to a run.

    def kill(self, name: str) -> None:
        program = self.learners.pop(name)
        program.signal(signal.SIGKILL)
        program.finish()

    def kill_and_return(self, name: str) -> None:
        self.kill(name)
        self.begin(name)

    def freeze(self, name: str, share_of_lease: float) -> None:
        self.learners[name].signal(signal.SIGSTOP)
        time.sleep(share_of_lease * ROUNDS.lease_s)
        self.learners[name].signal(signal.SIGCONT)

    def join(self) -> None:
        self.begin(f"new{'x' * len(self.step_s)}")

    def restart_syncer(self, number: signal.Signals) -> None:
        self.syncer.signal(number)
        code, output = self.syncer.finish(20.0)
        assert code == (0 if number == signal.SIGTERM else -number), output
        time.sleep(self.random.random())
        self.begin_syncer()

    def act(self, event: str) -> None:
        """Do one of the things above to a learner that is drawn."""
        name = self.random.choice(sorted(self.learners))
        self.done.append(f"{event} {name}")
        actions: dict[str, Callable[[], None]] = {
            "kill": lambda: self.kill(name),
            "kill and return": lambda: self.kill_and_return(name),
            "short freeze": lambda: self.freeze(name, 0.5),
            "long freeze": lambda: self.freeze(name, 2.0),
            "join": self.join,
            "SIGKILL of the syncer": lambda: self.restart_syncer(signal.SIGKILL),
            "SIGTERM of the syncer": lambda: self.restart_syncer(signal.SIGTERM),
        }
        actions[event]()

    def end(self) -> None:
        """End the steps, compare what all have, and let the learners and the syncer end."""
        (self.folder / "still").touch()
        self.until(self.are_equal, "common version")
        saved = Snapshot(self.folder / "run").load()
        assert saved is not None
        for name in self.learners:
            has = read(self.folder / f"{name}.log")[-1]["hashes"]
            assert has == [hash_of(state["outer"]) for state in saved.fragments], name
        (self.folder / "leave").touch()
        for name, program in self.learners.items():
            code, output = program.finish(40.0)
            assert code == 0, (name, output)
        client = SyncerClient("127.0.0.1", self.port)
        assert client.status()["learners"] == {}
        client.close()
        self.syncer.signal(signal.SIGTERM)
        code, output = self.syncer.finish(20.0)
        assert code == 0, output

    def are_equal(self) -> bool:
        before = self.committed()
        time.sleep(0.5)
        logs = [read(self.folder / f"{name}.log") for name in self.learners]
        found = {json.dumps(lines[-1].get("versions") if lines else None) for lines in logs}
        return len(found) == 1 and "null" not in found and self.committed() == before


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON; a process that was killed may have left half of one."""
    found = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def published(tape: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the merges of a tape, without those of which a killed syncer has saved nothing."""
    merges: dict[int, dict[str, Any]] = {}
    for line in tape:
        if line["event"] == "start":
            merges = {n: merge for n, merge in merges.items() if n <= line["committed"]}
        elif line["event"] == "merge":
            assert line["round"] == len(merges) + 1
            merges[line["round"]] = line
    return [*merges.values()]


def check(folder: Path, done: list[str]) -> str:
    """Check the tape against the logs of the learners; return what was lost, in words."""
    tape = read(folder / "run/tape/tape.jsonl")
    problems = [one for one in replay(folder / "run/tape") if one.problem is not None]
    assert problems == []
    merges = published(tape)
    bases: Counter[Any] = Counter()
    merged: dict[str, list[int]] = defaultdict(lambda: [0] * ROUNDS.fragments)
    for merge in merges:
        for push in merge["pushes"]:
            bases[push["learner"], merge["fragment"], tuple(push["base"])] += 1
            merged[push["learner"]][merge["fragment"]] += push["steps"]
    assert max(bases.values()) == 1
    refused = Counter(line["reason"] for line in tape if line["event"] == "refused")
    assert refused.keys() <= REFUSED.keys() <= {*get_args(Reason)}
    made, gaps = {}, {}
    for path in sorted(folder.glob("*.log")):
        steps = [line for line in read(path) if line["event"] == "step"]
        made[path.stem] = len(steps)
        gaps[path.stem] = max(
            (
                later["at"] - one["at"]
                for one, later in itertools.pairwise(steps)
                if one["process"] == later["process"]
            ),
            default=0.0,
        )
    for name, steps_of in merged.items():
        assert all(steps <= made[name] for steps in steps_of), name
    total = sum(made.values())
    share = sum(map(sum, merged.values())) / ROUNDS.fragments / total
    lines = [
        f"{len(merges)} rounds, {len(done)} events, {total} local steps, {share:.1%} merged",
        f"events {dict(Counter(event.rsplit(' ', 1)[0] for event in done))}",
        f"refused {dict(refused)}",
        *(
            f"{name}: {made[name]} steps, merged {merged[name]}, longest step {gaps[name]:.2f} s"
            for name in made
        ),
    ]
    return "\n".join(lines)


SHORT = ("kill and return", "long freeze", "SIGKILL of the syncer")
LONG = (
    *("kill and return", "long freeze", "short freeze", "join") * 4,
    *("kill", "SIGKILL of the syncer", "SIGTERM of the syncer"),
)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.recovery
@pytest.mark.parametrize(
    ("seed", "events", "pause", "rounds"),
    [(0, SHORT, 5, 25), *((seed, LONG, 12, 240) for seed in range(1, 5))],
)
def test_nothing_is_lost_that_has_no_name(
    tmp_path: Path, seed: int, events: Sequence[str], pause: int, rounds: int
) -> None:
    with ExitStack() as stack:
        chaos = Chaos(tmp_path, stack, seed)
        for name in ("a", "bb", "ccc"):
            chaos.begin(name)
        chaos.go_on(pause)
        for event in chaos.random.sample(events, len(events)):
            chaos.act(event)
            chaos.go_on(chaos.random.randrange(pause, 2 * pause))
        chaos.end()
    print(found := check(tmp_path, chaos.done))
    assert int(found.split()[0]) >= rounds
