"""The doctor on machines with networks of their own: Linux's network namespaces, wired together.

Each has a host name and an /etc/hosts of its own, so that the well-known traps can be laid.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.doctor.gloo_itself import gloo_listens_at
from tests.doctor.machines import COMMAND, LIMIT_S, Said
from tests.programs import Program

PORT = 29500

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's network namespaces"),
]


def ip(*words: str) -> None:
    """Run ``ip``; raises CalledProcessError with what it said."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def optional(*command: str) -> None:
    """Do something to a network that not every kernel can."""
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]} here")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel cannot do this: {error.stderr.decode().strip()}")


class Network:
    """Machines node-0, node-1, ... with the addresses 10.77.0.1, 10.77.0.2, ... at a switch.

    Args:
        world: How many.
        folder: For their files.

    Attributes:
        spaces: Names of their namespaces.
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
        """Write a machine's /etc/hosts: where its own name leads, and the names of others."""
        lines = ["127.0.0.1 localhost", f"{own} node-{rank}"]
        lines += [f"::ffff:{address(other)} node-{other}" for other in others]
        (self._folder / f"hosts-{rank}").write_text("\n".join(lines) + "\n")

    def name_server(self, rank: int, at: str) -> None:
        """Write a machine's /etc/resolv.conf."""
        (self._folder / f"resolv-{rank}").write_text(f"nameserver {at}\n")

    def drop(self, rank: int, *selector: str) -> None:
        """Have a machine drop what it would send, without a word to anybody."""
        rule = ("rule", "add", "pref", "1", *selector, "blackhole")
        optional("ip", "-n", self.spaces[rank], *rule)

    def slow_down(self, rate: str) -> None:
        """Let all machines send at a rate."""
        shape = ["root", "tbf", "rate", rate, "burst", "32k", "latency", "500ms"]
        for space in self.spaces:
            optional("tc", "-n", space, "qdisc", "add", "dev", "eth0", *shape)

    def narrow(self, rank: int, mtu: int) -> None:
        """Lose what a machine sends in packets above a size, which it does not know of."""
        optional("ip", "-n", self.spaces[rank], "link", "set", "eth0", "gso_max_segs", "1")
        ip("-n", self._switch, "link", "set", f"port{rank}", "mtu", str(mtu))

    def start(self, rank: int, *arguments: str, **environ: str) -> Program:
        """Run the doctor on a machine."""
        mounts = [
            f'mount --bind "{self._folder}/hosts-{rank}" /etc/hosts',
            f'mount --bind "{self._folder}/resolv-{rank}" /etc/resolv.conf',
        ]
        inside = " && ".join([f"hostname node-{rank}", *mounts, 'exec "$@"'])
        words = ["ip", "netns", "exec", self.spaces[rank], "unshare", "--uts", "--mount"]
        words += ["sh", "-c", inside, "sh", *COMMAND, "--master", f"{address(0)}:{PORT}"]
        words += ["--rank", str(rank), "--world", str(len(self.spaces)), *arguments]
        return self._stack.enter_context(Program(words, ROOT, **environ))

    def examine(self, **environ: str) -> list[Said]:
        """What the doctor says on all machines."""
        began = time.monotonic()
        programs = [self.start(rank, **environ) for rank in range(len(self.spaces))]
        return [Said(*program.finish(LIMIT_S), time.monotonic() - began) for program in programs]

    def close(self) -> None:
        """Take everything down."""
        self._stack.close()


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    try:
        wired = Network(3, tmp_path)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        pytest.skip(f"no network namespaces here: {error} {said.decode().strip()}")
    try:
        yield wired
    finally:
        wired.close()


def test_all_well(network: Network) -> None:
    for rank, one in enumerate(network.examine()):
        assert one.status == 0, one.text
        assert one.rows("host names") == [("ok", f"node-{rank} is {address(rank)}")]
        assert one.rows("interfaces") == [("ok", f"gloo at {address(rank)} (eth0)")]
        assert one.rows("connections") == [("ok", "all 6 are open")]


