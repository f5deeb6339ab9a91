"""Which machine this is, from arguments and from the variables of launchers."""

from __future__ import annotations

import argparse

import pytest

from lightning_loco.doctor.rendezvous import Job
from lightning_loco.doctor.run import add_arguments, find_job, is_first

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


def found(words: str, **environ: str) -> Job | None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return find_job(parser.parse_args(words.split()), environ)


def job(words: str, **environ: str) -> Job:
    there = found(words, **environ)
    assert there is not None
    return there


def where(found: Job) -> tuple[int, int, str, int]:
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
            assert where(job(f"--master {master} --rank 1 --world 3")) == (1, 3, host, port)


def test_with_nothing_said_a_machine_is_alone() -> None:
    assert found("") is None
    assert found("--timeout 5") is None


def test_variables_as_torchrun_sets_them_by_hand() -> None:
    environ = {"MASTER_ADDR": "a", "MASTER_PORT": "5", "RANK": "1", "WORLD_SIZE": "2"}
    assert where(job("", **environ)) == (1, 2, "a", 5)
    assert where(job("--rank 0 --master b:6", **environ)) == (0, 2, "b", 6)


def test_under_torchrun_each_machine_is_examined_once() -> None:
    assert where(job("", **TORCHRUN)) == (1, 2, "node-a", 29400)
    assert is_first(TORCHRUN)
    assert not is_first({**TORCHRUN, "LOCAL_RANK": "3"})
    assert is_first({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert not is_first({**SLURM, "SLURM_LOCALID": "1"})


def test_the_port_after_that_of_torchruns_own_store() -> None:
    assert job("", **TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="True").port == 29401
    assert job("", **TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="False").port == 29400


def test_under_slurm_where_lightning_would_meet() -> None:
    assert where(job("", **SLURM)) == (3, 4, "node07", 18456)
    assert job("", **SLURM, MASTER_ADDR="x", MASTER_PORT="7").host == "x"


def test_lightning_finds_the_same_place_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.environments import SLURMEnvironment

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**SLURM, "SLURM_NODELIST": SLURM["SLURM_JOB_NODELIST"]}.items():
        monkeypatch.setenv(name, value)
    environment = SLURMEnvironment()
    found = job("", **SLURM)
    assert (found.host, found.port) == (environment.main_address, environment.main_port)


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
            job(words)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="RANK must be a number, got 'one'"):
        job("", RANK="one", WORLD_SIZE="2")
