"""Keys: who has the file may read, others are refused at once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zmq

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers import Peer, read_key_file, write_key_file
from lightning_loco.peers.keys import main
from tests.limits import LONG_S, SOON_S
from tests.peers.helpers import fetch, make_node, peers


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.keys"
    write_key_file(path)
    return path


def test_a_key_file_comes_back_and_is_private(tmp_path: Path) -> None:
    keys = write_key_file(tmp_path / "keys")
    assert read_key_file(tmp_path / "keys") == keys
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    assert zmq.curve_public(keys.secret) == keys.public
    assert write_key_file(tmp_path / "others") != keys
    with pytest.raises(FileExistsError):
        write_key_file(tmp_path / "keys")


def test_a_file_that_others_may_touch_is_refused_with_a_mend(
    key_file: Path, subtests: pytest.Subtests
) -> None:
    for mode in (0o640, 0o604, 0o620, 0o644):
        with subtests.test(f"{mode:o}"):
            key_file.chmod(mode)
            with pytest.raises(ValueError, match=f"has mode {mode:o}.*chmod 600 {key_file}"):
                read_key_file(key_file)


def test_other_files_are_refused(key_file: Path, subtests: pytest.Subtests) -> None:
    head, public, secret = key_file.read_text().splitlines()
    for name, damaged in {
        "empty": "",
        "a letter": "x",
        "not UTF-8": "\xff\xfe",
        "swapped": f"{head}\n{secret}\n{public}\n",
        "short": f"{head}\n{public}\n{secret[:-1]}\n",
    }.items():
        with subtests.test(name):
            key_file.write_text(damaged, encoding="latin-1")
            with pytest.raises(ValueError, match="is not a key file. Write a new one with"):
                read_key_file(key_file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no key file"):
        make_node(peers(2), 0, key_file=tmp_path / "keys")


def test_peers_with_the_same_file_read_from_each_other(key_file: Path) -> None:
    nodes = peers(2)
    made = [make_node(nodes, index, 300_000, key_file=key_file) for index in range(2)]
    flat = torch.randn(300_000)
    made[1].publish(flat, Tag(3, 4))
    for _ in range(3):
        received = fetch(made[0])
        assert received is not None
        assert torch.equal(received.params, flat)
    for node in made:
        node.close()


@pytest.mark.parametrize("case", ["another", "reader without", "server without"])
def test_other_keys_and_no_keys_are_refused_at_once(
    key_file: Path, tmp_path: Path, case: str
) -> None:
    other = tmp_path / "other.keys"
    write_key_file(other)
    reader, server = {
        "another": (other, key_file),
        "reader without": (None, key_file),
        "server without": (key_file, None),
    }[case]
    nodes = peers(3)
    here = make_node(nodes, 0, key_file=reader, fetch_timeout_s=LONG_S)
    there = make_node(nodes, 1, key_file=server)
    there.publish(torch.ones(1000), Tag(0, 0))
    friend = make_node(nodes, 2, key_file=reader)
    friend.publish(torch.ones(1000), Tag(0, 0))
    started = time.monotonic()
    for _ in range(20):
        received = fetch(here)
        assert received is not None
        assert received.peer == "p2"
    assert time.monotonic() - started < SOON_S
    assert here.statistics.refused > 0
    assert here.statistics.timeouts == 0
    assert there.statistics.bytes_sent == 0
    for node in (here, there, friend):
        node.close()


def test_the_servers_key_alone_is_not_enough(key_file: Path) -> None:
    """A client that knows the public key, but proves another one, gets no answer."""
    keys = read_key_file(key_file)
    node = make_node(peers(2), 0, key_file=key_file)
    node.publish(torch.ones(1000), Tag(0, 0))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    public, secret = zmq.curve_keypair()
    socket.curve_serverkey, socket.curve_publickey = keys.public, public
    socket.curve_secretkey = secret
    socket.connect(f"tcp://127.0.0.1:{node.port}")
    socket.send(b"anything")
    assert not socket.poll(300)
    assert node.statistics.malformed == 0  # it did not come that far
    socket.close()
    context.term()
    node.close()


def test_with_keys_there_is_no_warning(key_file: Path) -> None:
    nodes = [*peers(1), Peer("far", "192.0.2.1", 4000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_node(nodes, 0, key_file=key_file).close()


def check_the_command(path: Path, run: Callable[[], tuple[int, str, str]]) -> None:
    """It writes a file once; ``run`` runs it: exit status, output and errors."""
    status, output, errors = run()
    assert status == 0, errors
    assert "key_file=" in output
    keys = read_key_file(path)
    assert keys.secret.decode() not in output
    status, _, errors = run()
    assert status == 2
    assert "exists" in errors
    assert read_key_file(path) == keys


def test_the_command_writes_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.keys"
    monkeypatch.setattr(sys, "argv", ["keys", str(path)])

    def run() -> tuple[int, str, str]:
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *capsys.readouterr()

    check_the_command(path, run)


@pytest.mark.soak
@pytest.mark.process
def test_the_command_is_a_program(tmp_path: Path) -> None:
    path = tmp_path / "job.keys"
    command = [sys.executable, "-m", "lightning_loco.peers.keys", str(path)]

    def run() -> tuple[int, str, str]:
        ended = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        return ended.returncode, ended.stdout, ended.stderr

    check_the_command(path, run)
