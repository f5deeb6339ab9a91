"""Networks between the workers of a run: the loopback, or machines at a switch with a slow link.

Both are network namespaces of Linux where they are allowed: bytes of other processes do not
count.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

HOST = "127.0.0.1"


class Unavailable(Exception):
    """There is no such network here, and why."""


class Link(Protocol):
    """A network between workers.

    Attributes:
        name: What is printed.
        interface: By which a worker reaches the others.
        shared: Whether all workers send through one interface.
    """

    name: str
    interface: str
    shared: bool

    def host(self, rank: int) -> str:
        """The address of a worker."""

    def command(self, rank: int, words: list[str]) -> list[str]:
        """How to run a command where a worker is."""


class PlainLoopback:
    """The loopback of this machine, shared with other processes."""

    name, shared = "loopback", True
    interface = "lo" if sys.platform == "linux" else "lo0"

    def host(self, rank: int) -> str:
        """The address of a worker."""
        return HOST

    def command(self, rank: int, words: list[str]) -> list[str]:
        """The command as it is."""
        return words


class Namespaces:
    """Workers in namespaces, each with a host name and tables of names.

    Args:
        name: What is printed.
        interface: By which a worker reaches the others.
        spaces: The namespace of each worker, or one for all.
        hosts: The address in each namespace.
        folder: For the tables.
    """

    def __init__(
        self, name: str, interface: str, spaces: Sequence[str], hosts: Sequence[str], folder: Path
    ) -> None:
        self.name, self.interface, self.shared = name, interface, len(spaces) == 1
        self._spaces, self._hosts, self._folder = spaces, hosts, folder
        names = [f"{host} worker-{index}" for index, host in enumerate(hosts)]
        (folder / "hosts").write_text("\n".join([f"{HOST} localhost", *names]) + "\n")
        (folder / "resolv").write_text(f"nameserver {HOST}\n")

    def host(self, rank: int) -> str:
        """The address of a worker."""
        return self._hosts[rank % len(self._hosts)]

    def command(self, rank: int, words: list[str]) -> list[str]:
        """The command inside a namespace."""
        index = rank % len(self._spaces)
        inside = " && ".join(
            [
                f"hostname worker-{index}",
                f'mount --bind "{self._folder}/hosts" /etc/hosts',
                f'mount --bind "{self._folder}/resolv" /etc/resolv.conf',
                'exec "$@"',
            ]
        )
        enter = ["ip", "netns", "exec", self._spaces[index], "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", inside, "sh", *words]


@contextlib.contextmanager
def loopback(folder: Path) -> Iterator[Link]:
    """The loopback of a namespace, or this machine's where there are none."""
    with contextlib.ExitStack() as stack:
        space = f"loco-bench-{os.getpid()}"
        try:
            stack.enter_context(_made([space]))
        except Unavailable:
            yield PlainLoopback()
        else:
            yield Namespaces("loopback", "lo", [space], [HOST], folder)


@contextlib.contextmanager
def shaped(folder: Path, num_workers: int, rate: str) -> Iterator[Link]:
    """Workers at a switch, with a token bucket at each; Unavailable where that cannot be."""
    spaces = [f"loco-bench-{os.getpid()}-{rank}" for rank in range(num_workers)]
    hosts = [f"10.78.0.{rank + 1}" for rank in range(num_workers)]
    switch = f"loco-bench-{os.getpid()}-switch"
    with _made([switch, *spaces]):
        try:
            _do("ip", "-n", switch, "link", "add", "name", "br0", "type", "bridge")
            _do("ip", "-n", switch, "link", "set", "br0", "up")
            for rank, (space, host) in enumerate(zip(spaces, hosts, strict=True)):
                far = ["type", "veth", "peer", "name", f"port{rank}", "netns", switch]
                _do("ip", "-n", space, "link", "add", "name", "eth0", *far)
                _do("ip", "-n", switch, "link", "set", f"port{rank}", "master", "br0", "up")
                _do("ip", "-n", space, "addr", "add", f"{host}/24", "dev", "eth0")
                _do("ip", "-n", space, "link", "set", "eth0", "up")
                bucket = ["root", "tbf", "rate", rate, "burst", "32k", "latency", "500ms"]
                _do("tc", "-n", space, "qdisc", "add", "dev", "eth0", *bucket)
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"no shaped link: {_said(error)}") from error
        yield Namespaces(f"shaped to {rate}/s", "eth0", spaces, hosts, folder)


@contextlib.contextmanager
def _made(names: list[str]) -> Iterator[None]:
    """Have network namespaces for a while; Unavailable where they are not allowed."""
    if sys.platform != "linux":
        raise Unavailable("network namespaces are Linux's")
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                _do("ip", "netns", "add", name)
                stack.callback(_do, "ip", "netns", "del", name)
                _do("ip", "-n", name, "link", "set", "lo", "up")
            _do("ip", "netns", "exec", names[0], "unshare", "--uts", "--mount", "true")
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"no network namespaces: {_said(error)}") from error
        yield


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def _said(error: Exception) -> str:
    said = (getattr(error, "stderr", None) or b"").decode().strip() or str(error)
    return said.splitlines()[-1]
