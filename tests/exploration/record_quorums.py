"""Writes what a real lighthouse of torchft answers to workers in a few scenarios.

Run ``python -m tests.exploration.record_quorums``: it takes a minute. A scenario is a list of
actions, by time: a worker sends a heartbeat, or asks for a quorum. What each request brought, and
which members it named, is kept in ``recorded_quorums.json``.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchft.coordination import LighthouseClient, LighthouseServer

FILE = Path(__file__).with_name("recorded_quorums.json")
JOIN_TIMEOUT_S, HEARTBEAT_TIMEOUT_S, TICK_S, LATE_S = 2.0, 1.0, 0.02, 3.5

Action = tuple[float, str, str]
"""When, ``"beat"`` or ``"ask"``, and which worker. Heartbeats go on until ``"die"``."""

SCENARIOS: dict[str, tuple[int, list[Action]]] = {
    "one worker": (1, [(0.0, "ask", "a")]),
    "two come together": (2, [(0.0, "ask", "b"), (0.5, "ask", "a")]),
    "the least number is not reached": (2, [(0.0, "ask", "a")]),
    "one that is alive is waited for": (
        1,
        [(0.0, "beat", "b"), (0.2, "ask", "a"), (1.0, "ask", "b")],
    ),
    "one that is alive does not come": (
        1,
        [(0.0, "beat", "c"), (0.3, "ask", "a"), (0.4, "ask", "b")],
    ),
    "half of those alive are not enough": (
        1,
        [(0.0, "beat", "b"), (0.0, "beat", "c"), (0.0, "beat", "d"), (0.3, "ask", "a")],
    ),
    "one that is lost is waited for until its heartbeats are old": (
        1,
        [
            (0.0, "beat", "b"),
            (0.0, "beat", "c"),
            (0.3, "die", "b"),
            (0.5, "ask", "a"),
            (0.6, "ask", "c"),
        ],
    ),
    "the members before continue without a newcomer": (
        1,
        [
            (0.0, "beat", "b"),
            (0.2, "ask", "a"),
            (0.3, "ask", "b"),
            (0.5, "beat", "c"),
            (0.7, "ask", "a"),
            (0.8, "ask", "b"),
        ],
    ),
    "a newcomer that has asked before": (
        1,
        [
            (0.0, "beat", "b"),
            (0.2, "ask", "a"),
            (0.3, "ask", "b"),
            (0.5, "ask", "c"),
            (0.7, "ask", "a"),
            (0.8, "ask", "b"),
        ],
    ),
    "fewer than the least number, after a quorum": (
        2,
        [
            (0.0, "beat", "b"),
            (0.2, "ask", "a"),
            (0.3, "ask", "b"),
            (0.4, "die", "b"),
            (0.6, "ask", "a"),
        ],
    ),
    "one that dies after it has asked": (
        1,
        [
            (0.0, "beat", "b"),
            (0.0, "beat", "c"),
            (0.3, "ask", "a"),
            (0.4, "die", "a"),
            (1.6, "ask", "b"),
            (1.8, "ask", "c"),
        ],
    ),
}


def record(min_replicas: int, actions: list[Action]) -> list[dict[str, Any]]:
    """Do a scenario with a real lighthouse; return what each request has brought."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=int(1000 * JOIN_TIMEOUT_S),
        quorum_tick_ms=int(1000 * TICK_S),
        heartbeat_timeout_ms=int(1000 * HEARTBEAT_TIMEOUT_S),
    )
    address = "http://127.0.0.1:" + server.address().rpartition(":")[2]
    started, answers, threads = time.monotonic(), [], []
    alive: dict[str, threading.Event] = {}

    def beat(name: str) -> None:
        client = LighthouseClient(address, timedelta(seconds=5))
        while not alive[name].wait(0.05):
            client.heartbeat(name)

    def start_beating(name: str) -> None:
        if name not in alive:
            alive[name] = threading.Event()
            threads.append(threading.Thread(target=beat, args=(name,)))
            threads[-1].start()

    def ask(name: str, at_s: float) -> None:
        client = LighthouseClient(address, timedelta(seconds=5))
        answer: dict[str, Any] = {"name": name, "asked_s": at_s, "members": None}
        answers.append(answer)
        try:
            quorum = client.quorum(name, timedelta(seconds=LATE_S), data={"asked": at_s})
        except TimeoutError:
            return
        answer["members"] = [[each.replica_id, each.data["asked"]] for each in quorum.participants]
        answer["after_s"] = time.monotonic() - started

    for at_s, kind, name in actions:
        time.sleep(max(0.0, started + at_s - time.monotonic()))
        if kind == "die":
            alive[name].set()
            continue
        start_beating(name)
        if kind == "ask":
            threads.append(threading.Thread(target=ask, args=(name, at_s)))
            threads[-1].start()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < started + 7.0:
        time.sleep(0.1)
    for event in alive.values():
        event.set()
    for thread in threads:
        thread.join()
    server.shutdown()
    return sorted(answers, key=lambda answer: (answer["asked_s"], answer["name"]))


def main() -> None:
    """Write the file."""
    recorded = {
        name: {"min_replicas": least, "actions": actions, "answers": record(least, actions)}
        for name, (least, actions) in SCENARIOS.items()
    }
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
