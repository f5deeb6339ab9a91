"""The number of this machine, from arguments or from launchers' variables."""

from __future__ import annotations

import argparse

import pytest

from lightning_loco.tools.doctor.rendezvous import RendezvousSettings
from lightning_loco.tools.doctor.run import add_arguments, find_settings, is_first

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


def find(arguments: str, **environ: str) -> RendezvousSettings | None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return find_settings(parser.parse_args(arguments.split()), environ)


def found(arguments: str, **environ: str) -> RendezvousSettings:
    settings = find(arguments, **environ)
    assert settings is not None
    return settings


def values(settings: RendezvousSettings) -> tuple[int, int, str, int]:
    return settings.rank, settings.world, settings.host, settings.port


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
            assert values(found(f"--master {master} --rank 1 --world 3")) == (1, 3, host, port)


def test_machine_is_alone_without_arguments_and_variables() -> None:
    assert find("") is None
    assert find("--timeout 5") is None


def test_variables_of_torchrun_can_be_set_by_hand() -> None:
    environ = {"MASTER_ADDR": "a", "MASTER_PORT": "5", "RANK": "1", "WORLD_SIZE": "2"}
    assert values(found("", **environ)) == (1, 2, "a", 5)
    assert values(found("--rank 0 --master b:6", **environ)) == (0, 2, "b", 6)


def test_only_the_first_process_of_a_machine_checks_it() -> None:
    assert values(found("", **TORCHRUN)) == (1, 2, "node-a", 29400)
    assert is_first(TORCHRUN)
    assert not is_first({**TORCHRUN, "LOCAL_RANK": "3"})
    assert is_first({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert not is_first({**SLURM, "SLURM_LOCALID": "1"})


def test_port_of_torchruns_own_store_is_not_used() -> None:
    assert found("", **TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="True").port == 29401
    assert found("", **TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="False").port == 29400


def test_slurm_variables() -> None:
    assert values(found("", **SLURM)) == (3, 4, "node07", 18456)
    assert found("", **SLURM, MASTER_ADDR="x", MASTER_PORT="7").host == "x"


def test_lightning_uses_the_same_address_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.environments import SLURMEnvironment

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**SLURM, "SLURM_NODELIST": SLURM["SLURM_JOB_NODELIST"]}.items():
        monkeypatch.setenv(name, value)
    environment = SLURMEnvironment()
    settings = found("", **SLURM)
    assert (settings.host, settings.port) == (environment.main_address, environment.main_port)


def test_errors_name_the_invalid_argument(subtests: pytest.Subtests) -> None:
    messages = {
        "--rank 0": "missing: --master --world",
        "--master a --rank 0": "missing: --world,",
        "--master a --rank 2 --world 2": "--rank must be 0 to 1 for --world 2, got 2",
        "--master a --rank 0 --world 0": "--world must be 1 to 256",
        "--master a:0 --rank 0 --world 1": "1 to 65535, got 0",
        "--master a:b --rank 0 --world 1": "--master must be HOST:PORT, got 'a:b'",
        "--master a --rank 0 --world 1 --timeout 1": "2 to 3600 seconds, got 1",
    }
    for arguments, message in messages.items():
        with subtests.test(arguments), pytest.raises(ValueError, match=message):
            found(arguments)


def test_error_names_a_variable_that_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="RANK must be a number, got 'one'"):
        found("", RANK="one", WORLD_SIZE="2")
