"""A fetch: who is asked, for how long, and what comes of it."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.background import begin
from lightning_loco.peers import NodeDirectory, Peer, Received
from lightning_loco.peers.flow import FlowControl
from lightning_loco.peers.protocol import EMPTY, GONE, OTHER_MODEL, Request, pack_reply
from lightning_loco.peers.reader import Reader, ReaderStopped
from tests.limits import HARNESS_S, LONG_S
from tests.manual_clock import ManualClock
from tests.peers.helpers import MODEL, answering, peers, right_answer, right_reply, serving, silent


@contextlib.contextmanager
def reading(nodes: list[Peer], **settings: Any) -> Iterator[tuple[Reader, FlowControl]]:
    """A reader in this thread, for the first of the nodes."""
    directory = NodeDirectory(nodes, nodes[0].name)
    flow = FlowControl(directory.names, seed=0)
    reader = Reader(MODEL, directory, flow, **settings)
    try:
        yield reader, flow
    finally:
        reader.stop()
        reader.close()


@contextlib.contextmanager
def asked(server: socket.socket) -> Iterator[None]:
    """From when a reader has sent something to somebody who is silent."""
    server.settimeout(HARNESS_S)
    connection, _ = server.accept()
    with connection:
        connection.settimeout(HARNESS_S)
        assert connection.recv(1)
        yield


def fetch(reader: Reader, patience_s: float = 5.0) -> Received | None:
    return reader.fetch(time.monotonic() + patience_s)


def test_what_a_peer_has_published_is_read_again_and_again() -> None:
    nodes = peers(2)
    with serving(nodes[1]) as (_, publications), reading(nodes, chunk_bytes=800) as (reader, flow):
        flow.failed("p1")
        for count in range(1, 4):
            flat = torch.randn(1000)
            publications.publish(flat, Tag(count, 0.5))
            received = fetch(reader)
            assert received is not None
            assert torch.equal(received.params, flat)
            assert (received.tag, received.peer) == (Tag(count, 0.5), "p1")
            assert received.received_bytes == 4000
            assert (reader.counts.fetches, reader.counts.bytes_received) == (count, 4000 * count)
            assert flow.scores == {"p1": 900 + 10 * count}


def test_a_peer_without_parameters_keeps_its_score() -> None:
    nodes = peers(2)
    with serving(nodes[1]), reading(nodes) as (reader, flow):
        assert fetch(reader) is None
        assert reader.counts.empty == 1
        assert flow.scores == {"p1": 1000}


@pytest.mark.parametrize(("patience_s", "fetch_timeout_s"), [(0.2, LONG_S), (LONG_S, 0.2)])
def test_a_silent_peer_is_left_at_the_deadline_or_after_the_timeout(
    patience_s: float, fetch_timeout_s: float
) -> None:
    nodes, clock = peers(2), ManualClock()
    settings = {"fetch_timeout_s": fetch_timeout_s, "clock": clock}
    with silent(nodes[1]) as server, reading(nodes, **settings) as (reader, flow):
        fetching = begin(lambda: reader.fetch(patience_s))
        with asked(server):
            clock.advance(0.19)
            clock.wait_until_read()
            assert not fetching.done()
            clock.advance(0.02)
            assert fetching.result(HARNESS_S) is None
        assert reader.counts.timeouts == 1
        assert flow.scores == {"p1": 900}


def test_of_two_peers_a_silent_one_is_left_after_half_of_the_time() -> None:
    nodes, clock = peers(3), ManualClock()
    with (
        silent(nodes[1]) as server,
        serving(nodes[2], 2.0),
        reading(nodes, fetch_timeout_s=0.8, clock=clock) as (reader, flow),
    ):
        for _ in range(3):
            flow.failed("p2")  # so that the silent one is asked first
        fetching = begin(lambda: reader.fetch(0.8))
        with asked(server):
            clock.advance(0.39)
            clock.wait_until_read()
            assert not fetching.done()
            clock.advance(0.02)
            received = fetching.result(HARNESS_S)
        assert received is not None
        assert received.peer == "p2"
        assert received.fetch_s == pytest.approx(0.41)
        assert reader.counts.timeouts == 1


def test_at_most_three_peers_are_asked_in_one_fetch() -> None:
    with reading(peers(6)) as (reader, flow):
        assert fetch(reader) is None
        assert reader.counts.refused == 3
        assert sorted(flow.scores.values()) == [900, 900, 900, 1000, 1000]


def test_after_the_deadline_nobody_is_asked() -> None:
    nodes = peers(2)
    with serving(nodes[1], 1.0) as (thread, _), reading(nodes) as (reader, flow):
        assert fetch(reader, -1.0) is None
        assert thread.bytes_sent == 0
        assert flow.scores == {"p1": 1000}


def test_a_publication_that_is_gone_in_the_middle_is_begun_anew() -> None:
    asked: list[Request] = []

    def answer(request: Request) -> Iterator[list[bytes]]:
        asked.append(request)
        if len(asked) == 2:
            reply = right_reply(request, MODEL.total_bytes)
            yield [pack_reply(reply._replace(kind=GONE, length=0))]
        else:
            yield right_answer(request, MODEL.total_bytes, 1.0 if len(asked) == 1 else 2.0)

    nodes = peers(2)
    with (
        answering(nodes[1].port, answer),
        reading(nodes, chunk_bytes=2000, window=1) as (reader, _),
    ):
        received = fetch(reader)
        assert received is not None
        assert received.params.tolist() == [2.0] * 1000
        assert [request.offset for request in asked] == [0, 2000, 0, 2000]
        assert reader.counts.bytes_received == 6000


@pytest.mark.parametrize(
    ("kind", "count", "score"), [(EMPTY, "empty", 1000), (OTHER_MODEL, "refused", 900)]
)
def test_an_answer_without_data_ends_the_fetch_at_once(kind: int, count: str, score: int) -> None:
    def answer(request: Request) -> Iterator[list[bytes]]:
        reply = right_reply(request, MODEL.total_bytes, request.publication)
        yield [pack_reply(reply._replace(kind=kind, length=0))]

    nodes = peers(2)
    with (
        answering(nodes[1].port, answer),
        reading(nodes, fetch_timeout_s=LONG_S, clock=ManualClock()) as (reader, flow),
    ):
        fetching = begin(lambda: reader.fetch(LONG_S))
        assert fetching.result(HARNESS_S) is None  # the clock stands still
        assert reader.counts.timeouts == 0
        assert getattr(reader.counts, count) == 1
        assert flow.scores == {"p1": score}


def test_a_peer_that_is_too_slow_is_named_once_with_a_mend(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()

    def answer(request: Request) -> Iterator[list[bytes]]:
        clock.advance(0.1)
        yield right_answer(request, MODEL.total_bytes, 1.0)

    nodes = peers(2)
    settings = {"fetch_timeout_s": 0.25, "chunk_bytes": 400, "window": 1, "clock": clock}
    with answering(nodes[1].port, answer), reading(nodes, **settings) as (reader, _):
        for _ in range(2):
            fetching = begin(lambda: reader.fetch(clock.now() + 0.25))
            assert fetching.result(HARNESS_S) is None
        assert reader.counts.timeouts == 2
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "only 800 of 4000 bytes came in fetch_timeout_s=0.25. Raise it" in record.getMessage()


def test_a_fetch_can_be_stopped_from_another_thread() -> None:
    nodes, settings = peers(2), {"fetch_timeout_s": LONG_S, "clock": ManualClock()}
    with silent(nodes[1]) as server, reading(nodes, **settings) as (reader, _):
        fetching = begin(lambda: reader.fetch(LONG_S))
        with asked(server):
            reader.stop()
            with pytest.raises(ReaderStopped):
                fetching.result(HARNESS_S)
        with pytest.raises(ReaderStopped):
            reader.fetch(LONG_S)
        assert (reader.counts.errors, reader.counts.timeouts) == (0, 0)


@pytest.mark.parametrize("fetch_timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(fetch_timeout_s: float) -> None:
    with (
        pytest.raises(ValueError, match="fetch_timeout_s must be positive"),
        reading(peers(2), fetch_timeout_s=fetch_timeout_s),
    ):
        pass
