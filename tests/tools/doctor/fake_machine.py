"""A fake machine that joins a rendezvous with arbitrary facts."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from lightning_loco.tools.doctor.connectivity import ConnectionResult, Results, decode, encode
from lightning_loco.tools.doctor.facts import Facts
from lightning_loco.tools.doctor.rendezvous import Findings, Hello, Participants, Refusal

LIMIT_S = 30.0


def facts_of(rank: int, world: int, **others: Any) -> Facts:
    """Return facts of a machine without faults."""
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
    """Joins a rendezvous on this machine and reports that it can reach all others.

    Args:
        port: Port of the rendezvous.
        facts: Facts to send.
        leaves: Whether it disconnects right after it has joined.
        hangs: Whether it sends no results.

    Attributes:
        has_joined: Set when it has sent its facts.
        has_started: Set when it has received the facts of all machines.
        reply: The last received message, or None.
    """

    def __init__(self, port: int, facts: Facts, leaves: bool = False, hangs: bool = False) -> None:
        super().__init__(name="fake-machine")
        self._port = port
        self._facts = facts
        self._leaves = leaves
        self._hangs = hangs
        self.has_joined = threading.Event()
        self.has_started = threading.Event()
        self.reply: Findings | Refusal | None = None
        self.start()

    def run(self) -> None:
        with self._connect() as connection, connection.makefile("rb") as lines:
            connection.sendall(encode(Hello(self._facts, LIMIT_S)))
            self.has_joined.set()
            if self._leaves:
                return
            participants = decode(lines.readline(), Participants, Refusal)
            if isinstance(participants, Refusal):
                self.reply = participants
                return
            self.has_started.set()
            if not self._hangs:
                ranks = [
                    facts.rank for facts in participants.facts if facts.rank != self._facts.rank
                ]
                results = tuple(ConnectionResult(rank, "", 0.001) for rank in ranks)
                connection.sendall(encode(Results(self._facts.rank, results, (), 0.0)))
            self.reply = decode(lines.readline(), Findings)

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._port), LIMIT_S)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
