"""Facts about this machine, and gloo's address compared with gloo itself."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from lightning_loco.tools.doctor.facts import (
    Facts,
    address_of_gloo,
    addresses_of_interfaces,
    faults_of_variables,
    gather_facts,
    name_of_interface,
)
from tests.tools.doctor.gloo_itself import gloo_listens_at

INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "docker0": "172.17.0.1", "wg0": "fd00::5"}


def gathered(**environ: str) -> Facts:
    return asyncio.run(gather_facts(1, 2, environ))


def test_facts_of_this_machine() -> None:
    facts = gathered(NCCL_IB_DISABLE="1", OMP_NUM_THREADS="4", HOME="/root")
    assert (facts.rank, facts.world, facts.name) == (1, 2, socket.gethostname())
    assert facts.hardware.startswith("cores: ")
    assert facts.versions["lightning"].startswith("2.")
    assert facts.environment == "NCCL_IB_DISABLE=1, OMP_NUM_THREADS=4"
    assert facts.faults == ()
    assert facts.free_bytes > 0


def test_interfaces_of_this_machine() -> None:
    found = addresses_of_interfaces()
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    assert found.get("lo", "127.0.0.1") == "127.0.0.1"


def test_interface_of_an_address(subtests: pytest.Subtests) -> None:
    names = {"10.0.0.5": "eth0", "fd00::5": "wg0", "127.0.1.1": "lo", "10.9.9.9": "", "": ""}
    for address, name in names.items():
        with subtests.test(address=address):
            assert name_of_interface(address, INTERFACES) == name
    assert name_of_interface("10.0.0.5", {**INTERFACES, "eth1": "10.0.0.5"}) == ""


def test_variables_that_match_no_interface(subtests: pytest.Subtests) -> None:
    for nccl, fits in {
        "eth": True,
        "eth1,eth0": True,
        "=eth": False,
        "=eth0": True,
        "^lo": True,
        "^docker,lo,eth,wg": False,
        "^=eth0": True,
        "^=lo,eth0,docker0,wg0": False,
        "eth7": False,
    }.items():
        with subtests.test(nccl):
            faults = faults_of_variables({"NCCL_SOCKET_IFNAME": nccl}, list(INTERFACES))
            text = f"NCCL_SOCKET_IFNAME={nccl} matches no interface here; set it to one of "
            assert faults == (() if fits else (f"{text}eth0, docker0, wg0",))
    (fault,) = faults_of_variables({"GLOO_SOCKET_IFNAME": "eth0,eth7"}, list(INTERFACES))
    text = "GLOO_SOCKET_IFNAME=eth0,eth7: there is no interface eth7 here that is up and has an "
    assert fault == f"{text}address; set it to one of eth0, docker0, wg0"


def test_gloo_uses_the_first_local_address_of_the_host_name() -> None:
    assert address_of_gloo(["198.51.100.7", "127.0.1.1", "127.0.0.1"]) == "127.0.1.1"
    assert address_of_gloo([]) == "127.0.0.1"


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("setting", ["", "lo"])
def test_gloo_listens_on_the_address_of_the_facts(setting: str) -> None:
    listens_at = gloo_listens_at(GLOO_SOCKET_IFNAME=setting)
    facts = gathered(GLOO_SOCKET_IFNAME=setting)
    assert {address for address, _ in listens_at} == {facts.address}
