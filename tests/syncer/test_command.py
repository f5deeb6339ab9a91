"""The programs ``lightning-loco syncer`` and ``replay``, with learners on real sockets."""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from lightning_loco.algorithms import DecoupledDiLoCo, TensorRange
from lightning_loco.syncer.contract import Contract
from lightning_loco.syncer.learner_rounds import LearnerRounds
from lightning_loco.syncer.merge_rounds import MergeSettings, Refused
from lightning_loco.syncer.service import SyncerClient
from lightning_loco.syncer.snapshot import Snapshot
from lightning_loco.tools import replay
from lightning_loco.tools.syncer import describe, show_status
from lightning_loco.transport import JobCertificate, read_certificate, write_certificate
from tests.harness.programs import Program, environment, free_ports
from tests.harness.sources import ROOT

SIZE = 20_000
METHOD = DecoupledDiLoCo()
SETTINGS = MergeSettings(fragments=2, sync_every=4, grace=0.0)
CONTRACT = Contract(METHOD, SETTINGS, [[TensorRange(0, SIZE)]] * 2)
COMMAND = [sys.executable, str(ROOT / "command.py")]


def until(is_so: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} within {limit_s:g} s"
        time.sleep(0.02)


class Learner(threading.Thread):
    """A learner that joins again when the syncer was away.

    A local step goes a tenth of the way to ``toward``.
    """

    def __init__(
        self, port: int, name: str, toward: float, certificate: JobCertificate | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.name, self._toward = name, toward
        self._address = ("127.0.0.1", port, certificate)
        self.rounds = LearnerRounds(name, 1, 2)
        self.received = torch.zeros(2, SIZE)
        self._local = torch.zeros(2, SIZE)
        self.is_training, self.is_there = True, True
        self.start()

    def run(self) -> None:
        while self.is_there:
            client = SyncerClient(*self._address, timeout_s=10.0)
            try:
                self._follow(client)
            except OSError:
                time.sleep(0.05)
            except Refused as error:
                if error.reason not in ("epoch", "learner"):
                    raise
            finally:
                client.close()

    def _follow(self, client: SyncerClient) -> None:
        rounds = self.rounds
        has_started, reply = client.join(self.name, 1, rounds.total_steps, CONTRACT.as_plain())
        if not has_started:
            client.start([*self._local])
        while self.is_there:
            for fragment in rounds.listen(reply):
                found = client.fetch(fragment, torch.empty(SIZE))
                if rounds.is_news(found.epoch, fragment, found.version):
                    self._local[fragment] = self.received[fragment] = found.params
                    rounds.receive(fragment, found.version)
            if self.is_training:
                self._local += 0.1 * (self._toward - self._local)
                rounds.count(8.0)
                for push in rounds.answers():
                    delta = METHOD.propose(
                        self._local[push.due.fragment], self.received[push.due.fragment]
                    )
                    try:
                        client.push(push, delta)
                    except OSError:
                        rounds.lost(push.due)
                        raise
                    except Refused as error:
                        if error.reason not in ("epoch", "learner"):
                            raise
            time.sleep(0.005)
            reply = client.poll(self.name, 1, rounds.epoch, rounds.total_steps)
        client.leave(self.name, 1)


class Run:
    """Learners, and the program of their syncer, one after the other at one port."""

    def __init__(self, folder: Path, key_file: Path | None = None) -> None:
        self.folder, self._key_file = folder, key_file
        (self.port,) = free_ports()
        self.address = f"127.0.0.1:{self.port}"
        self.certificate = None if key_file is None else read_certificate(key_file)
        self.learners: list[Learner] = []
        self._stack = ExitStack()

    def begin(self, *arguments: str) -> Program:
        """Start the syncer; return when it listens, with ``output`` until then."""
        key = () if self._key_file is None else ("--key-file", str(self._key_file))
        own = ("--folder", str(self.folder), "--bind", self.address)
        program = self._stack.enter_context(Program([*COMMAND, "syncer", *own, *key, *arguments]))
        self.output = program.wait_for("listens at")
        return program

    def learn(self, *names: str) -> None:
        for name in names:
            self.learners.append(Learner(self.port, name, float(ord(name)), self.certificate))

    @property
    def committed(self) -> int:
        """The last round of which all learners know."""
        rounds = [
            max(-1 if one is None else one.round for one in learner.rounds.received)
            for learner in self.learners
        ]
        return min(rounds)

    def go_on(self, rounds: int = 10) -> None:
        """Wait for more rounds."""
        goal = self.committed + rounds
        until(lambda: self.committed >= goal, f"round {goal}")

    def stop_training(self) -> None:
        """Make no more local steps; all learners receive what the last ones are merged into."""
        for learner in self.learners:
            learner.is_training = False
        client = SyncerClient("127.0.0.1", self.port, self.certificate)

        def are_all_equal() -> bool:
            before = client.status()
            time.sleep(0.3)
            versions = {tuple(learner.rounds.received) for learner in self.learners}
            return len(versions) == 1 and client.status()["committed"] == before["committed"]

        until(are_all_equal, "end of merges")
        client.close()

    def check_saved(self) -> None:
        """Check that all learners have what is in the folder, bit for bit."""
        saved = Snapshot(self.folder).load()
        assert saved is not None
        for learner in self.learners:
            newest = max(one.round for one in learner.rounds.received if one is not None)
            assert newest == saved.rounds["committed"]
            for fragment, state in enumerate(saved.fragments):
                assert torch.equal(learner.received[fragment], state["outer"])

    def leave(self) -> None:
        for learner in self.learners:
            learner.is_there = False
        for learner in self.learners:
            learner.join(20.0)

    def close(self) -> None:
        self.leave()
        self._stack.close()


@contextmanager
def running(folder: Path, key_file: Path | None = None) -> Iterator[Run]:
    run = Run(folder, key_file)
    try:
        yield run
    finally:
        run.close()


def replayed(folder: Path) -> int:
    return replay.run(argparse.Namespace(folder=str(folder), quiet=False))


@pytest.mark.process
def test_a_syncer_that_was_stopped_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("own.pem", "other.pem"):
        write_certificate(tmp_path / name)
    folder = tmp_path / "runs/one"
    with running(folder, tmp_path / "own.pem") as run:
        first = run.begin("--keep-pushes", "--save-every=7")
        assert "The first learner that joins begins a run in" in run.output
        assert "WARNING" not in run.output
        assert show_status(run.address, run.certificate) == 0
        assert capsys.readouterr().out.strip().endswith("no learner has joined")
        run.learn("a", "b")
        run.go_on(20)
        assert show_status(run.address, run.certificate) == 0
        rows = capsys.readouterr().out.splitlines()[-3:]
        assert [row.split()[0] for row in rows] == ["learner", "a", "b"]
        assert all("% " in row for row in rows[1:])
        for certificate in (None, read_certificate(tmp_path / "other.pem")):
            assert show_status(run.address, certificate) == 1
            assert f"The syncer at {run.address} does not answer" in capsys.readouterr().err
        for _ in range(2):
            first.signal(signal.SIGTERM)
        code, output = first.finish(20.0)
        assert code == 0, output
        assert f"saved in {folder}" in output.splitlines()[-1]
        saved = Snapshot(folder).load()
        assert saved is not None
        number = saved.rounds["committed"]
        assert f"The syncer ends because of SIGTERM. Round {number} is saved" in output

        again = run.begin("--keep-pushes")
        assert f"It continues the run of {folder} at round {number} (epoch " in run.output
        run.go_on()
        run.stop_training()
        again.signal(signal.SIGINT)
        code, output = again.finish(20.0)
        assert code == 0, output
        assert "because of SIGINT" in output
        run.check_saved()
    assert replayed(folder) == 0
    assert capsys.readouterr().out.endswith("0 different, 0 that cannot be repeated\n")


@pytest.mark.process
@pytest.mark.recovery
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_a_syncer_that_was_killed_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int
) -> None:
    """At a random moment; a killed one keeps no other from its folder, and loses no version."""
    with running(tmp_path / "run") as run:
        syncer = run.begin("--keep-pushes")
        run.learn("a", "b")
        for _ in range(kills):
            run.go_on(5)
            time.sleep(random.random() * 0.05)
            syncer.signal(signal.SIGKILL)
            syncer.finish()
            known = run.committed
            syncer = run.begin("--keep-pushes")
            saved = Snapshot(run.folder).load()
            assert saved is not None
            assert saved.rounds["committed"] >= known
        run.go_on()
        run.stop_training()
        syncer.signal(signal.SIGTERM)
        assert syncer.finish(20.0)[0] == 0
        run.check_saved()
    assert replayed(run.folder) == 0
    assert "0 different" in capsys.readouterr().out


