"""Plain links: what a peer can send that ZeroMQ would never send, or not survive."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from lightning_loco.peers.link import LinkBroken
from lightning_loco.peers.protocol import MalformedMessage, Reply, parse_request
from lightning_loco.peers.tcp_link import TcpLink
from lightning_loco.peers.transfer import Assembly, Transfer
from lightning_loco.peers.zmtp import MOST_FRAMES, Handshake
from tests.peers.flooder import frame, read
from tests.peers.helpers import MODEL, open_files, peers, right_answer

PATIENCE_S = 5.0
PING = b"\x04\x07\x04PING\0\0"
LONGEST = 4000


class Pair(NamedTuple):
    """A link that has asked, the other end of it, and the frames of the right answer."""

    link: TcpLink
    there: socket.socket
    right: list[bytes]
    transfer: Transfer
    assembly: Assembly

    def receive(self) -> Reply:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            reply = self.link.receive(self.transfer)
            if reply is not None:
                return reply
            self.link.wait(0.1)
        raise AssertionError("no reply has come")

    def receive_until_broken(self) -> None:
        while True:
            with contextlib.suppress(MalformedMessage):
                self.receive()


@contextlib.contextmanager
def asking() -> Iterator[Pair]:
    before = open_files()
    (peer,) = peers(1)
    assembly = Assembly(MODEL)
    transfer = Transfer(MODEL, assembly, LONGEST, 1)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((peer.host, peer.port)))
        link = TcpLink(peer, LONGEST)
        stack.callback(link.close)
        there = stack.enter_context(server.accept()[0])
        there.settimeout(PATIENCE_S)
        for request in transfer.requests():
            link.send(request)
        there.sendall(Handshake(b"ROUTER").outgoing)
        link.wait(PATIENCE_S)
        assert link.receive(transfer) is None
        read(there, len(Handshake(b"DEALER").outgoing))
        asked = parse_request(read(there, read(there, 2)[1]))
        yield Pair(link, there, right_answer(asked, MODEL.total_bytes, 2.0), transfer, assembly)
    assert open_files() <= before


@pytest.fixture
def pair() -> Iterator[Pair]:
    with asking() as pair:
        yield pair


def test_a_reply_that_comes_bit_by_bit_is_put_together(pair: Pair) -> None:
    sent = frame(pair.right[0], has_more=True) + frame(pair.right[1])
    for place in range(0, len(sent), 7):
        assert pair.link.receive(pair.transfer) is None
        pair.there.sendall(sent[place : place + 7])
        pair.link.wait(PATIENCE_S)
    assert pair.receive().length == LONGEST
    assert pair.assembly.params.unique().tolist() == [2.0]
    pair.link.check()


def test_long_frames_are_skipped_and_what_comes_then_is_read(pair: Pair) -> None:
    pair.there.sendall(frame(bytes(5000), has_more=True) * 10 + frame(b"end"))
    pair.there.sendall(frame(pair.right[0], has_more=True) + frame(pair.right[1]))
    with pytest.raises(MalformedMessage, match="its header has 5000 bytes"):
        pair.receive()
    assert pair.receive().length == LONGEST


def test_what_no_peer_sends_breaks_the_link(subtests: pytest.Subtests) -> None:
    for flood, text in (
        (b"\0\2hi" * 50 + PING * 20, "of another kind"),
        (frame(b"x", has_more=True) * 2 * MOST_FRAMES, "too many frames"),
        (b"\2" + (2**62).to_bytes(8, "big"), f"a frame of {2**62} bytes"),
        (b"\x08\1", "flags 8"),
    ):
        with subtests.test(text), asking() as pair:
            pair.there.sendall(flood)
            with pytest.raises(LinkBroken, match=text):
                pair.receive_until_broken()
            with pytest.raises(LinkBroken, match="no connection to"):
                pair.link.send(b"anything")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_peer_that_goes_away_breaks_the_link(pair: Pair, has_begun: bool) -> None:
    if has_begun:
        pair.there.sendall(frame(pair.right[0], has_more=True) + frame(pair.right[1])[:100])
        pair.link.wait(PATIENCE_S)
        assert pair.link.receive(pair.transfer) is None
    reset = struct.pack("ii", 1, 0)
    pair.there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    pair.there.close()
    with pytest.raises(LinkBroken):
        pair.receive()
    with pytest.raises(LinkBroken):
        pair.link.check()


@pytest.mark.parametrize("count", [1, 200])
def test_what_nobody_has_asked_for_or_does_not_end_breaks_an_idle_link(
    pair: Pair, count: int
) -> None:
    sent = frame(pair.right[0], has_more=True) + frame(pair.right[1])
    pair.there.sendall(sent + sent[:count])
    pair.receive()
    pair.transfer.restart()
    if count > 1:
        with pytest.raises(MalformedMessage):
            pair.receive()
    else:
        pair.link.wait(PATIENCE_S)
        assert pair.link.receive(pair.transfer) is None
    with pytest.raises(LinkBroken, match="nobody has asked for"):
        pair.link.check()


def test_a_name_that_nobody_knows_breaks_the_link_at_once() -> None:
    (peer,) = peers(1)
    link = TcpLink(peer._replace(host="nowhere.invalid"))
    with pytest.raises(LinkBroken, match="at tcp://nowhere.invalid"):
        link.check()
    link.close()
