"""Whole runs of the doctor: processes, sockets, strangers, and what is said at the end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from lightning_loco.doctor.rendezvous import Refusal, Report
from tests.conftest import ROOT
from tests.doctor.fake_machine import FakeMachine, facts_of
from tests.doctor.machines import COMMAND, LIMIT_S, Machines, meet
from tests.programs import environment

pytestmark = pytest.mark.process

BOUND_S = 10.0
START_S = 5.0
"""What Python may take to start here, when other tests run beside these."""


def test_all_well() -> None:
    said = meet(3)
    for rank, one in said.items():
        assert one.status == 0, one.text
        assert one.seconds < BOUND_S + START_S
        assert f"machine {rank} of 3" in one.text
        assert one.faults() == []
        assert one.rows("machines") == [("ok", "3 of 3 have come")]
        ((status, text),) = one.rows("connections")
        assert status == "ok"
        assert text.startswith("all 6 are open; the longest round trip is ")
        assert one.rows("versions")[0][0] == "ok"
        for source in range(3):
            (row,) = [line for line in one.text.splitlines() if line.startswith(f"from {source} ")]
            cells = row.split()[2:]
            assert cells.pop(source) == "-"
            assert all(float(cell) > 0 for cell in cells)
        assert "all well" in one.text


def test_one_machine_alone() -> None:
    (one,) = meet(1).values()
    assert one.status == 0, one.text


def test_whoever_is_missing_is_named_in_time() -> None:
    with Machines(3) as machines:
        machines.start(0)
        machines.start(2)
        said = machines.finish()
    for one in said.values():
        assert one.status == 1
        assert one.seconds < BOUND_S + START_S
        ((check, text),) = one.faults()
        assert check == "machines"
        assert text.startswith("machine 1 has not come: start lightning-loco doctor there")
        assert one.rows("connections")[0][1].startswith("all 2 are open; ")


def test_machine_0_is_missing() -> None:
    with Machines(2, timeout_s=4) as machines:
        machines.start(1)
        one = machines.finish()[1]
    assert one.status == 1
    assert one.seconds < 4 + START_S
    ((check, text),) = one.faults()
    assert check == "machines"
    assert f"cannot reach machine 0 at 127.0.0.1:{machines.port}: the connection is refused" in text
    assert "Start lightning-loco doctor on machine 0 within the same seconds" in text


def test_machine_0_may_come_later() -> None:
    with Machines(2) as machines:
        machines.start(1)
        time.sleep(1.5)
        machines.start(0)
        said = machines.finish()
    assert [one.status for one in said.values()] == [0, 0], said


def test_other_versions_are_named(tmp_path: Path) -> None:
    dist_info = tmp_path / "torch-1.13.1.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n")
    with Machines(3) as machines:
        machines.start(0)
        machines.start(1, before=tmp_path)
        machines.start(2)
        said = machines.finish()
    for one in said.values():
        assert one.status == 1
        ((check, text),) = one.faults()
        assert check == "versions"
        assert text.startswith("torch differs: ")
        assert "on machines 0, 2; 1.13.1 on machine 1" in text


def test_few_open_files(tmp_path: Path) -> None:
    limited = "import resource\n_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
    limited += "resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))\n"
    (tmp_path / "sitecustomize.py").write_text(limited)
    with Machines(2) as machines:
        machines.start(0, before=tmp_path)
        machines.start(1)
        said = machines.finish()
    for one in said.values():
        assert one.status == 0, one.text
        assert "only 200 files open" in one.rows("open files")[0][1]


def test_an_interface_that_is_not_there() -> None:
    with Machines(2) as machines:
        machines.start(0)
        machines.start(1, GLOO_SOCKET_IFNAME="nowhere0")
        said = machines.finish()
    for one in said.values():
        assert one.status == 1
        assert any("GLOO_SOCKET_IFNAME=nowhere0: there is no" in text for _, text in one.faults())


def test_a_port_that_is_taken() -> None:
    with Machines(2, timeout_s=6) as machines, socket.create_server(("", machines.port)):
        machines.start(0)
        machines.start(1)
        said = machines.finish()
    assert [one.status for one in said.values()] == [1, 1]
    assert f"port {machines.port} of machine 0" in said[0].faults()[0][1]
    assert said[0].seconds < START_S
    assert "or what listens there is another program" in said[1].faults()[0][1]
    assert said[1].seconds < 6 + START_S


def test_all_say_which_machine_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        _, port = closed.getsockname()
    host = socket.gethostname()
    with Machines(3) as machines:
        machine = FakeMachine(machines.port, facts_of(1, 3, address="127.0.0.1", port=port))
        machines.start(0)
        machines.start(2)
        said = machines.finish()
    machine.join()
    assert isinstance(machine.answer, Report)
    for one in said.values():
        assert one.status == 1
        ((_, text),) = [fault for fault in one.faults() if fault[0] == "connections"]
        assert text.startswith(f"machine 0 ({host}), machine 2 ({host}) cannot reach machine 1 (")
        assert text in [finding.text for finding in machine.answer.findings]
        assert one.text.count(" refused ") == 2  # in the matrix


class TestStrangers:
    def test_garbage_at_the_ports_changes_nothing(self) -> None:
        garbage = [b"", b"\x80\x04K\x01.", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * 10**6]
        with Machines(2) as machines, ExitStack() as stack:
            machines.start(0)
            for data in garbage:
                connection = stack.enter_context(connected(machines.port))
                with suppress(OSError):  # hung up on, which is as good as ignored
                    connection.sendall(data)
            machines.start(1)
            said = machines.finish()
        assert [one.status for one in said.values()] == [0, 0], said

    def test_who_does_not_belong_here_is_told_why(self) -> None:
        wrong = [
            ("has the number of another machine (node-1): give each", facts_of(1, 3)),
            ("has a number that does not exist: give --rank 0 to 2", facts_of(5, 3)),
            ("machine 5 (nnnnnnn", facts_of(5, 3, name=500 * "n")),
            ("expects 4 machines and machine 0 3: give all", facts_of(2, 4)),
        ]
        with Machines(3, timeout_s=30) as machines:
            machines.start(0)
            right = FakeMachine(machines.port, facts_of(1, 3))
            assert right.has_come.wait(LIMIT_S)
            told = []
            for reason, facts in wrong:
                machine = FakeMachine(machines.port, facts)
                machine.join()
                assert isinstance(machine.answer, Refusal)
                assert reason in machine.answer.reason
                told.append(machine.answer.reason)
            machines.start(2)
            said = machines.finish()
        right.join()
        for one in said.values():
            assert one.status == 1
            assert [text for check, text in one.faults() if check == "machines"] == told

    @pytest.mark.soak
    def test_who_comes_too_late_is_told_so(self) -> None:
        with Machines(3, timeout_s=4) as machines:
            machines.start(0)
            first = FakeMachine(machines.port, facts_of(1, 3), hangs=True)
            assert first.has_begun.wait(LIMIT_S)
            late = FakeMachine(machines.port, facts_of(2, 3))
            late.join()
            said = machines.finish()
        first.join()
        assert isinstance(late.answer, Refusal)
        assert "has come after the others had begun" in late.answer.reason
        assert any(text == late.answer.reason for _, text in said[0].faults())

    @pytest.mark.parametrize("fate", ["leaves", pytest.param("hangs", marks=pytest.mark.soak)])
    def test_a_machine_that_does_not_stay_is_named(self, fate: str) -> None:
        with Machines(3) as machines:
            machines.start(0)
            machines.start(2)
            machine = FakeMachine(
                machines.port, facts_of(1, 3), leaves=fate == "leaves", hangs=fate == "hangs"
            )
            said = machines.finish()
        machine.join()
        for one in said.values():
            assert one.status == 1
            assert one.seconds < BOUND_S + START_S
            assert "machine 1 (node-1) came, and has sent no results" in one.faults()[0][1]


class TestCommand:
    def test_it_does_not_import_torch(self) -> None:
        script = "import sys, command; status = command.main(); "
        script += "heavy = {'torch', 'lightning', 'numpy'} & set(sys.modules); "
        script += "sys.exit(status or sorted(heavy) or None)"
        with Machines(1) as machines:
            master = f"127.0.0.1:{machines.port}"
            words = ["doctor", "--master", master, "--rank", "0", "--world", "1"]
            done = run(sys.executable, "-c", script, *words)
        assert done.returncode == 0, done.stdout

    def test_without_arguments_this_machine_is_checked(self) -> None:
        done = run(*COMMAND)
        assert done.returncode == 0, done.stdout
        assert done.stdout.startswith(f"lightning-loco doctor: {socket.gethostname()} alone\n")
        for check in ("interfaces", "versions", "open files", "hardware", "environment", "disk"):
            assert f"\n{check:<14}ok" in done.stdout
        assert done.stdout.rstrip().endswith("all well")

    def test_what_is_missing_is_said(self) -> None:
        done = run(*COMMAND, "--rank", "0")
        assert done.returncode == 2
        assert "missing: --master --world, which no launcher has set either" in done.stdout

    def test_help(self) -> None:
        done = run(*COMMAND, "--help")
        assert done.returncode == 0
        assert "--master HOST:PORT" in done.stdout

    def test_other_ranks_of_a_machine_have_nothing_to_do(self) -> None:
        environ = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        done = run(*COMMAND, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", **environ)
        assert (done.returncode, done.stdout) == (0, "")

    @pytest.mark.soak
    def test_under_torchrun(self) -> None:
        with Machines(1) as machines:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
            torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{machines.port}"]
            done = run(*torchrun, str(ROOT / "command.py"), "doctor")
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("all well") == 1


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


def connected(port: int) -> socket.socket:
    """A connection to a port of this machine, as soon as somebody listens there."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 30)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
