"""Run the doctor in processes, one per machine, as users start it."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.harness.programs import Program, free_ports, python_path
from tests.harness.sources import ROOT

LIMIT_S = 60.0
COMMAND = [sys.executable, str(ROOT / "command.py"), "doctor"]


@dataclass(frozen=True)
class Output:
    """The output of one machine.

    Attributes:
        status: Exit status.
        text: Standard output and error.
        seconds: Duration in seconds, including the start of Python.
    """

    status: int
    text: str
    seconds: float

    def rows(self, check: str) -> list[tuple[str, str]]:
        """Return status and text of a check's findings."""
        pattern = rf"^{check} +(ok|warning|failed) +(.*)$"
        return re.findall(pattern, self.text, re.MULTILINE)

    def faults(self) -> list[tuple[str, str]]:
        """Return check and text of the failed findings."""
        pattern = r"^([a-z ]+?) +failed +(.*)$"
        return re.findall(pattern, self.text, re.MULTILINE)


class Machines:
    """Several simulated machines on this one, with a free port for the rendezvous.

    Args:
        world: Number of machines that should join.
        timeout_s: Value of ``--timeout``.
    """

    def __init__(self, world: int, timeout_s: float = 10.0) -> None:
        self.world = world
        self.port = free_ports()[0]
        self.timeout_s = timeout_s
        self._stack = ExitStack()
        self._programs: dict[int, tuple[Program, float]] = {}

    def start(self, rank: int, *arguments: str, before: Path | None = None, **environ: str) -> None:
        """Start a machine; Python imports from the folder ``before`` first."""
        command = ["--master", f"127.0.0.1:{self.port}", "--rank", str(rank)]
        command += ["--world", str(self.world), "--timeout", f"{self.timeout_s:g}", *arguments]
        if before is not None:
            environ["PYTHONPATH"] = f"{before}{os.pathsep}{python_path()}"
        program = self._stack.enter_context(Program([*COMMAND, *command], None, **environ))
        self._programs[rank] = program, time.monotonic()

    def finish(self) -> dict[int, Output]:
        """Wait for all machines; return their output by rank."""
        outputs = {}
        for rank, (program, started) in self._programs.items():
            status, text = program.finish(LIMIT_S)
            outputs[rank] = Output(status, text, time.monotonic() - started)
        return outputs

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def check_together(world: int, timeout_s: float = 10.0) -> dict[int, Output]:
    """Run the doctor on machines without faults; return their output by rank."""
    with Machines(world, timeout_s) as machines:
        for rank in range(world):
            machines.start(rank)
        return machines.finish()
