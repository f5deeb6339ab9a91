"""What chooses the next event of a run: a seed, or a schedule that was recorded."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.exploration.scheduler import TIME, Options


class RandomChoices:
    """Chooses by chance, in a style that is drawn first, since each finds other defects.

    Some runs have no faults, some have many, and in some time passes although something else could
    happen, as on a slow machine. Events are chosen evenly, or one task runs for as long as it can,
    or the tasks have priorities, which change a few times.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._style = draw.choice(["even", "long", "priorities"])
        self._faults_left = draw.choice([0, 1, 1, 2, 3, 5, 8])
        self._fault_share = draw.choice([0.003, 0.01, 0.03, 0.1])
        self._repair_share = draw.choice([0.003, 0.03, 0.3])
        self._time_share = draw.choice([0.0, 0.0, 0.01, 0.1])
        self._priorities: dict[str, float] = {}
        self._last = ""

    def __call__(self, options: Options) -> str:
        draw, events = self._draw, options.events
        if options.faults and self._faults_left and draw.random() < self._fault_share:
            self._faults_left -= 1
            # One kind after the other, so that a kind with one fault is as common as others.
            kind = draw.choice(sorted({name.split()[0] for name in options.faults}))
            return draw.choice([name for name in options.faults if name.split()[0] == kind])
        can_repair = options.repairs and (
            draw.random() < self._repair_share or not (events or options.can_wait)
        )
        if can_repair:
            return draw.choice(options.repairs)
        if not events or (options.can_wait and draw.random() < self._time_share):
            return TIME if options.can_wait else draw.choice(options.repairs)
        self._last = self._choose_event(events)
        return self._last

    def _choose_event(self, events: list[str]) -> str:
        draw = self._draw
        if self._style == "long" and self._last in events and draw.random() < 0.9:
            return self._last
        if self._style == "priorities":
            if draw.random() < 0.02:
                self._priorities.clear()
            for name in events:
                self._priorities.setdefault(name, draw.random())
            return max(events, key=self._priorities.__getitem__)
        return draw.choice(events)


class RecordedChoices:
    """Chooses what a schedule says, leaving out what is not possible; then what is usual.

    It is usual that repairs happen at once, tasks and events take turns, and time passes only when
    nothing else can happen.
    """

    def __init__(self, schedule: Sequence[str]) -> None:
        self._rest = list(reversed(schedule))
        self._turns: dict[str, int] = {}

    def __call__(self, options: Options) -> str:
        possible = {*options.events, *options.faults, *options.repairs}
        if options.can_wait:
            possible.add(TIME)
        while self._rest:
            name = self._rest.pop()
            if name in possible:
                return name
        if options.repairs:
            return options.repairs[0]
        if not options.events:
            return TIME
        name = min(options.events, key=lambda name: self._turns.get(name, -1))
        self._turns[name] = max(self._turns.values(), default=0) + 1
        return name
