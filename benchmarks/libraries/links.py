"""Networks between the workers of a run: the loopback, or machines at a switch with a slow link.

Both are network namespaces of Linux where they are allowed: bytes of other processes do not
count.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import HOST

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x0002_0000, 0x0400_0000, 0x4000_0000


class Unavailable(Exception):
    """There is no such network here, and why."""


class PlainLoopback:
    """The loopback of this machine, shared with other processes."""

    name, is_shared = "loopback", True
    interface = "lo" if sys.platform == "linux" else "lo0"

    def enter(self, rank: int) -> str:
        """The address of a worker."""
        return HOST


class Namespaces:
    """Workers in network namespaces, each with a host name and tables of names.

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
        self.name, self.interface, self.is_shared = name, interface, len(spaces) == 1
        self._spaces, self._hosts, self._folder = spaces, hosts, folder
        names = [f"{host} worker-{index}" for index, host in enumerate(hosts)]
        (folder / "hosts").write_text("\n".join([f"{HOST} localhost", *names]) + "\n")
        (folder / "resolv").write_text(f"nameserver {HOST}\n")

    def enter(self, rank: int) -> str:
        """Move this process, which has no other threads yet; return its address."""
        index = rank % len(self._spaces)
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._spaces[index]}") as space:
            entered = libc.setns(space.fileno(), CLONE_NEWNET)
        if entered != 0 or libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), "this process cannot enter its network namespace")
        socket.sethostname(f"worker-{index}")
        _do("mount", "--make-rprivate", "/")
        _do("mount", "--bind", f"{self._folder}/hosts", "/etc/hosts")
        _do("mount", "--bind", f"{self._folder}/resolv", "/etc/resolv.conf")
        return self._hosts[index]


Link = PlainLoopback | Namespaces


@contextlib.contextmanager
def opened(name: str, num_workers: int, rate: str) -> Iterator[Link]:
    """The loopback or the shaped link; Unavailable where it cannot be."""
    with tempfile.TemporaryDirectory(prefix="loco-bench-") as folder:
        made = loopback(Path(folder))
        with made if name == "loopback" else shaped(Path(folder), num_workers, rate) as link:
            yield link


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
