"""The model of the lighthouse answers as a real one has."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.exploration.model_lighthouse import Quorums
from tests.exploration.record_quorums import (
    FILE,
    HEARTBEAT_TIMEOUT_S,
    JOIN_TIMEOUT_S,
    LATE_S,
    TICK_S,
)

_RECORDED: dict[str, Any] = json.loads(FILE.read_text())
_SLOWLY_S = 0.4
"""How much later a real answer may come, on a busy machine."""


def answers_of_the_model(min_replicas: int, actions: list[Any]) -> dict[tuple[str, float], Any]:
    """Do a scenario; return when each request was answered, and with which members."""
    quorums = Quorums(min_replicas, JOIN_TIMEOUT_S, HEARTBEAT_TIMEOUT_S)
    left, alive, open_requests = list(actions), set[str](), dict[str, float]()
    found: dict[tuple[str, float], Any] = {}
    for tick in range(round(7.0 / TICK_S)):
        now = tick * TICK_S
        for name in alive:
            quorums.heartbeats[name] = now
        while left and left[0][0] <= now:
            at_s, kind, name = left.pop(0)
            (alive.discard if kind == "die" else alive.add)(name)
            if kind == "beat":
                quorums.heartbeats[name] = now
            if kind == "ask":
                quorums.ask(name, at_s, now)
                open_requests[name] = at_s
        members = quorums.tick(now)
        for name, at_s in list(open_requests.items()):
            if members is not None and name in dict(members):
                found[name, at_s] = now, [list(member) for member in members]
                del open_requests[name]
            elif now - at_s > LATE_S:
                found[name, at_s] = math.nan, None
                del open_requests[name]
    return found


@pytest.mark.parametrize("name", _RECORDED)
def test_the_model_answers_as_the_real_lighthouse(name: str) -> None:
    scenario = _RECORDED[name]
    found = answers_of_the_model(scenario["min_replicas"], scenario["actions"])
    for answer in scenario["answers"]:
        at_s, members = found[answer["name"], answer["asked_s"]]
        assert members == answer["members"]
        if members is not None:
            assert -2 * TICK_S <= answer["after_s"] - at_s < _SLOWLY_S
