"""A machine whose address a test chooses: it comes to the rendezvous, and is reached or is not."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from lightning_loco.doctor.connectivity import Contact, Results
from lightning_loco.doctor.facts import Facts
from lightning_loco.doctor.messages import decode, encode
from lightning_loco.doctor.rendezvous import Hello, Refusal, Report, Roster

LIMIT_S = 30.0


def facts_of(rank: int, world: int, **others: Any) -> Facts:
    """Facts of a machine with which nothing is wrong."""
    values: dict[str, Any] = {
        "rank": rank,
        "world": world,
        "name": f"node-{rank}",
        "name_address": f"10.0.0.{rank + 1}",
        "address": f"10.0.0.{rank + 1}",
        "interface": "eth0",
        "faults": (),
        "port": 40000 + rank,
        "route_address": f"10.0.0.{rank + 1}",
        "route_interface": "eth0",
        "versions": {"torch": "2.13.0"},
        "hardware": "cores: 8, NVIDIA GPUs: 1",
        "environment": "",
        "open_files": 65536,
        "ports": "32768-60999",
        "free_bytes": 2**40,
    }
    return Facts(**{**values, **others})


class FakeMachine(threading.Thread):
    """Comes to a rendezvous on this machine and says that it reaches all others.

    Args:
        port: Of the rendezvous.
        facts: What it tells.
        leaves: Whether it goes as soon as it has come.
        hangs: Whether it says nothing more from then on.

    Attributes:
        has_come: Set when it has told its facts.
        has_begun: Set when it has heard who is there.
        answer: The last message that it was sent, or None.
    """

    def __init__(self, port: int, facts: Facts, leaves: bool = False, hangs: bool = False) -> None:
        super().__init__(name="fake-machine")
        self._port = port
        self._facts = facts
        self._leaves = leaves
        self._hangs = hangs
        self.has_come = threading.Event()
        self.has_begun = threading.Event()
        self.answer: Report | Refusal | None = None
        self.start()

    def run(self) -> None:
        with self._connect() as connection, connection.makefile("rb") as lines:
            connection.sendall(encode(Hello(self._facts, LIMIT_S)))
            self.has_come.set()
            if self._leaves:
                return
            roster = decode(lines.readline(), Roster, Refusal)
            if isinstance(roster, Refusal):
                self.answer = roster
                return
            self.has_begun.set()
            if not self._hangs:
                ranks = [facts.rank for facts in roster.present if facts.rank != self._facts.rank]
                contacts = tuple(Contact(rank, "", 0.001) for rank in ranks)
                connection.sendall(encode(Results(self._facts.rank, contacts, ())))
            self.answer = decode(lines.readline(), Report)

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._port), LIMIT_S)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
