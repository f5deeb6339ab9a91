"""The syncer behind real sockets, with learners in threads."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms import DecoupledDiLoCo
from lightning_loco.costs import Link
from lightning_loco.syncer.learner_rounds import LearnerRounds
from lightning_loco.syncer.merge_rounds import Due, MergeSettings, Push, Refused, Version
from lightning_loco.syncer.service import SyncerClient, SyncerServer
from lightning_loco.syncer.syncer import Syncer
from lightning_loco.transport import (
    CertificateRefused,
    Client,
    JobCertificate,
    MalformedMessage,
    read_certificate,
    write_certificate,
)
from lightning_loco.transport.connection import _MAGIC, _PREFIX
from tests.syncer.world import SIZE, contract_of

METHOD = DecoupledDiLoCo()
SETTINGS = MergeSettings(fragments=2, sync_every=4, min_quorum=2, retry_s=60.0)
ZEROS = torch.zeros(SIZE, dtype=torch.float64)
CONTRACT = contract_of(METHOD, SETTINGS).as_plain()


@contextmanager
def serving(folder: Path, certificate: JobCertificate | None = None) -> Iterator[SyncerServer]:
    server = SyncerServer(lambda contract: Syncer(contract, folder), certificate=certificate)
    server.start()
    try:
        yield server
    finally:
        server.close()


def client_of(server: SyncerServer, certificate: JobCertificate | None = None) -> SyncerClient:
    return SyncerClient("127.0.0.1", server.server.port, certificate, timeout_s=20.0)


def learn(client: SyncerClient, name: str, toward: float, end: threading.Event) -> Tensor:
    """A learner that waits for every reply; returns the fragments that it has received."""
    rounds = LearnerRounds(name, 1, SETTINGS.fragments)
    local = torch.zeros(SETTINGS.fragments, SIZE, dtype=torch.float64)
    received = local.clone()
    has_started, reply = client.join(name, 1, 0, CONTRACT)
    if not has_started:
        client.start([*(local + 5.0)])
    while True:
        for fragment in rounds.listen(reply):
            found = client.fetch(fragment, torch.empty(SIZE, dtype=torch.float64))
            if rounds.is_news(found.epoch, fragment, found.version):
                local[fragment] = received[fragment] = found.params
                rounds.receive(fragment, found.version)
        if end.is_set():
            client.leave(name, 1)
            return received
        local += 0.1 * (toward - local)
        rounds.count(8.0)
        for push in rounds.answers():
            fragment = push.due.fragment
            client.push(push, METHOD.propose(local[fragment], received[fragment]))
        reply = client.poll(name, 1, rounds.epoch, rounds.total_steps)


def test_learners_meet_between_their_targets(tmp_path: Path) -> None:
    end, found = threading.Event(), {}
    write_certificate(tmp_path / "job.pem")
    certificate = read_certificate(tmp_path / "job.pem")
    with serving(tmp_path / "run", certificate=certificate) as server:

        def run(name: str, toward: float) -> None:
            client = client_of(server, certificate)
            found[name] = learn(client, name, toward, end)
            client.close()

        threads = [
            threading.Thread(target=run, args=one, daemon=True) for one in (("a", 1.0), ("b", 3.0))
        ]
        for thread in threads:
            thread.start()
        watcher = client_of(server, certificate)
        while watcher.status().get("committed", 0) < 60 and all(one.is_alive() for one in threads):
            threading.Event().wait(0.05)
        end.set()
        for thread in threads:
            thread.join(30.0)
        status = watcher.status()
        watcher.close()
    assert status["learners"] == {}
    assert status["merges"] >= 60
    for received in found.values():
        # How near depends on whose thread takes more steps; alone it would be beyond its target.
        assert ((received > 1.02) & (received < 2.98)).all()
    again = Syncer(contract_of(METHOD, SETTINGS), tmp_path / "run")
    assert again.rounds.committed == status["committed"]


def test_refusals_arrive_with_their_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as server:
        client = client_of(server)
        assert client.status() == {}
        with pytest.raises(Refused, match="No learner has joined"):
            client.fetch(0, torch.empty(SIZE))
        early = Push("a", 1, 1, Due(1, 0, 0), Version(1, 0), 1, 8.0)
        with pytest.raises(Refused, match="No learner has joined"):  # after its body
            client.push(early, ZEROS)
        has_started, reply = client.join("a", 1, 0, CONTRACT)
        with pytest.raises(Refused, match="dtype is 'float32' there and 'float64' here") as caught:
            client.join("b", 1, 0, {**CONTRACT, "dtype": "float32"})
        assert caught.value.reason == "contract"
        assert (has_started, reply.versions) == (False, (Version(1, 0),) * 2)
        with pytest.raises(Refused, match="has not started") as caught:
            client.poll("a", 1, 1, 0)
        assert caught.value.reason == "start"
        client.start([ZEROS] * 2)
        client.start([(ZEROS + 1.0)] * 2)  # only the first counts
        found = client.fetch(1, torch.empty(SIZE, dtype=torch.float64))
        assert found.params.tolist() == [0.0] * SIZE
        push = Push("a", 1, 1, Due(1, 0, 0), Version(1, 0), 1, 8.0)
        with pytest.raises(Refused, match="no such round is open"):
            client.push(push, (ZEROS + 1.0))
        with pytest.raises(Refused, match="holds NaN"):
            client.push(push, (ZEROS + torch.nan))
        with pytest.raises(MalformedMessage, match="24 bytes for a fragment of 16"):
            client.fetch(0, torch.empty(2, dtype=torch.float64))
        assert client.status()["refused"] == 4
        client.close()
    texts = (record.getMessage() for record in caplog.records if record.levelno > logging.INFO)
    assert [text[:43] for text in texts] == [
        "Refused: Learner b does not fit the syncer:",
        "Refused: The push of a for round 1 holds Na",
    ]


def test_messages_take_as_long_as_on_an_emulated_link(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        near = client_of(server)
        near.join("a", 1, 0, CONTRACT)
        near.start([ZEROS, ZEROS])
        link = Link(mbit_per_s=0.001, latency_s=0.05)  # 24 bytes in 0.19 s
        far = SyncerClient("127.0.0.1", server.server.port, timeout_s=20.0, link=link)
        began = time.monotonic()
        far.fetch(0, torch.empty(SIZE, dtype=torch.float64))
        assert time.monotonic() - began >= 0.29
        far.close()
        near.close()


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"\xff", b""),
        (b"[1]", b""),
        (b"{}", b""),
        (b'{"kind": "format"}', b""),
        (b'{"kind": "join", "name": "a", "generation": 1, "steps": 0}', b"[]"),
        (b'{"kind": "join", "name": "a", "generation": 1, "steps": 0}', b"{"),
        (b'{"kind": "join", "name": "a", "generation": [], "steps": 0}', b"{}"),
        (b'{"kind": "poll", "name": "a"}', b""),
        (b'{"kind": "push", "push": [1]}', b""),
        (b'{"kind": "push", "push": ["a", 1, 1, [1, 9, 0], [1, 0], 1, 8]}', b"1" * 24),
        (b'{"kind": "push", "push": ["a", 1, 1, [1, 0, 0], [1, 0], 1, 8]}', b"1" * 23),
        (b'{"kind": "fetch", "fragment": 2}', b""),
        (b'{"kind": "start"}', b"1" * 5),
    ],
)
def test_what_no_learner_sends_closes_the_connection(
    tmp_path: Path, header: bytes, body: bytes
) -> None:
    with serving(tmp_path) as server:
        stranger, client = Client("127.0.0.1", server.server.port), client_of(server)
        client.join("b", 1, 0, CONTRACT)
        client.start([ZEROS] * 2)
        with pytest.raises(OSError):  # noqa: PT011
            stranger.request(header, body, timeout_s=20.0)
        assert server.server.malformed == 1
        assert client.status()["committed"] == 0  # it still answers others
        stranger.close()
        client.close()


def test_another_key_is_refused(tmp_path: Path) -> None:
    write_certificate(tmp_path / "own.pem")
    write_certificate(tmp_path / "other.pem")
    with serving(tmp_path / "run", certificate=read_certificate(tmp_path / "own.pem")) as server:
        client = client_of(server, read_certificate(tmp_path / "other.pem"))
        with pytest.raises(CertificateRefused):
            client.join("a", 1, 0, CONTRACT)
        client.close()


def test_the_clock_alone_ends_a_wait(tmp_path: Path) -> None:
    """A learner is forgotten, and a round is asked for again, without a request."""
    settings = MergeSettings(2, 2, min_quorum=2, retry_s=0.3, lease_s=1.0)
    contract = contract_of(METHOD, settings).as_plain()
    with serving(tmp_path) as server:
        client = client_of(server)
        for name in "ab":
            client.join(name, 1, 0, contract)
        client.start([ZEROS] * 2)
        for name in "ab":
            asked = client.poll(name, 1, 1, 1).asked
        assert asked == (Due(1, 0, 0),)
        while client.status()["learners"]:
            threading.Event().wait(0.05)
        client.join("a", 1, 1, contract)
        assert client.poll("a", 1, 1, 1).asked[0].attempt > 0
        assert json.dumps(client.status())
        client.close()


def test_a_push_on_a_slow_link_is_merged(tmp_path: Path) -> None:
    """It takes longer than the lease of its learner, which can ask for nothing until then."""
    settings = MergeSettings(2, 2, grace=0.0, lease_s=0.5)
    with serving(tmp_path) as server:
        client = client_of(server)
        client.join("a", 1, 0, contract_of(METHOD, settings).as_plain())
        client.start([ZEROS] * 2)
        (due, *_) = client.poll("a", 1, 1, 1).asked
        push = Push("a", 1, 1, due, Version(1, 0), 1, 8.0)
        header = json.dumps({"kind": "push", "push": push}).encode()
        body = bytes(8 * SIZE)
        message = _PREFIX.pack(_MAGIC, len(header), len(body)) + header + body
        with socket.create_connection(("127.0.0.1", server.server.port)) as slow:
            slow.sendall(message[:-4])
            threading.Event().wait(1.5)
            assert client.status()["learners"].keys() == {"a"}
            slow.sendall(message[-4:])
            assert b"refused" not in slow.recv(1000)
        assert client.status()["merges"] == 1
        client.close()
