"""Programs in separate processes, started as users do; none is left running."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.harness.guards import check_may_start_processes
from tests.harness.sources import ROOT

LIMIT_S = 240.0
_SYSTEM_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000
_BLOCK = 200


def python_path(checkout: Path = ROOT) -> str:
    """Return PYTHONPATH: a checkout, before the paths of these tests."""
    return os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with this checkout, one thread, and further variables."""
    return {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **more}


class Program:
    """A command in a separate process group; the context kills the remaining processes.

    Args:
        command: The program and its arguments.
        folder: Working folder.
        environ: Variables in addition to those of this process.
    """

    def __init__(self, command: Sequence[str], folder: Path | None = None, **environ: str) -> None:
        check_may_start_processes()
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, text: str) -> str:
        """Read the output until a line contains this text; return that output.

        Raises:
            AssertionError: If the program exits before.
        """
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"{text!r} did not appear in:\n{seen}")

    def signal(self, number: int) -> None:
        """Send a signal to the program only."""
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to the program and to all its child processes."""
        os.killpg(self.process.pid, number)

    def finish(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Wait for the exit; return the exit code and the rest of the output.

        Raises:
            AssertionError: If a process is still running after the limit; with the output, and
                all stacks if the program has registered faulthandler for SIGUSR1.
        """
        try:
            output, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGUSR1)
            time.sleep(2)
            self.signal_all(signal.SIGKILL)
            output, _ = self.process.communicate()
            raise AssertionError(f"still running after {limit_s:g} s:\n{output}") from None
        return self.process.returncode, output

    def succeed(self, limit_s: float = LIMIT_S) -> str:
        """Return the rest of the output of a program that must succeed."""
        with self:
            code, output = self.finish(limit_s)
        assert code == 0, output
        return output

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.signal_all(signal.SIGKILL)
        except ProcessLookupError:
            assert self.process.poll() is not None
        self.process.communicate()


def python_script(folder: Path, text: str) -> list[str]:
    """Return the command that runs a text as a program in this folder."""
    path = folder / "script.py"
    path.write_text(text)
    return [sys.executable, str(path)]


@contextmanager
def one_per_rank(
    command: Sequence[str], world: int, folder: Path, num_nodes: int = 1
) -> Iterator[list[Program]]:
    """Run a program for each rank of a job; kill the remaining processes at the end."""
    (port,) = free_ports()
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    node_and_local = [divmod(rank, world // num_nodes) for rank in range(world)]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Program(command, folder, NODE_RANK=str(node), LOCAL_RANK=str(local), **job)
            )
            for node, local in node_and_local
        ]


def start_together(folder: Path, rank: int, world: int, timeout_s: float = 60.0) -> None:
    """Wait until all programs of a job have started, because imports may take long."""
    (folder / f"ready {rank}").touch()
    deadline = time.monotonic() + timeout_s
    while len(list(folder.glob("ready *"))) < world and time.monotonic() < deadline:
        time.sleep(0.01)


def free_ports(count: int = 1) -> list[int]:
    """Return free ports of this machine, reserved for this process until they are used.

    They are below the ports that the system assigns to connections and to binds to port 0, in a
    block that is reserved for this process.
    """
    found = filter(_is_free, itertools.islice(_own_ports(os.getpid()), _BLOCK))
    ports = list(itertools.islice(found, count))
    assert len(ports) == count
    return ports


@functools.cache
def _own_ports(process: int) -> Iterator[int]:
    """Yield the ports of this process, in a cycle."""
    lowest_of_system = int(_SYSTEM_PORTS.read_text().split()[0])
    blocks = list(range(_FIRST_PORT, lowest_of_system - _BLOCK, _BLOCK))
    random.Random(process).shuffle(blocks)
    for first in blocks:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0lightning_loco.tests.ports{first}")
        except OSError:
            claim.close()
            continue
        claim.detach()  # kept until the process exits
        return itertools.cycle(range(first, first + _BLOCK))
    raise RuntimeError("Other processes have all ports.")


def _is_free(port: int) -> bool:
    with socket.socket() as here:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # whatever it contained
        try:
            here.bind(("", port))
        except OSError:
            return False
    return True
