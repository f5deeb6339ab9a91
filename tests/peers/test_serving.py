"""Serving: what a bare socket is told when it asks, and what happens to the port."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

import pytest
import torch
import zmq

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.protocol import (
    DATA,
    EMPTY,
    GONE,
    LATEST,
    OTHER_MODEL,
    Reply,
    Request,
    pack_request,
    parse_reply,
)
from lightning_loco.peers.publications import Publications
from lightning_loco.peers.serving import ServingThread
from tests.limits import SOON_S
from tests.peers.helpers import (
    CHECKSUM,
    HOST,
    MODEL,
    dealer,
    open_files,
    peer_threads,
    peers,
    serving,
)

WHOLE = Request(CHECKSUM, MODEL.wire_format, 7, LATEST, 0, 4000)


def ask(connection: zmq.Socket[bytes], request: Request) -> tuple[Reply, list[bytes]]:
    """The reply to a request, and the frames after its header."""
    connection.send(pack_request(request))
    assert connection.poll(5000), "no reply has come"
    header, *frames = connection.recv_multipart()
    return parse_reply(header), frames


def test_parameters_are_served_as_they_were_published() -> None:
    (peer,) = peers(1)
    with serving(peer) as (thread, publications), dealer(peer.port) as connection:
        flat = torch.randn(1000)
        publications.publish(flat, Tag(3, 0.5))
        reply, frames = ask(connection, WHOLE)
        expected = flat.numpy().tobytes()
        assert frames == [expected]
        assert reply == Reply(DATA, CHECKSUM, MODEL.wire_format, 7, 1, 0, 4000, 4000, Tag(3, 0.5))
        reply, frames = ask(connection, WHOLE._replace(request_id=2**64 - 1, offset=1600, length=8))
        assert frames == [expected[1600:1608]]
        assert (reply.request_id, reply.offset, reply.length) == (2**64 - 1, 1600, 8)
        assert thread.bytes_sent == 4008
        assert thread.malformed == 0


def test_a_reader_goes_on_with_the_publication_that_it_began_with() -> None:
    (peer,) = peers(1)
    with serving(peer, 1.0) as (_, publications), dealer(peer.port) as connection:
        half = WHOLE._replace(length=2000)
        reply, frames = ask(connection, half)
        for value in (2.0, 3.0, 4.0):
            publications.publish(torch.full((1000,), value), Tag(value, value))
        rest = half._replace(publication=reply.publication, offset=2000)
        _, more = ask(connection, rest)
        served = torch.frombuffer(bytearray(frames[0] + more[0]), dtype=torch.float32)
        assert served.tolist() == [1.0] * 1000
        assert ask(connection, half)[0].tag == Tag(4.0, 4.0)


def test_who_cannot_be_served_is_told_why(subtests: pytest.Subtests) -> None:
    rows: list[tuple[float | None, dict[str, Any], int]] = [
        (None, {}, EMPTY),
        (1.0, {"publication": 2}, GONE),
        (1.0, {"checksum": 1}, OTHER_MODEL),
        (1.0, {"wire_format": 2}, OTHER_MODEL),
        (None, {"checksum": 1}, OTHER_MODEL),
        (1.0, {"checksum": 1, "offset": 2**40}, OTHER_MODEL),  # its model may be larger
    ]
    for value, change, kind in rows:
        (peer,) = peers(1)
        with (
            subtests.test(value=value, change=change),
            serving(peer, value) as (thread, _),
            dealer(peer.port) as connection,
        ):
            reply, frames = ask(connection, WHOLE._replace(**change))
            assert (reply.kind, reply.request_id, reply.length, frames) == (kind, 7, 0, [])
            assert thread.bytes_sent == 0
            assert thread.malformed == 0


def test_what_is_no_request_gets_no_answer_and_one_line(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    for frames in (
        [b""],
        [b"nonsense"],
        [pack_request(WHOLE), b""],
        [pack_request(WHOLE._replace(offset=8))],
        [pack_request(WHOLE._replace(offset=2**64 - 1))],
    ):
        with subtests.test(frames=frames):
            caplog.clear()
            (peer,) = peers(1)
            with serving(peer, 1.0) as (thread, _), dealer(peer.port) as connection:
                connection.send_multipart(frames)
                connection.send_multipart(frames)
                reply, _ = ask(connection, WHOLE)  # the first answer is the one to this
                assert reply.kind == DATA
                assert thread.malformed == 2
            (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
            assert f"Dropped a message from 127.0.0.1 on port {peer.port}" in record.getMessage()


def test_any_free_port_is_taken_if_none_is_wanted() -> None:
    thread = ServingThread(MODEL, Publications(MODEL))
    thread.start()
    with dealer(thread.port) as connection:
        assert ask(connection, WHOLE)[0].kind == EMPTY
    thread.close()


def test_close_ends_the_thread_and_frees_the_port_whether_it_ran_or_not() -> None:
    (peer,) = peers(1)
    before = open_files()
    for runs in (False, True, True):
        thread = ServingThread(MODEL, Publications(MODEL), port=peer.port)
        if runs:
            thread.start()
        thread.close()
        thread.close()
        assert peer_threads() == []
        socket.create_server((HOST, peer.port)).close()
    assert open_files() <= before


def test_close_does_not_wait_for_who_never_reads() -> None:
    (peer,) = peers(1)
    with dealer(peer.port) as connection:
        connection.linger = 0
        with serving(peer, 1.0) as (thread, _):
            for _ in range(100):
                connection.send(pack_request(WHOLE))
            deadline = time.monotonic() + SOON_S
            while not thread.bytes_sent and time.monotonic() < deadline:
                time.sleep(0.01)
            assert thread.bytes_sent
            started = time.monotonic()
        assert time.monotonic() - started < SOON_S
        assert not thread.is_alive()


def test_a_taken_port_and_a_foreign_host_are_named() -> None:
    (peer,) = peers(1)
    with (
        socket.create_server((HOST, peer.port)),
        pytest.raises(RuntimeError, match=f"Port {peer.port} of {HOST} is taken"),
    ):
        ServingThread(MODEL, Publications(MODEL), port=peer.port)
    with pytest.raises(RuntimeError, match="Cannot listen on port 0 of '192.0.2.1'"):
        ServingThread(MODEL, Publications(MODEL), host="192.0.2.1")
