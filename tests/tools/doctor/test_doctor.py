"""Whole runs of the doctor: output, exit status, and clients from outside the job."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from lightning_loco.costs import as_links
from lightning_loco.tools.doctor.rendezvous import Findings, Refusal
from tests.harness.programs import environment
from tests.harness.sources import ROOT
from tests.tools.doctor.fake_machine import FakeMachine, facts_of
from tests.tools.doctor.machines import COMMAND, LIMIT_S, Machines, check_together

pytestmark = pytest.mark.process

BOUND_S = 10.0
START_S = 5.0
"""Seconds that Python may need to start while other tests are running."""


def test_all_well() -> None:
    outputs = check_together(3)
    for rank, one in outputs.items():
        assert one.status == 0, one.text
        assert one.seconds < BOUND_S + START_S
        assert f"machine {rank} of 3" in one.text
        assert one.faults() == []
        assert one.rows("machines") == [("ok", "3 of 3 have joined")]
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


def test_bandwidth_is_measured_and_written(tmp_path: Path) -> None:
    """Only machine 0 writes the file. A run can use the links in it."""
    path = tmp_path / "machines.json"
    with Machines(3) as machines:
        machines.start(0, "--json", str(path))
        machines.start(1)
        machines.start(2, "--json", str(tmp_path / "ignored.json"))
        outputs = machines.finish()
    for one in outputs.values():
        assert one.status == 0, one.text
        ((status, text),) = one.rows("bandwidth")
        assert status == "ok"
        assert re.match(r"at least [\d,]+ Mbit/s to the next machine, from machine \d$", text)
    assert [file.name for file in tmp_path.iterdir()] == ["machines.json"]
    content = json.loads(path.read_text())
    assert [one["rank"] for one in content["machines"]] == [0, 1, 2]
    assert {one["status"] for one in content["findings"]} == {"ok"}
    links = as_links(content["links"])
    assert links is not None
    for worker in range(3):
        assert links.of_worker(worker).mbit_per_s > 10
        assert links.of_worker(worker).latency_s > 0


def test_one_machine_alone() -> None:
    (one,) = check_together(1).values()
    assert one.status == 0, one.text


def test_missing_machine_is_named_in_time() -> None:
    with Machines(3) as machines:
        machines.start(0)
        machines.start(2)
        outputs = machines.finish()
    for one in outputs.values():
        assert one.status == 1
        assert one.seconds < BOUND_S + START_S
        ((check, text),) = one.faults()
        assert check == "machines"
        assert text.startswith("machine 1 has not joined: start lightning-loco doctor there")
        assert one.rows("connections")[0][1].startswith("all 2 are open; ")


def test_missing_machine_0() -> None:
    with Machines(2, timeout_s=4) as machines:
        machines.start(1)
        one = machines.finish()[1]
    assert one.status == 1
    assert one.seconds < 4 + START_S
    ((check, text),) = one.faults()
    assert check == "machines"
    assert f"cannot reach machine 0 at 127.0.0.1:{machines.port}: the connection is refused" in text
    assert "Start lightning-loco doctor on machine 0 at the same time" in text


def test_machine_0_may_start_later() -> None:
    with Machines(2) as machines:
        machines.start(1)
        time.sleep(1.5)
        machines.start(0)
        outputs = machines.finish()
    assert [one.status for one in outputs.values()] == [0, 0], outputs


def test_different_versions_are_named(tmp_path: Path) -> None:
    dist_info = tmp_path / "torch-1.13.1.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n")
    with Machines(3) as machines:
        machines.start(0)
        machines.start(1, before=tmp_path)
        machines.start(2)
        outputs = machines.finish()
    for one in outputs.values():
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
        outputs = machines.finish()
    for one in outputs.values():
        assert one.status == 0, one.text
        assert "only 200 files open" in one.rows("open files")[0][1]


def test_missing_interface() -> None:
    with Machines(2) as machines:
        machines.start(0)
        machines.start(1, GLOO_SOCKET_IFNAME="nowhere0")
        outputs = machines.finish()
    for one in outputs.values():
        assert one.status == 1
        assert any("GLOO_SOCKET_IFNAME=nowhere0: there is no" in text for _, text in one.faults())


def test_taken_port() -> None:
    with Machines(2, timeout_s=6) as machines, socket.create_server(("", machines.port)):
        machines.start(0)
        machines.start(1)
        outputs = machines.finish()
    assert [one.status for one in outputs.values()] == [1, 1]
    assert f"port {machines.port} of machine 0" in outputs[0].faults()[0][1]
    assert outputs[0].seconds < START_S
    assert "or what listens there is another program" in outputs[1].faults()[0][1]
    assert outputs[1].seconds < 6 + START_S


def test_all_machines_name_the_unreachable_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        _, port = closed.getsockname()
    host = socket.gethostname()
    with Machines(3) as machines:
        machine = FakeMachine(machines.port, facts_of(1, 3, address="127.0.0.1", port=port))
        machines.start(0)
        machines.start(2)
        outputs = machines.finish()
    machine.join()
    assert isinstance(machine.reply, Findings)
    for one in outputs.values():
        assert one.status == 1
        ((_, text),) = [fault for fault in one.faults() if fault[0] == "connections"]
        assert text.startswith(f"machine 0 ({host}), machine 2 ({host}) cannot reach machine 1 (")
        assert text in [finding.text for finding in machine.reply.findings]
        assert one.text.count(" refused ") == 2  # in the matrix


class TestUnexpectedClients:
    def test_garbage_changes_nothing(self) -> None:
        garbage = [b"", b"\x80\x04K\x01.", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * 10**6]
        with Machines(2) as machines, ExitStack() as stack:
            machines.start(0)
            for data in garbage:
                connection = stack.enter_context(connected(machines.port))
                with suppress(OSError):  # the connection may be closed already
                    connection.sendall(data)
            machines.start(1)
            outputs = machines.finish()
        assert [one.status for one in outputs.values()] == [0, 0], outputs

    def test_refused_machines_receive_the_reason(self) -> None:
        wrong = [
            ("has the rank of another machine (node-1): pass another", facts_of(1, 3)),
            ("has a rank that does not exist: pass --rank 0 to 2", facts_of(5, 3)),
            ("machine 5 (nnnnnnn", facts_of(5, 3, name=500 * "n")),
            ("has --world 4, machine 0 has 3: pass the same on all", facts_of(2, 4)),
        ]
        with Machines(3, timeout_s=30) as machines:
            machines.start(0)
            valid = FakeMachine(machines.port, facts_of(1, 3))
            assert valid.has_joined.wait(LIMIT_S)
            reasons = []
            for reason, facts in wrong:
                machine = FakeMachine(machines.port, facts)
                machine.join()
                assert isinstance(machine.reply, Refusal)
                assert reason in machine.reply.reason
                reasons.append(machine.reply.reason)
            machines.start(2)
            outputs = machines.finish()
        valid.join()
        for one in outputs.values():
            assert one.status == 1
            assert [text for check, text in one.faults() if check == "machines"] == reasons

    @pytest.mark.soak
    def test_late_machine_is_refused(self) -> None:
        with Machines(3, timeout_s=4) as machines:
            machines.start(0)
            first = FakeMachine(machines.port, facts_of(1, 3), hangs=True)
            assert first.has_started.wait(LIMIT_S)
            late = FakeMachine(machines.port, facts_of(2, 3))
            late.join()
            outputs = machines.finish()
        first.join()
        assert isinstance(late.reply, Refusal)
        assert "joined after the checks had started" in late.reply.reason
        assert any(text == late.reply.reason for _, text in outputs[0].faults())

    @pytest.mark.parametrize("fate", ["leaves", pytest.param("hangs", marks=pytest.mark.soak)])
    def test_machine_without_results_is_named(self, fate: str) -> None:
        with Machines(3) as machines:
            machines.start(0)
            machines.start(2)
            machine = FakeMachine(
                machines.port, facts_of(1, 3), leaves=fate == "leaves", hangs=fate == "hangs"
            )
            outputs = machines.finish()
        machine.join()
        for one in outputs.values():
            assert one.status == 1
            assert one.seconds < BOUND_S + START_S
            assert "machine 1 (node-1) joined, but sent no results" in one.faults()[0][1]


class TestCommand:
    def test_torch_is_not_imported(self) -> None:
        script = "import sys, command; status = command.main(); "
        script += "heavy = {'torch', 'lightning', 'numpy'} & set(sys.modules); "
        script += "sys.exit(status or sorted(heavy) or None)"
        with Machines(1) as machines:
            master = f"127.0.0.1:{machines.port}"
            arguments = ["doctor", "--master", master, "--rank", "0", "--world", "1"]
            done = run(sys.executable, "-c", script, *arguments)
        assert done.returncode == 0, done.stdout

    def test_this_machine_is_checked_without_arguments(self) -> None:
        done = run(*COMMAND)
        assert done.returncode == 0, done.stdout
        assert done.stdout.startswith(f"lightning-loco doctor: {socket.gethostname()} alone\n")
        for check in ("interfaces", "versions", "open files", "hardware", "environment", "disk"):
            assert f"\n{check:<14}ok" in done.stdout
        assert done.stdout.rstrip().endswith("all well")

    def test_error_names_missing_arguments(self) -> None:
        done = run(*COMMAND, "--rank", "0")
        assert done.returncode == 2
        assert "missing: --master --world, which no launcher has set either" in done.stdout

    def test_error_names_a_file_that_cannot_be_written(self) -> None:
        done = run(*COMMAND, "--json", "/nowhere/machines.json")
        assert done.returncode == 2
        assert "cannot write /nowhere/machines.json: No such file or directory" in done.stdout

    def test_help(self) -> None:
        done = run(*COMMAND, "--help")
        assert done.returncode == 0
        assert "--master HOST:PORT" in done.stdout

    def test_other_processes_of_a_machine_do_nothing(self) -> None:
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
    """Connect to a port of this machine as soon as a process listens on it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 30)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
