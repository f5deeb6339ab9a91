"""The doctor in processes of its own, one for each machine, as users start it."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.programs import Program, free_ports, python_path

LIMIT_S = 60.0
COMMAND = [sys.executable, str(ROOT / "command.py"), "doctor"]


@dataclass(frozen=True)
class Said:
    """What one machine has said.

    Attributes:
        status: Its exit status.
        text: Its output.
        seconds: How long it took, the start of Python included.
    """

    status: int
    text: str
    seconds: float

    def rows(self, check: str) -> list[tuple[str, str]]:
        """Status and text of the findings of a check."""
        pattern = rf"^{check} +(ok|warning|failed) +(.*)$"
        return re.findall(pattern, self.text, re.MULTILINE)

    def faults(self) -> list[tuple[str, str]]:
        """Check and text of what has failed."""
        pattern = r"^([a-z ]+?) +failed +(.*)$"
        return re.findall(pattern, self.text, re.MULTILINE)


class Machines:
    """Machines on this one, that meet at a free port; a context that ends what is left of them.

    Args:
        world: How many there should be.
        timeout_s: What ``--timeout`` says.
    """

    def __init__(self, world: int, timeout_s: float = 10.0) -> None:
        self.world = world
        self.port = free_ports()[0]
        self.timeout_s = timeout_s
        self._stack = ExitStack()
        self._programs: dict[int, tuple[Program, float]] = {}

    def start(self, rank: int, *arguments: str, before: Path | None = None, **environ: str) -> None:
        """Start one; a folder may be put before all others from which Python imports."""
        words = ["--master", f"127.0.0.1:{self.port}", "--rank", str(rank)]
        words += ["--world", str(self.world), "--timeout", f"{self.timeout_s:g}", *arguments]
        if before is not None:
            environ["PYTHONPATH"] = f"{before}{os.pathsep}{python_path()}"
        program = self._stack.enter_context(Program([*COMMAND, *words], None, **environ))
        self._programs[rank] = program, time.monotonic()

    def finish(self) -> dict[int, Said]:
        """What all have said, by their number."""
        said = {}
        for rank, (program, began) in self._programs.items():
            status, text = program.finish(LIMIT_S)
            said[rank] = Said(status, text, time.monotonic() - began)
        return said

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def meet(world: int, timeout_s: float = 10.0) -> dict[int, Said]:
    """What all machines say when nothing is wrong with them."""
    with Machines(world, timeout_s) as machines:
        for rank in range(world):
            machines.start(rank)
        return machines.finish()
