"""Machines with separate networks: connected network namespaces of Linux.

Each has a separate host name and /etc/hosts, so that common misconfigurations can be tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.harness.programs import Program
from tests.harness.sources import ROOT


def ip(*words: str) -> None:
    """Run ``ip``; raise CalledProcessError with its output."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def optional(*command: str) -> None:
    """Change a network in a way that not every kernel supports; skip the test otherwise."""
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]} here")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel cannot do this: {error.stderr.decode().strip()}")


class Network:
    """Machines node-0, node-1, ... with addresses 10.77.0.1, 10.77.0.2, ... on one switch.

    Args:
        world: Number of machines.
        folder: Folder for their files.

    Attributes:
        spaces: Names of their network namespaces.
    """

    def __init__(self, world: int, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self.spaces = [f"loco-{os.getpid()}-{rank}" for rank in range(world)]
        self._switch = f"loco-{os.getpid()}-switch"
        try:
            self._wire()
        except BaseException:
            self.close()
            raise

    def _wire(self) -> None:
        switch = self._switch
        for space in (switch, *self.spaces):
            ip("netns", "add", space)
            self._stack.callback(ip, "netns", "del", space)
        ip("-n", switch, "link", "add", "name", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for rank, space in enumerate(self.spaces):
            peer = ("type", "veth", "peer", "name", f"port{rank}", "netns", switch)
            ip("-n", space, "link", "add", "name", "eth0", *peer)
            ip("-n", switch, "link", "set", f"port{rank}", "master", "br0", "up")
            ip("-n", space, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "eth0", "up")
            self.hosts(rank, address(rank), *range(len(self.spaces)))
            self.name_server(rank, "127.0.0.1")

    def hosts(self, rank: int, own: str, *others: int) -> None:
        """Write a machine's /etc/hosts: addresses of its own name and of others."""
        lines = ["127.0.0.1 localhost", f"{own} node-{rank}"]
        lines += [f"::ffff:{address(other)} node-{other}" for other in others]
        (self._folder / f"hosts-{rank}").write_text("\n".join(lines) + "\n")

    def name_server(self, rank: int, at: str) -> None:
        """Write a machine's /etc/resolv.conf."""
        (self._folder / f"resolv-{rank}").write_text(f"nameserver {at}\n")

    def drop(self, rank: int, *selector: str) -> None:
        """Let a machine silently drop packets that it would send."""
        rule = ("rule", "add", "pref", "1", *selector, "blackhole")
        optional("ip", "-n", self.spaces[rank], *rule)

    def cut(self, rank: int) -> None:
        """Disconnect a machine from the switch."""
        ip("-n", self._switch, "link", "set", f"port{rank}", "down")

    def slow_down(self, rate: str) -> None:
        """Limit the sending rate of all machines."""
        shape = ["root", "tbf", "rate", rate, "burst", "32k", "latency", "500ms"]
        for space in self.spaces:
            optional("tc", "-n", space, "qdisc", "add", "dev", "eth0", *shape)

    def divide(self, first: int, rate: str) -> None:
        """Move the machines from ``first`` on to a second switch; one line connects the two."""
        switch = self._switch
        ip("-n", switch, "link", "add", "name", "br1", "type", "bridge")
        ip("-n", switch, "link", "set", "br1", "up")
        ip("-n", switch, "link", "add", "line0", "type", "veth", "peer", "name", "line1")
        shape = ["root", "tbf", "rate", rate, "burst", "32k", "latency", "500ms"]
        for end in ("0", "1"):
            ip("-n", switch, "link", "set", f"line{end}", "master", f"br{end}", "up")
            optional("tc", "-n", switch, "qdisc", "add", "dev", f"line{end}", *shape)
        for rank in range(first, len(self.spaces)):
            ip("-n", switch, "link", "set", f"port{rank}", "master", "br1")

    def narrow(self, rank: int, mtu: int) -> None:
        """Drop a machine's outgoing packets above a size, without any notice to it."""
        optional("ip", "-n", self.spaces[rank], "link", "set", "eth0", "gso_max_segs", "1")
        ip("-n", self._switch, "link", "set", f"port{rank}", "mtu", str(mtu))

    def run(self, rank: int, *command: str, **environ: str) -> Program:
        """Run a command on a machine; it is killed with the network at the latest."""
        mounts = [
            f'mount --bind "{self._folder}/hosts-{rank}" /etc/hosts',
            f'mount --bind "{self._folder}/resolv-{rank}" /etc/resolv.conf',
        ]
        inside = " && ".join([f"hostname node-{rank}", *mounts, 'exec "$@"'])
        words = ["ip", "netns", "exec", self.spaces[rank], "unshare", "--uts", "--mount"]
        words += ["sh", "-c", inside, "sh", *command]
        return self._stack.enter_context(Program(words, ROOT, **environ))

    def close(self) -> None:
        """Remove everything."""
        self._stack.close()


def address(rank: int) -> str:
    """Return the address of a machine in its network."""
    return f"10.77.0.{rank + 1}"


@contextmanager
def wired_together(world: int, folder: Path) -> Iterator[Network]:
    """Yield connected machines; the test is skipped if they cannot be created."""
    if sys.platform != "linux":
        pytest.skip("needs Linux's network namespaces")
    try:
        wired = Network(world, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        pytest.skip(f"no network namespaces here: {error} {said.decode().strip()}")
    try:
        yield wired
    finally:
        wired.close()
