"""Which machine this is, from arguments and from the variables of launchers."""

from __future__ import annotations

import argparse
import socket

import pytest

from lightning_loco.doctor.place import Place, add_arguments, find_place

TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "4",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_NODEID": "3",
    "SLURM_NNODES": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "node[07-09,12],other3",
}


def place(words: str, **environ: str) -> Place:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return find_place(parser.parse_args(words.split()), environ)


def where(found: Place) -> tuple[int, int, str, int]:
    return found.rank, found.world, found.host, found.port


def test_arguments(subtests: pytest.Subtests) -> None:
    masters = {
        "node-a:1234": ("node-a", 1234),
        "node-a": ("node-a", 29500),
        "10.0.0.1:80": ("10.0.0.1", 80),
        "[fe80::1]:80": ("fe80::1", 80),
        "[fe80::1]": ("fe80::1", 29500),
        "fe80::1": ("fe80::1", 29500),
    }
    for master, (host, port) in masters.items():
        with subtests.test(master=master):
            assert where(place(f"--master {master} --rank 1 --world 3")) == (1, 3, host, port)


def test_with_nothing_said_a_machine_meets_itself() -> None:
    found = place("")
    assert (found.rank, found.world, found.host, found.is_first) == (0, 1, "127.0.0.1", True)
    with socket.create_server((found.host, found.port)):
        assert place("").port != found.port


def test_variables_as_torchrun_sets_them_by_hand() -> None:
    environ = {"MASTER_ADDR": "a", "MASTER_PORT": "5", "RANK": "1", "WORLD_SIZE": "2"}
    assert where(place("", **environ)) == (1, 2, "a", 5)
    assert where(place("--rank 0 --master b:6", **environ)) == (0, 2, "b", 6)


def test_under_torchrun_each_machine_is_examined_once() -> None:
    found = place("", **TORCHRUN)
    assert (*where(found), found.is_first) == (1, 2, "node-a", 29400, True)
    assert not place("", **{**TORCHRUN, "LOCAL_RANK": "3"}).is_first


def test_the_port_after_that_of_torchruns_own_store() -> None:
    assert place("", **TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="True").port == 29401
    assert place("", **TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="False").port == 29400


def test_under_slurm_where_lightning_would_meet() -> None:
    found = place("", **SLURM)
    assert (*where(found), found.is_first) == (3, 4, "node07", 18456, True)
    assert not place("", **{**SLURM, "SLURM_LOCALID": "1"}).is_first
    assert place("", **SLURM, MASTER_ADDR="x", MASTER_PORT="7").host == "x"


def test_lightning_finds_the_same_place_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.environments import SLURMEnvironment

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**SLURM, "SLURM_NODELIST": SLURM["SLURM_JOB_NODELIST"]}.items():
        monkeypatch.setenv(name, value)
    environment = SLURMEnvironment()
    found = place("", **SLURM)
    assert (found.host, found.port) == (environment.main_address, environment.main_port)


def test_interfaces() -> None:
    words = "--master a --rank 0 --world 1"
    both = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^lo"}
    assert place(words).gloo_interface == ""
    found = place(words, **both)
    assert (found.gloo_interface, found.nccl_interface) == ("eth0", "^lo")
    found = place(f"{words} --interface wg0", **both)
    assert (found.gloo_interface, found.nccl_interface) == ("wg0", "wg0")


def test_what_cannot_be(subtests: pytest.Subtests) -> None:
    messages = {
        "--rank 0": "missing: --master --world",
        "--master a --rank 0": "missing: --world,",
        "--master a --rank 2 --world 2": "--rank must be 0 to 1 for --world 2, got 2",
        "--master a --rank 0 --world 0": "--world must be 1 to 256",
        "--master a:0 --rank 0 --world 1": "1 to 65535, got 0",
        "--master a:b --rank 0 --world 1": "--master must be HOST:PORT, got 'a:b'",
        "--master a --rank 0 --world 1 --timeout 1": "2 to 3600 seconds, got 1",
    }
    for words, message in messages.items():
        with subtests.test(words), pytest.raises(ValueError, match=message):
            place(words)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="RANK must be a number, got 'one'"):
        place("", RANK="one", WORLD_SIZE="2")