def test_a_host_name_that_leads_to_loopback(network: Network) -> None:
    network.hosts(2, "127.0.1.1")
    for one in network.examine():
        assert one.status == 1
        ((check, text),) = one.faults()
        assert check == "host names"
        assert text.startswith(
            "machine 2 (node-2): its host name leads to 127.0.1.1, so that gloo listens at "
        )
        assert f"set GLOO_SOCKET_IFNAME=eth0 there, or write {address(2)} into its" in text


def test_the_mend_for_it(network: Network) -> None:
    network.hosts(2, "127.0.1.1")
    for one in network.examine(GLOO_SOCKET_IFNAME="eth0"):
        assert one.status == 0, one.text


def test_ports_that_a_firewall_closes(network: Network) -> None:
    """Answers of machine 1's free ports are dropped, those to machine 0's port are not."""
    network.drop(1, "ipproto", "tcp", "sport", "32768-60999", "to", address(2))
    for one in network.examine():
        assert one.status == 1
        faults = [text for check, text in one.faults() if check == "connections"]
        assert any(
            text.startswith(f"machine 2 (node-2) cannot reach machine 1 (node-1) at {address(1)}:")
            for text in faults
        ), one.text
        assert not any("machine 0 (node-0)" in text for text in faults)


def test_the_masters_port_is_closed_to_one(network: Network) -> None:
    network.drop(0, "ipproto", "tcp", "sport", str(PORT), "to", address(2))
    first, second, third = network.examine()
    for one in (first, second):
        assert one.status == 1
        ((_, text),) = one.faults()
        assert text.startswith("machine 2 has not come")
    ((check, text),) = third.faults()
    assert check == "master port"
    assert f"machine 2 (node-2) cannot reach machine 0 at {address(0)}:{PORT}: no answer" in text
    assert f"Open TCP port {PORT} of machine 0" in text


@pytest.mark.long
def test_slow_links_are_measured_and_not_taken_for_broken_ones(network: Network) -> None:
    network.slow_down("1mbit")
    for one in network.examine():
        assert one.status == 0, one.text
        assert one.seconds < 15
        rates = [line.split()[-2] for line in one.text.splitlines() if " -> " in line]
        assert rates
        assert all(0.02 < float(rate) < 0.5 for rate in rates)


def test_a_link_that_loses_large_packets(network: Network) -> None:
    """As a tunnel does whose MTU is set too high: what machine 1 sends is cut off at 600 bytes."""
    network.narrow(1, 600)
    for one in network.examine():
        assert one.status == 1
        ((check, first), *others) = one.faults()
        assert check == "connections"
        assert first.startswith("machine 1 (node-1) cannot reach machine 0 (node-0) at ")
        assert "opens and then breaks or stalls, as when large packets are lost" in first
        assert "Lower the MTU of eth0 on both" in first
        assert all(text.startswith("machine 1 (node-1) cannot") for _, text in others)


def test_a_name_server_that_does_not_answer(network: Network) -> None:
    """Machine 2 asks machine 1, where nobody listens and nothing tells it so."""
    network.hosts(2, address(2))
    network.name_server(2, address(1))
    network.drop(1, "ipproto", "icmp")
    for one in network.examine():
        assert one.status == 0, one.text
        assert one.seconds < 20
        ((status, text),) = one.rows("name server")
        assert status == "warning"
        assert text.startswith(f"machine 2 (node-2): no name for ::ffff:{address(0)} within half")


def test_doors_of_gloo_and_of_nccl(network: Network) -> None:
    """NCCL's rules lead to the network where the host name leads to loopback."""
    network.hosts(1, "127.0.1.1")
    for one in network.examine(NCCL_SOCKET_IFNAME="^lo"):
        ((check, text),) = one.faults()
        assert (check, text.startswith("machine 1 (node-1)")) == ("host names", True)
        ways = [line for line in one.text.splitlines() if " -> " in line]
        assert len(ways) == 6


@pytest.mark.long
def test_gloo_takes_ports_of_the_systems_range(network: Network) -> None:
    confine = 'echo "40000 40009" > /proc/sys/net/ipv4/ip_local_port_range && exec "$@"'
    inside = ("ip", "netns", "exec", network.spaces[0], "sh", "-c", confine, "sh")
    ((address_of_gloo, port),) = gloo_listens_at(*inside, GLOO_SOCKET_IFNAME="eth0")
    assert address_of_gloo == address(0)
    assert 40000 <= port <= 40009
