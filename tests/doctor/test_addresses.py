"""Which address is taken, compared with what gloo itself does."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lightning_loco.doctor.addresses import find_addresses, fits
from lightning_loco.doctor.facts import resolve
from lightning_loco.doctor.interfaces import Interface, interface_of, interfaces
from tests.doctor.gloo_itself import gloo_listens_at

LO = Interface("lo", "127.0.0.1")
LO6 = Interface("lo", "::1")
ETH0 = Interface("eth0", "10.0.0.5")
ETH0_6 = Interface("eth0", "fd00::5")
ETH1 = Interface("eth1", "10.1.0.5")
IB = Interface("ib0", "10.2.0.5")
DOCKER = Interface("docker0", "172.17.0.1")
HERE = [LO, DOCKER, ETH0, ETH1, LO6, ETH0_6]


def test_the_system_lists_loopback() -> None:
    own = interfaces()
    assert {one.address for one in own if one.is_loopback} >= {"127.0.0.1"}
    assert {one.name for one in own} <= {name for _, name in socket.if_nameindex()}


def test_the_interface_of_an_address(subtests: pytest.Subtests) -> None:
    names = {
        "10.0.0.5": "eth0",
        "::ffff:10.0.0.5": "eth0",
        "fd00::5": "eth0",
        "127.0.1.1": "lo",
        "10.9.9.9": "",
        "": "",
    }
    for address, name in names.items():
        with subtests.test(address=address):
            assert interface_of(address, HERE) == name


def test_the_rules_of_nccl(subtests: pytest.Subtests) -> None:
    for name, rule, expected in [
        ("eth0", "eth", True),
        ("eth0", "eth1,eth0", True),
        ("eth0", "=eth", False),
        ("eth0", "=eth0", True),
        ("eth0", "^eth", False),
        ("eth0", "^=eth", True),
        ("lo", "^docker,lo", False),
        ("docker0", "^docker,lo", False),
    ]:
        with subtests.test(name=name, rule=rule):
            assert fits(name, rule) is expected


def test_gloo_takes_the_first_address_of_the_name_that_is_its_own() -> None:
    found = find_addresses([LO, ETH0], ["198.51.100.7", "127.0.0.1"], "", "", False)
    assert (found.gloo, found.nccl, found.faults) == ([LO], [], [])


def test_gloo_takes_loopback_if_the_name_leads_nowhere() -> None:
    assert find_addresses([LO, ETH0], [], "", "", False).gloo == [LO]


def test_gloo_takes_the_interfaces_of_its_variable() -> None:
    found = find_addresses(HERE, ["10.0.0.5"], "eth1,eth0", "", False)
    assert (found.gloo, found.faults) == ([ETH1, ETH0], [])


def test_an_interface_that_is_not_there_is_a_fault() -> None:
    found = find_addresses(HERE, ["10.0.0.5"], "eth7", "eth7", False)
    assert (found.gloo, found.nccl) == ([], [])
    gloo, nccl = found.faults
    assert gloo.startswith("GLOO_SOCKET_IFNAME=eth7: there is no interface eth7 here that is up")
    assert gloo.endswith("set it to one of docker0, eth0, eth1")
    assert nccl.startswith("NCCL_SOCKET_IFNAME=eth7 fits no interface here")


def test_nccl_takes_the_first_that_fits(subtests: pytest.Subtests) -> None:
    for own, setting, expected in [
        (HERE, "", ETH0),
        ([LO, ETH0, IB], "", IB),
        ([LO, DOCKER], "", DOCKER),
        ([LO6, LO], "", LO),
        (HERE, "eth1", ETH1),
        (HERE, "^eth", LO),
    ]:
        with subtests.test(own=[one.name for one in own], setting=setting):
            assert find_addresses(own, [], "lo", setting, True).nccl == [expected]


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("setting", ["", "lo"])
def test_gloo_itself_listens_there(setting: str) -> None:
    listens_at = gloo_listens_at(GLOO_SOCKET_IFNAME=setting)
    found = find_addresses(interfaces(), resolve(socket.gethostname()), setting, "", False)
    assert {address for address, _ in listens_at} == {one.address for one in found.gloo}
