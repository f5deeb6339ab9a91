"""Programs in processes of their own, as a user starts them; nothing of them is left running."""

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
    """A checkout, before what these tests themselves import from."""
    return os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(**more: str) -> dict[str, str]:
    """That of this process, with this checkout, one thread, and variables beside."""
    return {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **more}


class Program:
    """A command in a process group of its own; a context that kills what is left of it.

    Args:
        command: The program and its arguments.
        folder: Where it runs.
        environ: Variables beside those of this process.
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
        """Read the output until a line with this text; what was read.

        Raises:
            AssertionError: If the program ends before.
        """
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"{text!r} did not appear in:\n{seen}")

    def signal(self, number: int) -> None:
        """Send a signal to the program alone."""
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to the program and to all that it has started."""
        os.killpg(self.process.pid, number)

    def finish(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Wait for the exit code and the rest of the output; all its processes have ended by then.

        Raises:
            AssertionError: If they do not end in time, with the output and, where the program has
                registered faulthandler for SIGUSR1, all stacks.
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
        """The rest of the output of a program that must end well."""
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
    """The command that runs a text as a program of this folder."""
    path = folder / "script.py"
    path.write_text(text)
    return [sys.executable, str(path)]


@contextmanager
def one_per_rank(
    command: Sequence[str], world: int, folder: Path, num_nodes: int = 1
) -> Iterator[list[Program]]:
    """A program for each rank of a job, none of which ends another; what is left is killed."""
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
    """Called by each program of a job: wait until all are here, as some take long to import."""
    (folder / f"ready {rank}").touch()
    deadline = time.monotonic() + timeout_s
    while len(list(folder.glob("ready *"))) < world and time.monotonic() < deadline:
        time.sleep(0.01)


def free_ports(count: int = 1) -> list[int]:
    """Ports of this machine that are free, and stay free for this process until they are used.

    They lie below those that the system gives to connections and to binds to port 0, in a
    block that this process has for itself.
    """
    found = filter(_is_free, itertools.islice(_own_ports(os.getpid()), _BLOCK))
    ports = list(itertools.islice(found, count))
    assert len(ports) == count
    return ports


@functools.cache
def _own_ports(process: int) -> Iterator[int]:
    """The ports of this process, again and again."""
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
        claim.detach()  # it stays until the process ends
        return itertools.cycle(range(first, first + _BLOCK))
    raise RuntimeError("Other processes have all ports.")


def _is_free(port: int) -> bool:
    with socket.socket() as here:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # whatever was there before
        try:
            here.bind(("", port))
        except OSError:
            return False
    return True
