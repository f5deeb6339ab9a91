"""Floods: endless messages, more requests than can be answered, thousands of idle connections."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from zmq.utils import z85

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.keys import Keys, read_key_file, write_key_file
from lightning_loco.peers.protocol import EMPTY, MAX_CHUNK_BYTES, Request, pack_reply, pack_request
from tests.peers.curve import sodium
from tests.peers.flooder import GREETING, READY, flooding, frame
from tests.peers.helpers import (
    CHECKSUM,
    MODEL,
    fetch,
    make_node,
    open_files,
    peers,
    right_reply,
    serving,
    two_nodes,
)
from tests.peers.test_hostile import MB, resident_bytes
from tests.programs import Program, python_script

NUMEL = 2_000_000
MOST_GROWTH = 16 * MB
REQUEST = Request(CHECKSUM, MODEL.wire_format, 7, 0, 0, 8)
FLOODS = {
    "tiny": frame(b"x", has_more=True) * 20_000,
    "large": frame(bytes(900), has_more=True) * 60,
    "huge": frame(bytes(600_000), has_more=True) * 2,
    "messages": frame(b"x") * 20_000,
    "requests": frame(pack_request(REQUEST)) * 1000,
    "long_requests": frame(pack_request(REQUEST._replace(length=MAX_CHUNK_BYTES))) * 1000,
}
RIGHT = right_reply(REQUEST, 4 * NUMEL)
EMPTY_REPLY = pack_reply(RIGHT._replace(kind=EMPTY, publication=0, length=0))
REPLIES = {
    **{kind: FLOODS[kind] for kind in ("tiny", "large", "huge", "messages")},
    "replies": (frame(pack_reply(RIGHT), has_more=True) + frame(bytes(8))) * 1000,
    "chunks": frame(pack_reply(RIGHT), has_more=True) + frame(bytes(768 * 1024)),
}


def largest_growth(during: subprocess.Popen[str]) -> int:
    """By how many bytes this process grew at most while another one ran."""
    before = largest = resident_bytes()
    while during.poll() is None:
        largest = max(largest, resident_bytes())
        time.sleep(0.01)
    return largest - before


def both_ways(seconds: list[int], seconds_with_keys: list[int]) -> list[tuple[bool, int]]:
    """Whether there are keys, and for how long there is a flood."""
    return [*((False, one) for one in seconds), *((True, one) for one in seconds_with_keys)]


class Job(NamedTuple):
    """With or without keys, which the one who floods has got hold of.

    Attributes:
        settings: Of a node.
        keys: If there are any.
        raw: As the one who floods takes them.
        most_growth: In bytes; with keys ZeroMQ reads ahead until it is seen how much.
    """

    settings: dict[str, Any]
    keys: Keys | None
    raw: bytes
    most_growth: int


def make_job(has_keys: bool, folder: Path) -> Job:
    if not has_keys:
        return Job({}, None, b"", MOST_GROWTH)
    if sodium() is None:
        pytest.skip("libsodium is within ZeroMQ here, out of reach")
    file = folder / "keys"
    keys = read_key_file(file) if file.exists() else write_key_file(file)
    raw = b"".join(map(z85.decode, keys))
    return Job({"key_file": file}, keys, raw, 4 * MOST_GROWTH)


def greetings(flooder: subprocess.Popen[str]) -> int:
    """How often the one who floods, and has ended, came as far as that."""
    assert flooder.stdout is not None
    return int(flooder.stdout.read())


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "seconds", "seconds_with_keys"),
    [
        ("large", [2], [2]),
        pytest.param("tiny", [2, 8], [2, 16], marks=pytest.mark.soak),
        pytest.param("huge", [2], [2], marks=pytest.mark.soak),
        pytest.param("messages", [2], [], marks=pytest.mark.soak),
        pytest.param("requests", [2, 8], [], marks=pytest.mark.soak),
        pytest.param("long_requests", [2], [], marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_server_does_not_grow_and_goes_on_serving(
    kind: str,
    seconds: list[int],
    seconds_with_keys: list[int],
    tmp_path: Path,
    subtests: pytest.Subtests,
) -> None:
    for has_keys, duration in both_ways(seconds, seconds_with_keys):
        with subtests.test(has_keys=has_keys, seconds=duration):
            job = make_job(has_keys, tmp_path)
            with two_nodes(NUMEL, **job.settings) as (here, there):
                flat = torch.randn(NUMEL)
                there.publish(flat, Tag(1, 2))
                assert fetch(here) is not None
                flood = FLOODS[kind], duration
                with flooding("connect", there.port, *flood, keys=job.raw) as flooder:
                    assert largest_growth(flooder) < job.most_growth
                    assert greetings(flooder) > 0
                received = fetch(here)
                assert received is not None
                assert torch.equal(received.params, flat)


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "seconds", "seconds_with_keys"),
    [
        ("large", [2], [2]),
        pytest.param("tiny", [2, 8], [2], marks=pytest.mark.soak),
        pytest.param("huge", [2], [2], marks=pytest.mark.soak),
        pytest.param("messages", [2], [2, 16], marks=pytest.mark.soak),
        pytest.param("replies", [2, 8], [2], marks=pytest.mark.soak),
        pytest.param("chunks", [2], [2], marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_reader_does_not_grow_whether_it_fetches_or_not(
    kind: str,
    seconds: list[int],
    seconds_with_keys: list[int],
    tmp_path: Path,
    subtests: pytest.Subtests,
) -> None:
    for has_keys, duration in both_ways(seconds, seconds_with_keys):
        for is_idle in (False, True):
            with subtests.test(has_keys=has_keys, seconds=duration, is_idle=is_idle):
                read_while_flooded(make_job(has_keys, tmp_path), kind, duration, is_idle)


def read_while_flooded(job: Job, kind: str, seconds: float, is_idle: bool) -> None:
    nodes = peers(2)
    role = "listen_idle" if is_idle else "listen"
    flood = REPLIES[kind], seconds, EMPTY_REPLY, job.raw
    with flooding(role, nodes[1].port, *flood) as flooder:
        here = make_node(nodes, 0, NUMEL, fetch_timeout_s=seconds, **job.settings)

        def read() -> None:
            while flooder.poll() is None:
                here.start_fetch()
                here.wait(0.2)
                time.sleep(0.5 if is_idle else 0.0)

        reading = threading.Thread(target=read)
        reading.start()
        growth = largest_growth(flooder)
        reading.join()
        here.close()
        assert growth < job.most_growth
        assert greetings(flooder) > 0
        assert here.statistics.fetches == 0
        assert (here.statistics.empty > 0) == is_idle
    with serving(nodes[1], 3.0, MODEL._replace(numel=NUMEL), job.keys):
        here = make_node(nodes, 0, NUMEL, **job.settings)
        assert fetch(here) is not None
        here.close()


IDLE = """
import resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
port, greets = int(sys.argv[1]), sys.argv[2] == "True"
greeting = bytes.fromhex(sys.argv[3])
kept = []
for _ in range(2000):
    kept.append(socket.create_connection(("127.0.0.1", port)))
    if greets:
        kept[-1].sendall(greeting)