@pytest.mark.process
def test_learners_follow_after_their_folder_was_lost_and_the_syncer_ends_after_them(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "run") as run:
        syncer = run.begin("--idle-exit=0.5", "--log-every=0.1")
        time.sleep(1.0)  # it does not end before the first learner
        run.learn("a", "b")
        run.go_on()
        output = syncer.wait_for("% merged")
        assert "Learner a has joined; there are " in output
        assert "A run begins in" in output
        syncer.signal(signal.SIGKILL)
        syncer.finish()
        shutil.rmtree(run.folder)
        epochs = {learner.rounds.epoch for learner in run.learners}
        syncer = run.begin("--idle-exit=0.5")
        until(lambda: all(one.rounds.epoch > max(epochs) for one in run.learners), "new epoch")
        run.go_on()
        run.leave()
        code, output = syncer.finish(20.0)
    assert code == 0, output
    assert "Learner b has left" in output
    assert "The syncer ends after 0.5 s without a learner. Round" in output


@pytest.mark.process
@pytest.mark.parametrize("is_freed", [True, False])
def test_a_full_disk_is_said_and_the_last_save_is_kept(tmp_path: Path, is_freed: bool) -> None:
    with running(tmp_path / "run") as run:
        syncer = run.begin()
        run.learn("a")
        run.go_on()
        no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(
            syncer.process.pid, resource.RLIMIT_FSIZE, (4 * SIZE // 2, resource.RLIM_INFINITY)
        )
        output = syncer.wait_for("cannot be saved, so learners do not get it")
        assert "File too large. The syncer tries again every 10 s." in output
        steps, committed = run.learners[0].rounds.total_steps, run.committed
        until(lambda: run.learners[0].rounds.total_steps > steps + 10, "local step")
        assert run.committed == committed
        if is_freed:
            resource.prlimit(syncer.process.pid, resource.RLIMIT_FSIZE, no_limit)
        syncer.signal(signal.SIGTERM)
        code, output = syncer.finish(20.0)
        saved = Snapshot(run.folder).load()
        assert saved is not None
        assert saved.rounds["committed"] == committed + is_freed
    assert code == (0 if is_freed else 1), output
    assert ("Round" if is_freed else "Its last merges cannot be saved") in output.splitlines()[-1]


def make_foreign(folder: Path) -> None:
    (folder / "weights.ckpt").touch()


def damage(folder: Path) -> None:
    (folder / "syncer.json").write_text("{")


def start_another(folder: Path) -> Program:
    program = Program([*COMMAND, "syncer", f"--folder={folder}", "--bind=0.0.0.0:0"])
    assert "copy it to all machines and pass --key-file FILE here" in program.wait_for("listens at")
    return program


@pytest.mark.process
@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (make_foreign, "has weights.ckpt and no syncer.json, so it is damaged, or not of a syncer"),
        (damage, "syncer.json of the syncer cannot be read"),
        (start_another, "Stop it first, or name another folder with --folder."),
    ],
)
def test_a_folder_that_cannot_be_used(
    tmp_path: Path, prepare: Callable[[Path], Program | None], said: str
) -> None:
    with ExitStack() as stack:
        if (program := prepare(tmp_path)) is not None:
            stack.enter_context(program)
        done = run_command("syncer", f"--folder={tmp_path}", "--bind=127.0.0.1:0")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert said in line
    assert str(tmp_path) in line


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.process
def test_arguments_that_cannot_work(tmp_path: Path, subtests: pytest.Subtests) -> None:
    folder = f"--folder={tmp_path / 'run'}"
    for arguments, said in (
        ([], "one of the arguments --folder --status is required"),
        ([folder, "--status=here:1"], "argument --status: not allowed with argument --folder"),
        ([folder, "--bind=here"], "--bind must be HOST:PORT, such as [::]:29600, got 'here'."),
        (["--status=here"], "--status must be HOST:PORT, such as 10.77.0.1:29600, got 'here'."),
        ([folder, "--save-every=0"], "--save-every must be at least 1, got 0."),
        ([folder, "--idle-exit=nan"], "--idle-exit must be positive and finite, got nan."),
        ([folder, "--key-file=no.pem"], "There is no key file 'no.pem'."),
    ):
        with subtests.test(arguments):
            done = run_command("syncer", *arguments)
            assert done.returncode == 2
            assert said in done.stderr


def test_what_is_not_known_is_not_a_number() -> None:
    none = {"steps": 0, "step_s": None, "seen_s": 1.0, "merged_share": None}
    status = {
        "committed": 0,
        "learners": {f"w{number}": none for number in range(10)},
        "min_quorum": 12,
        "measured_sync_every": None,
        "persistence": None,
        **dict.fromkeys(("merges", "pushes", "late", "refused"), 0),
    }
    line = describe(status)
    assert "learners 10 (waits for 12); " in line
    assert "sync_every not measured yet; " in line
    assert "w7: step time not known yet, no step yet; and 2 more" in line
