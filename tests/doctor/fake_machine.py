"""A machine whose doors a test chooses: it takes part in the meeting, and is reached or is not."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from lightning_loco.doctor.messages import (
    PROTOCOL,
    Door,
    Facts,
    Hello,
    Refusal,
    Results,
    Roster,
    Summary,
    Welcome,
)
from lightning_loco.doctor.records import read, write

LIMIT_S = 30.0


def facts_of(rank: int, world: int, *doors: Door, **others: Any) -> Facts:
    """Facts of a machine with which nothing is wrong."""
    values: dict[str, Any] = {
        "rank": rank,
        "world": world,
        "name": f"node-{rank}",
        "host": f"host-{rank}",
        "name_address": f"10.0.0.{rank + 1}",
        "name_s": 0.0,
        "doors": doors,
        "faults": (),
        "road_interface": "eth0",
        "road_address": f"10.0.0.{rank + 1}",
        "versions": {"torch": "2.13.0"},
        "open_files": 65536,
        "ports": "32768-60999",
    }
    return Facts(**{**values, **others})


class FakeMachine(threading.Thread):
    """Comes to a meeting on this machine and finds nothing out.

    Args:
        port: Of the meeting.
        facts: What it tells.
        protocol: Which version of the doctor it claims to be.
        leaves: Whether it goes as soon as it is welcome.
        hangs: Whether it says nothing more from then on.

    Attributes:
        is_in: Set when it is welcome.
        has_begun: Set when it has heard who is there.
        answer: The last record that it was sent, or None.
    """

    def __init__(
        self,
        port: int,
        facts: Facts,
        protocol: int = PROTOCOL,
        leaves: bool = False,
        hangs: bool = False,
    ) -> None:
        super().__init__(name="fake-machine")
        self._port = port
        self._leaves = leaves
        self._hangs = hangs
        self._hello = Hello(protocol, facts, LIMIT_S)
        self.is_in = threading.Event()
        self.has_begun = threading.Event()
        self.answer: Summary | Refusal | None = None
        self.start()

    def run(self) -> None:
        with self._connect() as connection, connection.makefile("rb") as lines:
            connection.sendall(write(self._hello))
            answer = read(lines.readline(), Welcome, Refusal)
            if isinstance(answer, Refusal):
                self.answer = answer
                return
            self.is_in.set()
            if self._leaves:
                return
            read(lines.readline(), Roster)
            self.has_begun.set()
            if not self._hangs:
                connection.sendall(write(Results((), (), 0.0, 0.0)))
            self.answer = read(lines.readline(), Summary)

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._port), LIMIT_S)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