print("there", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def idle_connections(port: int, has_keys: bool) -> Iterator[None]:
    """Two thousand, of somebody who greets, where greeting needs no keys, and asks for nothing."""
    arguments = [str(port), str(not has_keys), (GREETING + READY + b"DEALER").hex()]
    stranger = subprocess.Popen(
        [sys.executable, "-c", IDLE, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "there\n"
        yield
    finally:
        stranger.kill()
        stranger.wait()
        stranger.stdout.close()


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("has_keys", [False, True])
def test_thousands_of_idle_connections_leave_files_for_others(
    tmp_path: Path, has_keys: bool
) -> None:
    settings = {"key_file": tmp_path / "keys"} if has_keys else {}
    if has_keys:
        write_key_file(tmp_path / "keys")
    with two_nodes(**settings) as (here, there):
        there.publish(torch.ones(1000), Tag(1, 1))
        assert fetch(here) is not None
        before = open_files()
        with idle_connections(there.port, has_keys):
            time.sleep(0.5)
            assert open_files() < before + 100
            for _ in range(20):
                assert fetch(here) is not None


SAVING = """
import resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from pathlib import Path
import torch
from lightning.pytorch import Callback
from lightning_loco import PairwiseGossipStrategy
from tests.small_model import TinyModule, make_loader, quiet_trainer

folder = Path({folder!r})

class Save(Callback):
    def on_train_start(self, *_):
        print("serving", flush=True)
        while not (folder / "they are there").exists():
            time.sleep(0.01)

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(folder / f"{{trainer.global_step}}.ckpt")

torch.set_num_threads(1)
strategy = PairwiseGossipStrategy(
    nodes={nodes!r}, name="p0", key_file={key_file!r}, fetch_timeout_s=0.5
)
trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=20, callbacks=[Save()])
trainer.fit(TinyModule(), make_loader(0, 20))
print("ended", flush=True)
"""


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("has_keys", [False, True])
def test_a_trainer_saves_its_checkpoints_beside_thousands_of_idle_connections(
    tmp_path: Path, has_keys: bool
) -> None:
    """With 1,024 open files for all, which cannot be raised."""
    key_file = str(tmp_path / "keys") if has_keys else None
    if key_file is not None:
        write_key_file(key_file)
    own, other = peers(2)
    nodes = [node._asdict() for node in (own, other)]
    text = SAVING.format(folder=str(tmp_path), nodes=nodes, key_file=key_file)
    with Program(python_script(tmp_path, text), tmp_path) as program, serving(other, 1.0):
        program.wait_for("serving")
        with idle_connections(own.port, has_keys):
            time.sleep(0.5)
            (tmp_path / "they are there").touch()
            code, output = program.finish(60)
    assert code == 0, output
    assert "ended" in output
    for step in range(1, 21):
        saved = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)
        assert saved["global_step"] == step
