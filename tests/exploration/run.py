"""Runs one schedule in a world, and says whether all properties hold."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_loco._util.fault_points import on_reach
from tests.exploration.choices import RandomChoices, RecordedChoices
from tests.exploration.properties import check
from tests.exploration.scheduler import Choices, Killed, Scheduler, Step, Stuck
from tests.exploration.worlds import WORLDS


@dataclass
class Schedule:
    """What is needed to repeat a run.

    Attributes:
        world: Name of the world.
        settings: Its settings.
        choices: What happened, event by event.
        found: What did not hold, for people.
    """

    world: str
    settings: dict[str, Any]
    choices: list[str] = field(default_factory=list)
    found: str = ""

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Schedule:
        """Read one that :meth:`save` wrote."""
        return cls(**json.loads(path.read_text()))


@dataclass
class Outcome:
    """What a run has shown.

    Attributes:
        schedule: Repeats it.
        steps: Its events with time and reason.
        failure: What did not hold; empty if everything did.
        kind: The property that did not hold, or the kind of error.
        details: A traceback, or empty.
    """

    schedule: Schedule
    steps: list[Step]
    failure: str = ""
    kind: str = ""
    details: str = ""


def draw_schedule(world: str, seed: int) -> tuple[Schedule, RandomChoices]:
    """Draw the settings of a run, and what makes its choices."""
    draw = random.Random(seed)
    settings = WORLDS[world].draw(draw)
    return Schedule(world, settings), RandomChoices(draw)


def explore(world: str, seed: int, settings: Mapping[str, Any] = MappingProxyType({})) -> Outcome:
    """Run one world in an order that a seed decides; ``settings`` replace drawn ones."""
    schedule, choices = draw_schedule(world, seed)
    schedule.settings.update(settings)
    return _run(schedule, choices)


def replay(schedule: Schedule) -> Outcome:
    """Run a schedule again."""
    return _run(schedule, RecordedChoices(schedule.choices))


def _run(schedule: Schedule, choices: Choices) -> Outcome:
    kind = WORLDS[schedule.world]
    world = kind(schedule.settings)
    scheduler = Scheduler(
        choices,
        world.faults,
        max_events=kind.max_events,
        limit_s=kind.limit_s,
        longest_stall_s=kind.longest_stall_s,
    )
    world.scheduler = scheduler
    outcome = Outcome(Schedule(schedule.world, schedule.settings), scheduler.steps)

    def fail(what: str, error: BaseException) -> None:
        outcome.kind, outcome.failure = what, str(error)
        outcome.details = "".join(traceback.format_exception(error))

    try:
        with on_reach(world.on_point):
            try:
                world.start()
                scheduler.run()
                world.end()
                for task in scheduler.tasks:
                    if task.error is not None and not isinstance(task.error, Killed):
                        raise task.error
            finally:
                outcome.schedule.choices = scheduler.taken
                scheduler.close()
        check(schedule.world, world.history)
    except Stuck as error:
        fail("no wait without an end", error)
    except AssertionError as error:
        fail(getattr(error, "property_name", "an assertion"), error)
    except Exception as error:
        fail(type(error).__name__, error)
    finally:
        world.close()
    outcome.schedule.found = f"{outcome.kind}: {outcome.failure}" if outcome.kind else ""
    return outcome
