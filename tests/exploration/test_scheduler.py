"""The scheduler on small races of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.exploration import run as run_module
from tests.exploration.choices import RecordedChoices
from tests.exploration.mutants import Mutant
from tests.exploration.run import Outcome, Schedule, explore, replay
from tests.exploration.scheduler import TIME, Fault, Scheduler, Stuck
from tests.exploration.shrink import shrink
from tests.exploration.world import World


class Account(World):
    """Workers add 1 to a number that they have read before they waited: some additions are lost."""

    name = "account"

    @classmethod
    def draw(cls, draw: random.Random) -> dict[str, Any]:
        return {"workers": draw.choice([2, 3]), "is_safe": False}

    def start(self) -> None:
        self.balance, self.lock = 0, ""
        for number in range(self.settings["workers"]):
            self.scheduler.start(f"w{number}", lambda name=f"w{number}": self.work(name))

    def work(self, name: str) -> None:
        if self.settings["is_safe"]:
            self.scheduler.wait("the lock", lambda: not self.lock)
            self.lock = name
        balance = self.balance
        self.scheduler.wait("the bank")
        self.balance, self.lock = balance + 1, ""

    def end(self) -> None:
        if self.balance != self.settings["workers"]:
            raise AssertionError(f"{self.balance} is left")


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run_module.WORLDS, "account", Account)


def first_failure() -> Outcome:
    outcomes = (explore("account", seed) for seed in range(100))
    return next(outcome for outcome in outcomes if outcome.failure)


def test_a_race_is_found_replayed_and_shrunk() -> None:
    failing = first_failure()
    again = replay(failing.schedule)
    assert (again.kind, again.failure) == (failing.kind, failing.failure)
    assert again.schedule.choices == failing.schedule.choices
    short = shrink(failing, seconds=10.0)
    assert short.kind == failing.kind
    assert len(short.schedule.choices) <= 2


def test_nothing_is_found_where_no_race_is() -> None:
    for seed in range(50):
        schedule, choices = run_module.draw_schedule("account", seed)
        schedule.settings["is_safe"] = True
        assert not run_module._run(schedule, choices).failure


def test_the_same_seed_makes_the_same_choices() -> None:
    runs = [[explore("account", seed).schedule.choices for seed in range(20)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({tuple(choices) for choices in runs[0]}) > 5


def test_time_passes_only_to_the_next_deadline() -> None:
    scheduler = Scheduler(RecordedChoices([]))
    clock, times = scheduler.clock(), list[float]()

    def work() -> None:
        clock.sleep(2.0)
        times.append(clock.now())
        assert not scheduler.wait("what never comes", lambda: False, 3.0)
        times.append(clock.now())

    scheduler.start("w0", work)
    scheduler.start("w1", lambda: clock.sleep(1.0))
    scheduler.run()
    assert times == [2.0, 5.0]
    assert scheduler.taken.count(TIME) == 3


def test_a_wait_without_an_end_is_described() -> None:
    scheduler = Scheduler(RecordedChoices([]))
    scheduler.start("w0", lambda: scheduler.wait("an answer", lambda: False))
    with pytest.raises(Stuck, match="w0 waits for an answer"):
        scheduler.run()
    scheduler.close()


def test_killed_and_frozen_hosts() -> None:
    scheduler = Scheduler(RecordedChoices(["w0", "w1", "kill w0", "freeze w1"]), lambda: faults)
    done: list[str] = []

    def work(name: str) -> None:
        scheduler.wait("its turn")
        done.append(name)

    faults = {
        "kill w0": Fault(lambda: scheduler.kill("w0")),
        "freeze w1": Fault(lambda: scheduler.freeze("w1")),
    }
    for name in ("w0", "w1", "w2"):
        scheduler.start(name, lambda name=name: work(name))
    with pytest.raises(Stuck, match=r"w1 waits for its turn \(frozen\)"):
        scheduler.run()
    assert done == ["w2"]
    scheduler.thaw("w1")
    scheduler.run()
    assert done == ["w2", "w1"]


def test_a_schedule_is_saved_and_loaded(tmp_path: Any) -> None:
    schedule = Schedule("account", {"workers": 2, "is_safe": False}, ["w0", "w1"], "a race")
    schedule.save(tmp_path / "new" / "race.json")
    assert Schedule.load(tmp_path / "new" / "race.json") == schedule


def test_a_mutant_changes_a_function_for_a_while() -> None:
    mutant = Mutant(
        "waits for the lock of the other",
        "tests.exploration.test_scheduler.Account.work",
        "lambda: not self.lock",
        "lambda: True",
        {"is_safe": True},
    )
    found = [explore("account", seed, mutant.settings).failure for seed in range(30)]
    assert not any(found)
    with mutant.put_back():
        found = [explore("account", seed, mutant.settings).failure for seed in range(30)]
    assert any(found)
    found = [explore("account", seed, mutant.settings).failure for seed in range(30)]
    assert not any(found)


def test_a_mutant_that_no_longer_fits_is_an_error() -> None:
    mutant = Mutant("old", "tests.exploration.test_scheduler.Account.work", "gone", "")
    with pytest.raises(ValueError, match="occurs 0 times"), mutant.put_back():
        pass
