"""The doctor on machines in separate network namespaces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.networks import Network, address, ip, wired_together
from tests.harness.programs import Program
from tests.tools.doctor.gloo_itself import gloo_listens_at
from tests.tools.doctor.machines import COMMAND, LIMIT_S, Output

PORT = 29500

pytestmark = pytest.mark.process


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with wired_together(3, tmp_path) as wired:
        yield wired


def start(network: Network, rank: int, *arguments: str, **environ: str) -> Program:
    """Run the doctor on a machine."""
    arguments_of_machine = ["--master", f"{address(0)}:{PORT}", "--rank", str(rank)]
    arguments_of_machine += ["--world", str(len(network.spaces))]
    return network.run(rank, *COMMAND, *arguments_of_machine, *arguments, **environ)


def check_all(network: Network, **environ: str) -> list[Output]:
    """Run the doctor on all machines and return their output."""
    started = time.monotonic()
    programs = [start(network, rank, **environ) for rank in range(len(network.spaces))]
    return [Output(*program.finish(LIMIT_S), time.monotonic() - started) for program in programs]


def test_all_well(network: Network) -> None:
    for rank, one in enumerate(check_all(network)):
        assert one.status == 0, one.text
        here = address(rank)
        assert one.rows("interfaces") == [("ok", f"gloo at {here} (eth0); node-{rank} is {here}")]
        assert one.rows("connections")[0][1].startswith("all 6 are open; ")


def test_host_name_that_resolves_to_loopback(network: Network) -> None:
    network.hosts(2, "127.0.1.1")
    for one in check_all(network):
        assert one.status == 1
        ((check, text),) = one.faults()
        assert check == "connections"
        sources = "machine 0 (node-0), machine 1 (node-1)"
        assert text.startswith(f"{sources} cannot reach machine 2 (node-2) at 127.0.1.1:")
        assert "only that machine itself can reach this address, to which its host name" in text
        assert "et GLOO_SOCKET_IFNAME=eth0 on machine 2, by which it reaches machine 0" in text
        assert text.endswith(f"or write {address(2)} into its /etc/hosts")


def test_interface_variable_is_a_remedy(network: Network) -> None:
    network.hosts(2, "127.0.1.1")
    for one in check_all(network, GLOO_SOCKET_IFNAME="eth0"):
        assert one.status == 0, one.text


def test_interface_without_an_address(network: Network) -> None:
    ip("-n", network.spaces[1], "link", "add", "name", "br1", "type", "bridge")
    ip("-n", network.spaces[1], "link", "set", "br1", "up")
    programs = [start(network, rank, GLOO_SOCKET_IFNAME="eth0") for rank in (0, 2)]
    programs.append(start(network, 1, GLOO_SOCKET_IFNAME="br1"))
    for program in programs:
        status, text = program.finish(LIMIT_S)
        assert status == 1
        fault = "machine 1 (node-1): GLOO_SOCKET_IFNAME=br1: there is no interface br1 here"
        assert f"{fault} that is up and has an address; set it to one of eth0\n" in text
        assert "all 6 are open" in text  # the address from which it reaches machine 0


def test_ports_closed_by_a_firewall(network: Network) -> None:
    """Replies from free ports of machine 1 are dropped; its connection to machine 0 works."""
    network.drop(1, "ipproto", "tcp", "sport", "32768-60999", "to", address(2))
    for one in check_all(network):
        assert one.status == 1
        faults = [text for check, text in one.faults() if check == "connections"]
        assert any(
            text.startswith(f"machine 2 (node-2) cannot reach machine 1 (node-1) at {address(1)}:")
            for text in faults
        ), one.text
        assert not any("machine 0 (node-0)" in text for text in faults)


@pytest.mark.soak
def test_port_of_machine_0_is_closed_to_one_machine(network: Network) -> None:
    network.drop(0, "ipproto", "tcp", "sport", str(PORT), "to", address(2))
    first, second, third = check_all(network)
    for one in (first, second):
        assert one.status == 1
        ((_, text),) = one.faults()
        assert text.startswith("machine 2 has not joined")
    ((check, text),) = third.faults()
    assert check == "machines"
    assert f"machine 2 (node-2) cannot reach machine 0 at {address(0)}:{PORT}: no answer" in text
    assert f"Open TCP port {PORT} of machine 0" in text


@pytest.mark.soak
def test_slow_links_are_not_failures(network: Network) -> None:
    network.slow_down("1mbit")
    for one in check_all(network):
        assert one.status == 0, one.text
        assert one.seconds < 15


def test_the_bandwidth_of_slow_links(network: Network, tmp_path: Path) -> None:
    network.slow_down("20mbit")
    path = tmp_path / "machines.json"
    programs = [start(network, rank, "--json", str(path)) for rank in range(3)]
    for program in programs:
        status, text = program.finish(LIMIT_S)
        assert status == 0, text
    links = json.loads(path.read_text())["links"]
    measured = [link["mbit_per_s"] for link in links["workers"].values()]
    assert all(13 < one < 27 for one in measured), measured


def test_link_that_loses_large_packets(network: Network) -> None:
    """Like a tunnel with too large an MTU: packets above 600 bytes from machine 1 are lost."""
    network.narrow(1, 600)
    for one in check_all(network):
        assert one.status == 1
        ((check, first), *others) = one.faults()
        assert check == "connections"
        assert first.startswith("machine 1 (node-1) cannot reach machine 0 (node-0) at ")
        assert "opens and then breaks or stalls, as when large packets are lost" in first
        assert "Lower the MTU of eth0 on both" in first
        assert all(text.startswith("machine 1 (node-1) cannot") for _, text in others)


def test_name_server_that_does_not_answer(network: Network) -> None:
    """Machine 1 is the name server of machine 2, and drops its requests."""
    network.hosts(2, address(2))
    network.name_server(2, address(1))
    network.drop(1, "ipproto", "icmp")
    for one in check_all(network):
        assert one.status == 0, one.text
        assert one.seconds < 20
        ((status, text),) = one.rows("name server")
        assert status == "warning"
        assert text.startswith(f"machine 2 (node-2): no name for ::ffff:{address(0)} within half")


@pytest.mark.soak
def test_gloo_uses_ports_of_the_systems_range(network: Network) -> None:
    confine = 'echo "40000 40009" > /proc/sys/net/ipv4/ip_local_port_range && exec "$@"'
    inside = ("ip", "netns", "exec", network.spaces[0], "sh", "-c", confine, "sh")
    ((address_of_gloo, port),) = gloo_listens_at(*inside, GLOO_SOCKET_IFNAME="eth0")
    assert address_of_gloo == address(0)
    assert 40000 <= port <= 40009
