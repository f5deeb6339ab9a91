"""The commands in docs/elastic.md do what the page describes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.elastic.cluster import until
from tests.harness.programs import Program, environment, free_ports

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = ("experiment=smoke", "trainer.max_steps=2000", "trainer.val_check_interval=500")


def commands() -> list[str]:
    text = (ROOT / "docs" / "elastic.md").read_text()
    return re.findall(r"```bash\n(.*?)\n```", text, flags=re.DOTALL)


@contextmanager
def running(folder: Path, name: str, command: str, *more: str, **environ: str) -> Iterator[Path]:
    """Run a command from the page; its output and its process id are in files."""
    program, *arguments = shlex.split(command)
    paths = {"lightning-loco": ROOT / "command.py", "python": ROOT / "train.py"}
    own = arguments if program == "lightning-loco" else arguments[1:]
    line = [sys.executable, str(paths[program]), *own, *more]
    cwd = folder / name
    cwd.mkdir()
    output = cwd / "output.txt"
    with open(output, "wb") as stream:
        process = subprocess.Popen(
            line,
            cwd=cwd,
            env=environment(**environ),
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    (cwd / "pid").write_text(str(process.pid))
    try:
        yield output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.process
def test_the_lighthouse_names_the_argument_that_cannot_work(subtests: pytest.Subtests) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
            ("--bind=somewhere", "--bind must be HOST:PORT, such as [::]:29510, got 'somewhere'."),
            ("--bind=[::]:99999", "--bind must be HOST:PORT"),
            (f"--bind=127.0.0.1:{port}", f"cannot listen at 127.0.0.1:{port}: Address already in"),
            ("--min-workers=0", "--min-workers must be at least 1, got 0."),
            ("--bind=a..b:80", "error: --bind: 'a..b' is no host name."),
            (
                "--heartbeat-timeout=0.0005",
                "--heartbeat-timeout must be finite, and at least 0.001 s, got 0.0005.",
            ),
            ("--join-timeout=0", "--join-timeout must be finite, and at least 0.001 s, got 0."),
            ("--join-timeout=inf", "--join-timeout must be finite, and at least 0.001 s, got inf."),
        ):
            free = () if "--bind" in arguments else ("--bind=127.0.0.1:0",)
            with subtests.test(arguments):
                done = subprocess.run(
                    [sys.executable, str(ROOT / "command.py"), "lighthouse", arguments, *free],
                    env=environment(),
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert done.returncode == 2
                assert message in done.stderr


@pytest.mark.process
@pytest.mark.soak
def test_two_begin_a_third_joins_and_the_first_is_killed(tmp_path: Path) -> None:
    _, lighthouse, train, *_ = commands()  # the first line installs
    (port,) = free_ports()
    here = {"TORCHFT_LIGHTHOUSE": f"127.0.0.1:{port}"}
    bind = (f"--bind=127.0.0.1:{port}", "--heartbeat-timeout=1")
    with (
        running(tmp_path, "lighthouse", lighthouse, *bind),
        running(tmp_path, "first", train, *SETTINGS, **here) as first,
        running(tmp_path, "second", train, *SETTINGS, **here) as second,
    ):
        until(lambda: rounds_in(second) > 2, "rounds of two")
        with running(tmp_path, "third", train, *SETTINGS, **here) as third:
            until(lambda: rounds_in(third) > 0, "the third")
            os.kill(int((first.parent / "pid").read_text()), signal.SIGKILL)
            for output in (second, third):
                until(lambda output=output: "All files are in" in output.read_text(), "an end")
        losses = [loss_in(output) for output in (second, third)]
        assert losses[0] == losses[1]
        for output in (second, third):
            assert re.search(r"workers +2\n", output.read_text())
            assert "on workers that come and go" in output.read_text()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_lighthouse(number: signal.Signals) -> None:
    (port,) = free_ports()
    command = [sys.executable, str(ROOT / "command.py"), "lighthouse", f"--bind=127.0.0.1:{port}"]
    with Program(command) as lighthouse:
        lighthouse.wait_for("listening")
        lighthouse.signal(number)
        _, output = lighthouse.finish(limit_s=10)
    assert "Traceback" not in output
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def rounds_in(output: Path) -> int:
    """Return the number of lines in the table of metrics."""
    tables = list(output.parent.glob("outputs/*/*/csv/**/metrics.csv"))
    return len(tables[0].read_text().splitlines()) if tables else 0


def loss_in(output: Path) -> str:
    found = re.search(r"validation loss +([0-9.]+)", output.read_text())
    assert found is not None
    return found[1]
