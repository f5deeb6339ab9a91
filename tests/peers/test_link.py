"""Links: requests go, replies come, and a connection that is broken says so."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from lightning_loco.peers import NodeDirectory, Peer, StoreDirectory
from lightning_loco.peers.curve_link import CurveLink
from lightning_loco.peers.keys import Keys, write_key_file
from lightning_loco.peers.link import Link, LinkBroken
from lightning_loco.peers.links import Links
from lightning_loco.peers.protocol import DATA, MalformedMessage, Reply, Request
from lightning_loco.peers.tcp_link import TcpLink
from lightning_loco.peers.transfer import Assembly, Transfer
from tests.limits import LONG_S, SOON_S
from tests.peers.helpers import MODEL, answering, open_files, peers, right_answer, serving, silent
from tests.programs import free_ports

PATIENCE_S = 5.0


@pytest.fixture(params=[False, True], ids=["open", "keys"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Keys | None:
    return write_key_file(tmp_path / "keys") if request.param else None


@pytest.fixture
def connect(keys: Keys | None) -> Iterator[Callable[[Peer], Link]]:
    """Makes a link of the kind."""
    context = zmq.Context()
    yield lambda peer: CurveLink(context, peer, keys) if keys is not None else TcpLink(peer)
    context.term()


def make_transfer() -> tuple[Transfer, Assembly]:
    assembly = Assembly(MODEL)
    return Transfer(MODEL, assembly, 4000, 1), assembly


def next_reply(link: Link, transfer: Transfer) -> Reply:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        reply = link.receive(transfer)
        if reply is not None:
            return reply
        link.wait(0.1)
    raise AssertionError("no reply has come")


def wait_until_broken(link: Link) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        link.check()
        time.sleep(0.01)


def send_until_broken(link: Link) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        link.send(b"anything")
        time.sleep(0.01)


def test_a_chunk_comes_and_is_in_its_place(
    connect: Callable[[Peer], Link], keys: Keys | None
) -> None:
    (peer,) = peers(1)
    with serving(peer, 3.0, keys=keys):
        link = connect(peer)
        transfer, assembly = make_transfer()
        assert link.receive(transfer) is None
        for request in transfer.requests():
            link.send(request)
        reply = next_reply(link, transfer)
        assert (reply.kind, reply.length, reply.publication) == (DATA, 4000, 1)
        assert assembly.params.tolist() == [3.0] * 1000
        assert transfer.received_bytes == 0  # it has not been told yet
        link.check()
        link.close()
        link.close()


def test_a_reply_that_was_not_asked_for_is_dropped_and_the_next_one_is_read(
    connect: Callable[[Peer], Link],
    keys: Keys | None,
) -> None:
    def answer(request: Request) -> Iterator[list[bytes]]:
        right = right_answer(request, MODEL.total_bytes, 1.0)
        yield [b"nonsense", b"more", b"and more"]
        yield [right[0]]
        yield [right[0], right[1][:-1]]
        yield [*right, b"more"]
        yield right_answer(request._replace(request_id=1), MODEL.total_bytes, 9.0)
        yield right_answer(request, MODEL.total_bytes, 2.0)

    (peer,) = peers(1)
    with answering(peer.port, answer, keys):
        link = connect(peer)
        transfer, assembly = make_transfer()
        for request in transfer.requests():
            link.send(request)
        for text in ("bytes, this has 8", "number of frames", "3999 bytes", "4000", "none of the"):
            with pytest.raises(MalformedMessage, match=text):
                next_reply(link, transfer)
        assert next_reply(link, transfer).kind == DATA
        assert assembly.params.tolist() == [2.0] * 1000
        link.close()


def test_a_peer_that_does_not_listen_breaks_the_link(
    connect: Callable[[Peer], Link],
    keys: Keys | None,
) -> None:
    (peer,) = peers(1)
    link = connect(peer)
    with pytest.raises(LinkBroken, match=f"at tcp://127.0.0.1:{peer.port}"):
        wait_until_broken(link)
    link.close()


def test_a_peer_that_goes_away_breaks_the_link_and_ends_a_wait(
    connect: Callable[[Peer], Link],
    keys: Keys | None,
) -> None:
    (peer,) = peers(1)
    transfer, _ = make_transfer()
    with contextlib.ExitStack() as links:
        with serving(peer, 1.0, keys=keys):
            link = links.enter_context(contextlib.closing(connect(peer)))
            for request in transfer.requests():
                link.send(request)
            next_reply(link, transfer)
        started = time.monotonic()
        with pytest.raises(LinkBroken):
            link.wait(LONG_S)
        assert time.monotonic() - started < SOON_S
        with pytest.raises(LinkBroken, match=f"no connection to tcp://127.0.0.1:{peer.port}"):
            send_until_broken(link)


def test_a_wait_for_a_silent_peer_ends(connect: Callable[[Peer], Link], keys: Keys | None) -> None:
    (peer,) = peers(1)
    with silent(peer), contextlib.closing(connect(peer)) as link:
        started = time.monotonic()
        link.wait(0.1)
        assert 0.05 < time.monotonic() - started < SOON_S
        link.check()


def test_a_link_with_keys_that_is_read_without_a_pause_breaks_when_more_waits_than_was_asked_for(
    tmp_path: Path,
) -> None:
    def answer(request: Request) -> Iterator[list[bytes]]:
        return ([bytes(1000)] for _ in range(800))

    (peer,) = peers(1)
    keys = write_key_file(tmp_path / "keys")
    with answering(peer.port, answer, keys), zmq.Context() as context:
        transfer, _ = make_transfer()
        with contextlib.closing(CurveLink(context, peer, keys, chunk_bytes=4000)) as link:
            for request in transfer.requests():
                link.send(request)
            link.wait(PATIENCE_S)
            time.sleep(0.5)
            with pytest.raises(LinkBroken, match="sends more than was asked for"):
                drop(link, transfer, 100)


def drop(link: Link, transfer: Transfer, count: int) -> None:
    """Take so many replies, none of which was asked for."""
    for _ in range(count):
        with contextlib.suppress(MalformedMessage):
            assert link.receive(transfer) is None


# ------------------------------------------------------------------------- to all peers


def test_a_link_is_kept_while_it_stands_and_made_anew_when_it_is_broken() -> None:
    nodes = peers(2)
    links = Links(NodeDirectory(nodes, "p0"), None)
    transfer, _ = make_transfer()
    with serving(nodes[1], 1.0):
        first, is_new = links.get("p1")
        assert first is not None
        assert is_new
        for request in transfer.requests():
            first.send(request)
        next_reply(first, transfer)
        assert links.get("p1") == (first, False)
    with pytest.raises(LinkBroken):
        wait_until_broken(first)
    links.drop("p1")
    with serving(nodes[1], 2.0):
        second, is_new = links.get("p1")
        assert second is not first
        assert is_new
    links.close()


def test_a_link_that_broke_unseen_is_replaced() -> None:
    nodes = peers(2)
    links = Links(NodeDirectory(nodes, "p0"), None)
    transfer, _ = make_transfer()
    with serving(nodes[1], 1.0):
        first, _ = links.get("p1")
        assert first is not None
        for request in transfer.requests():
            first.send(request)
        next_reply(first, transfer)
    deadline = time.monotonic() + PATIENCE_S
    found = first
    while found is first and time.monotonic() < deadline:
        time.sleep(0.01)
        found, is_new = links.get("p1")
    assert found is not first
    assert is_new
    links.close()


def test_a_peer_that_nobody_knows_has_no_link_and_a_dropped_one_is_looked_up_again() -> None:
    store = torch.distributed.HashStore()
    links = Links(StoreDirectory(store, 0, 2), None)
    there = StoreDirectory(store, 1, 2)
    assert links.get("worker1") == (None, True)
    for port in free_ports(2):
        there.announce(port)
        link, _ = links.get("worker1")
        assert link is not None
        assert link.peer == Peer("worker1", "127.0.0.1", port)
        links.drop("worker1")
    links.close()


def test_after_close_no_file_is_left() -> None:
    nodes = peers(3)
    for _ in range(2):  # the first may load what stays
        before = open_files()
        links = Links(NodeDirectory(nodes, "p0"), None)
        links.get("p1")
        links.get("p2")
        links.close()
        links.close()
    assert open_files() <= before
