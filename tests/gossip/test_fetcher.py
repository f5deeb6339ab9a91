"""Fetches: which peer is tried, for how long, and what is returned."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import Link, PairwiseAverage, PairwiseEngine
from lightning_loco._util.background import run_in_thread
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.costs import as_links
from lightning_loco.distributed import WorkerGroup
from lightning_loco.gossip import NodeListDiscovery, Peer, Received, StoreDiscovery, fetch_decisions
from lightning_loco.gossip.fetch_decisions import FetchDecisions, FetcherStopped
from lightning_loco.gossip.fetcher import Fetcher, FetchingThread
from lightning_loco.gossip.node import make_emulated_duration
from lightning_loco.gossip.peer_selection import PeerDiscovery, PeerSelector
from lightning_loco.gossip.protocol import (
    NOTHING_PUBLISHED,
    OTHER_MODEL,
    PARAMETERS,
    ModelId,
    ReplyHeader,
    pack_reply,
)
from lightning_loco.gossip.settings import PairwiseSettings
from tests.harness.gossip_nodes import (
    DPWA,
    FORMAT,
    TAG,
    fetch,
    make_node,
    peers,
    replying,
    serving,
    silent,
    two_nodes,
    valid_reply,
    wait_until_ended,
)
from tests.harness.guards import open_files, threads_named
from tests.harness.limits import HARNESS_S, LONG_S, SOON_S, wait_until
from tests.harness.manual_clock import ManualClock
from tests.harness.pool import Pool
from tests.harness.sockets import message, raw_server
from tests.harness.toys import Point

NUMEL = 250_000
SLOW = Link(mbit_per_s=16, latency_s=0.05)
EXPECTED_S = 0.5 + 2 * 0.05


@contextlib.contextmanager
def fetching(nodes: list[Peer], **settings: Any) -> Iterator[tuple[Fetcher, PeerSelector]]:
    """Make a fetcher for the first node, to be used in this thread."""
    discovery = NodeListDiscovery(nodes, nodes[0].name)
    selector = PeerSelector(discovery.names, seed=0)
    fetcher = Fetcher(FetchDecisions(FORMAT, selector, **settings), discovery)
    try:
        yield fetcher, selector
    finally:
        fetcher.stop()
        fetcher.close()


@contextlib.contextmanager
def request_received(server: socket.socket) -> Iterator[None]:
    """Enter the context when a request has arrived at a silent server."""
    server.settimeout(HARNESS_S)
    connection, _ = server.accept()
    with connection:
        connection.settimeout(HARNESS_S)
        assert connection.recv(1)
        yield


def fetch_now(fetcher: Fetcher, limit_s: float = HARNESS_S) -> Received | None:
    return fetcher.fetch(time.monotonic() + limit_s)


def test_latest_snapshot_of_a_peer_is_fetched_repeatedly() -> None:
    nodes = peers(2)
    with serving(nodes[1]) as (_, snapshots), fetching(nodes) as (fetcher, selector):
        selector.record_failure("p1")
        for count in range(1, 4):
            flat = torch.randn(1000)
            snapshots.publish(flat, Tag(count, 0.5))
            received = fetch_now(fetcher)
            assert received is not None
            assert torch.equal(received.params, flat)
            assert (received.tag, received.peer) == (Tag(count, 0.5), "p1")
            assert received.received_bytes == 4000
            assert (fetcher.decisions.counts.fetches, fetcher.decisions.counts.bytes_received) == (
                count,
                4000 * count,
            )
            assert selector.scores == {"p1": 900 + 10 * count}


def test_peer_without_parameters_keeps_its_score() -> None:
    nodes = peers(2)
    with serving(nodes[1]), fetching(nodes) as (fetcher, selector):
        assert fetch_now(fetcher) is None
        assert fetcher.decisions.counts.empty == 1
        assert selector.scores == {"p1": 1000}


@pytest.mark.parametrize(("limit_s", "fetch_timeout_s"), [(0.2, LONG_S), (LONG_S, 0.2)])
def test_fetch_from_a_silent_peer_ends_at_the_deadline_or_the_timeout(
    limit_s: float, fetch_timeout_s: float
) -> None:
    nodes, clock = peers(2), ManualClock()
    settings = {"fetch_timeout_s": fetch_timeout_s, "clock": clock}
    with silent(nodes[1]) as server, fetching(nodes, **settings) as (fetcher, selector):
        future = run_in_thread(lambda: fetcher.fetch(limit_s))
        with request_received(server):
            clock.advance(0.19)
            clock.wait_until_read()
            assert not future.done()
            clock.advance(0.02)
            assert future.result(HARNESS_S) is None
        assert fetcher.decisions.counts.timeouts == 1
        assert selector.scores == {"p1": 900}


def test_next_peer_is_tried_after_half_of_the_timeout() -> None:
    nodes, clock = peers(3), ManualClock()
    with (
        silent(nodes[1]) as server,
        serving(nodes[2], 2.0),
        fetching(nodes, fetch_timeout_s=0.8, clock=clock) as (fetcher, selector),
    ):
        for _ in range(3):
            selector.record_failure("p2")  # so that the silent one is tried first
        future = run_in_thread(lambda: fetcher.fetch(0.8))
        with request_received(server):
            clock.advance(0.39)
            clock.wait_until_read()
            assert not future.done()
            clock.advance(0.02)
            received = future.result(HARNESS_S)
        assert received is not None
        assert received.peer == "p2"
        assert received.fetch_s == pytest.approx(0.41)
        assert fetcher.decisions.counts.timeouts == 1


def test_one_fetch_tries_at_most_three_peers() -> None:
    with fetching(peers(6)) as (fetcher, selector):
        assert fetch_now(fetcher) is None
        assert fetcher.decisions.counts.refused == 3
        assert sorted(selector.scores.values()) == [900, 900, 900, 1000, 1000]


def test_no_peer_is_tried_after_the_deadline() -> None:
    nodes = peers(2)
    with serving(nodes[1], 1.0) as (server, _), fetching(nodes) as (fetcher, selector):
        assert fetch_now(fetcher, -1.0) is None
        assert server.bytes_sent == 0
        assert selector.scores == {"p1": 1000}


@pytest.mark.parametrize(
    ("kind", "count", "score"), [(NOTHING_PUBLISHED, "empty", 1000), (OTHER_MODEL, "refused", 900)]
)
def test_reply_without_parameters_ends_the_fetch_immediately(
    kind: bytes, count: str, score: int
) -> None:
    nodes = peers(2)
    with (
        replying(nodes[1].port, lambda requested: (pack_reply(ReplyHeader(kind, requested)), b"")),
        fetching(nodes, fetch_timeout_s=LONG_S, clock=ManualClock()) as (fetcher, selector),
    ):
        future = run_in_thread(lambda: fetcher.fetch(LONG_S))
        assert future.result(HARNESS_S) is None  # the clock does not advance
        assert fetcher.decisions.counts.timeouts == 0
        assert getattr(fetcher.decisions.counts, count) == 1
        assert selector.scores == {"p1": score}


def test_unexpected_replies_are_malformed(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    ones = bytes(torch.ones(1000).numpy().tobytes())
    model_id = FORMAT.model_id
    rows = {
        "no valid header": (b"nonsense", ones),
        "another model": (
            pack_reply(ReplyHeader(PARAMETERS, model_id._replace(schema_checksum=1))),
            ones,
        ),
        "another encoding": (
            pack_reply(ReplyHeader(PARAMETERS, model_id._replace(encoding_checksum=1))),
            ones,
        ),
        "a short body": (pack_reply(ReplyHeader(PARAMETERS, model_id)), ones[:-4]),
        "a long body": (pack_reply(ReplyHeader(PARAMETERS, model_id)), ones + bytes(4)),
        "no body": (pack_reply(ReplyHeader(PARAMETERS, model_id)), b""),
        "a body though nothing is published": (
            pack_reply(ReplyHeader(NOTHING_PUBLISHED, model_id)),
            ones,
        ),
        "a body of another model": (pack_reply(ReplyHeader(OTHER_MODEL, model_id)), ones),
    }
    for name, reply in rows.items():
        caplog.clear()
        nodes = peers(2)
        with (
            subtests.test(name),
            replying(nodes[1].port, lambda requested, reply=reply: reply),
            fetching(nodes) as (fetcher, selector),
        ):
            for count in (1, 2, 3):
                assert fetch_now(fetcher) is None
                assert (fetcher.decisions.counts.malformed, fetcher.decisions.counts.refused) == (
                    count,
                    count,
                )
            assert selector.scores == {"p1": 700}
            (record,) = caplog.records
            assert record.getMessage().startswith("Reading from peer p1 failed: ")


def test_slow_peer_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_decisions, "CHUNK_BYTES", 400)
    nodes, clock = peers(2), ManualClock()
    header, body = valid_reply(FORMAT.model_id, FORMAT.total_bytes, 1.0)
    with (
        raw_server(nodes[1].port, message(header, body)[:-3000]),
        fetching(nodes, fetch_timeout_s=0.25, clock=clock) as (fetcher, _),
    ):
        for count in (800, 1600):
            future = run_in_thread(lambda: fetcher.fetch(clock.now() + 0.25))
            wait_until(
                lambda c=count: fetcher.decisions.counts.bytes_received >= c, "nothing has arrived"
            )
            clock.advance(0.3)
            assert future.result(HARNESS_S) is None
        assert fetcher.decisions.counts.timeouts == 2
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "only 800 of 4000 bytes arrived in fetch_timeout_s=0.25. Raise it" in record.getMessage()


def test_fetch_can_be_stopped_from_another_thread() -> None:
    nodes, settings = peers(2), {"fetch_timeout_s": LONG_S, "clock": ManualClock()}
    with silent(nodes[1]) as server, fetching(nodes, **settings) as (fetcher, _):
        future = run_in_thread(lambda: fetcher.fetch(LONG_S))
        with request_received(server):
            fetcher.stop()
            with pytest.raises(FetcherStopped):
                future.result(HARNESS_S)
        with pytest.raises(FetcherStopped):
            fetcher.fetch(LONG_S)
        assert (fetcher.decisions.counts.errors, fetcher.decisions.counts.timeouts) == (0, 0)


@pytest.mark.parametrize("fetch_timeout_s", [0, -1.0, float("nan")])
def test_timeout_must_be_positive(fetch_timeout_s: float) -> None:
    with (
        pytest.raises(ValueError, match="fetch_timeout_s must be positive"),
        fetching(peers(2), fetch_timeout_s=fetch_timeout_s),
    ):
        pass


# The thread.


def make_thread(discovery: PeerDiscovery, fetch_timeout_s: float = HARNESS_S) -> FetchingThread:
    selector = PeerSelector(discovery.names, seed=0)
    decisions = FetchDecisions(FORMAT, selector, fetch_timeout_s=fetch_timeout_s)
    return FetchingThread(Fetcher(decisions, discovery))


@contextlib.contextmanager
def running(nodes: list[Peer], fetch_timeout_s: float = HARNESS_S) -> Iterator[FetchingThread]:
    thread = make_thread(NodeListDiscovery(nodes, nodes[0].name), fetch_timeout_s)
    thread.start()
    try:
        yield thread
    finally:
        thread.close()


def test_result_of_a_fetch_is_returned_once() -> None:
    nodes = peers(2)
    with serving(nodes[1], 3.0), running(nodes) as thread:
        assert thread.has_ended
        assert thread.wait() is None
        thread.start_fetch()
        received = thread.wait()
        assert received is not None
        assert received.params.tolist() == [3.0] * 1000
        assert thread.has_ended
        assert thread.wait() is None
        assert thread.decisions.counts.fetches == 1


def test_result_is_dropped_when_the_next_fetch_starts() -> None:
    nodes = peers(2)
    with serving(nodes[1], 1.0) as (_, snapshots), running(nodes) as thread:
        thread.start_fetch()
        wait_until_ended(thread)
        snapshots.publish(torch.full((1000,), 2.0), Tag(2, 2))
        thread.start_fetch()
        received = thread.wait()
        assert received is not None
        assert received.tag.clock == 2
        assert thread.wait() is None


def test_fetch_continues_after_a_short_wait() -> None:
    released = threading.Event()

    def make_reply(requested: ModelId) -> tuple[bytes, bytes]:
        released.wait(LONG_S)
        return valid_reply(requested, FORMAT.total_bytes, 3.0)

    nodes = peers(2)
    with replying(nodes[1].port, make_reply), running(nodes, fetch_timeout_s=LONG_S) as thread:
        thread.start_fetch()
        for _ in range(3):
            assert thread.wait(0.02) is None
            assert not thread.has_ended
        released.set()
        received = thread.wait()
        assert received is not None
        assert received.params.tolist() == [3.0] * 1000


def test_wait_for_a_silent_peer_ends_with_the_timeout() -> None:
    nodes = peers(2)
    with silent(nodes[1]), running(nodes, fetch_timeout_s=0.2) as thread:
        started = time.monotonic()
        thread.start_fetch()
        assert thread.wait(0.02) is None
        assert thread.wait() is None
        assert 0.19 < time.monotonic() - started < SOON_S
        wait_until_ended(thread)
        assert thread.decisions.counts.timeouts == 1


def test_wait_ends_with_the_timeout_if_the_discovery_hangs() -> None:
    released = threading.Event()

    class Slow(StoreDiscovery):
        def find(self, name: str) -> Peer | None:
            released.wait(LONG_S)
            return super().find(name)

    thread = make_thread(Slow(torch.distributed.HashStore(), 0, 2), fetch_timeout_s=0.2)
    thread.start()
    thread.start_fetch()
    started = time.monotonic()
    assert thread.wait() is None
    assert time.monotonic() - started < SOON_S
    assert not thread.has_ended
    released.set()
    thread.close()


def test_unexpected_error_ends_the_thread_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(PeerSelector):
        def choose(self, exclude: object = ()) -> str | None:
            raise ArithmeticError("no dice")

    discovery = NodeListDiscovery(peers(2), "p0")
    selector = Broken(discovery.names, seed=0)
    thread = FetchingThread(
        Fetcher(FetchDecisions(FORMAT, selector, fetch_timeout_s=0.2), discovery)
    )
    thread.start()
    thread.start_fetch()
    assert thread.wait() is None
    thread.join(5)
    assert not thread.is_alive()
    assert "no longer read from peers" in caplog.text
    assert "no dice" in caplog.text
    thread.close()


def test_close_aborts_the_fetch_and_ends_a_wait() -> None:
    nodes = peers(2)
    with silent(nodes[1]):
        started = time.monotonic()
        with running(nodes, fetch_timeout_s=LONG_S) as thread:
            thread.start_fetch()
            assert thread.wait(0.1) is None
        assert not thread.is_alive()
        assert thread.wait() is None
        assert time.monotonic() - started < SOON_S
        assert not thread.has_ended
        assert thread.decisions.counts.timeouts == 0


@pytest.mark.parametrize("runs", [False, True])
def test_no_thread_and_no_file_is_left_after_close(runs: bool) -> None:
    nodes = peers(2)
    for _ in range(2):  # the first iteration may load libraries
        before = open_files()
        thread = make_thread(NodeListDiscovery(nodes, "p0"))
        if runs:
            thread.start()
        thread.close()
        thread.close()
        assert threads_named("loco-peer", "loco-server") == []
    assert open_files() <= before


# Emulated links.


def after(seconds: float) -> Any:
    return lambda peer, num_bytes, count: seconds


@contextlib.contextmanager
def fetching_later(seconds: float, **settings: Any) -> Iterator[tuple[Fetcher, ManualClock]]:
    """Make a fetcher whose only peer has published, on an emulated link."""
    nodes, clock = peers(2), ManualClock()
    with (
        serving(nodes[1], 3.0),
        fetching(nodes, clock=clock, duration=after(seconds), **settings) as (fetcher, _),
    ):
        yield fetcher, clock


def test_fetch_ends_when_it_would_on_the_emulated_link() -> None:
    with fetching_later(0.5, fetch_timeout_s=LONG_S) as (fetcher, clock):
        future = run_in_thread(lambda: fetcher.fetch(LONG_S))
        clock.wait_until_waiting()
        assert clock.asked == [0.5]
        clock.advance(0.5)
        received = future.result(HARNESS_S)
        assert received is not None
        assert received.params.tolist() == [3.0] * 1000
        assert received.fetch_s == 0.5
        assert fetcher.decisions.counts.fetches == 1


def test_node_emulates_a_link() -> None:
    with two_nodes(emulated_duration=after(0.4), fetch_timeout_s=LONG_S) as (here, there):
        there.publish(torch.full((1000,), 3.0), Tag(1, 1))
        received = fetch(here)
        assert received is not None
        assert received.params.tolist() == [3.0] * 1000
        assert received.fetch_s >= 0.4
        assert here.statistics.wait_s >= 0.39
        assert here.statistics.fetches == 1


def test_emulated_duration_gets_peer_bytes_and_number() -> None:
    seen = []

    def record(peer: str, num_bytes: int, count: int) -> float:
        seen.append((peer, num_bytes, count))
        return 0.0

    nodes = peers(2)
    here, there = make_node(nodes, 0, emulated_duration=record), make_node(nodes, 1)
    there.publish(torch.ones(1000), TAG)
    assert fetch(here) is not None
    assert fetch(here) is not None
    assert seen == [("p1", 4000, 0), ("p1", 4000, 1)]
    here.close()
    there.close()


def test_fetch_longer_than_the_timeout_is_counted_as_timeout() -> None:
    with fetching_later(LONG_S, fetch_timeout_s=0.5) as (fetcher, clock):
        future = run_in_thread(lambda: fetcher.fetch(0.5))
        clock.wait_until_waiting()
        assert clock.asked == [0.5]
        clock.advance(0.5)
        assert future.result(HARNESS_S) is None
        assert (fetcher.decisions.counts.fetches, fetcher.decisions.counts.timeouts) == (0, 1)


def test_short_wait_and_close_do_not_wait_for_the_emulated_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fetching_later(LONG_S, fetch_timeout_s=2 * LONG_S) as (fetcher, clock):
        thread = FetchingThread(fetcher)
        thread.start()
        thread.start_fetch()
        clock.wait_until_waiting()
        assert thread.wait(timeout_s=0.1) is None
        assert not thread.has_ended
        thread.close()  # the clock does not advance
    assert not caplog.records
    assert threads_named("loco-peer", "loco-server") == []


def test_each_pair_of_peers_has_its_own_link() -> None:
    links = as_links([Link(8), Link(80), Link(800, 0.5)])
    nodes = [{"name": name, "host": "127.0.0.1", "port": 45000 + i} for i, name in enumerate("abc")]
    settings = PairwiseSettings(PairwiseAverage(), nodes, "b", link=links).prepare(1)
    seconds = make_emulated_duration(settings, WorkerGroup(0, 1))
    assert seconds is not None
    assert seconds("a", 10**6, 0) == pytest.approx(1.0)
    assert seconds("c", 10**6, 0) == pytest.approx(0.1 + 2 * 0.5)
    ranks = make_emulated_duration(
        PairwiseSettings(PairwiseAverage(), link=links), WorkerGroup(2, 3)
    )
    assert ranks is not None
    assert ranks("worker0", 10**6, 0) == pytest.approx(1.0 + 2 * 0.5)
    assert make_emulated_duration(PairwiseSettings(PairwiseAverage()), WorkerGroup(2, 3)) is None


def test_number_of_links_must_fit_the_workers() -> None:
    settings = PairwiseSettings(PairwiseAverage(), link=as_links(["wan"] * 3))
    with pytest.raises(ValueError, match="link has 3 entries, .* there are 2 workers"):
        settings.prepare(2)
    assert settings.prepare(3).describe() == PairwiseSettings(PairwiseAverage()).describe()
    with pytest.raises(TypeError, match=r"link must be as_links\('wan'\) or None, got 'wan'"):
        PairwiseSettings(PairwiseAverage(), link="wan")  # type: ignore[arg-type]


def gossip(rank: int, world: int, waits: bool) -> tuple[Tensor, list[float], float, float]:
    """Blend once; return value, times of the steps, duration and time spent waiting."""
    model = Point(torch.full((NUMEL,), float(rank)))
    engine = PairwiseEngine(
        model, PairwiseAverage(**DPWA | {"factor": 0.25}), link=SLOW, fetch_timeout_s=LONG_S
    )
    model.value.data.fill_(rank)
    group = engine.worker.group
    engine._clock = 1.0
    engine._publish(engine._exchange.publisher)
    group.gather_objects(None)
    began, steps = time.monotonic(), []
    engine.update_send()
    if waits:
        assert engine.update_wait() == 0.25
    else:
        while not engine.step():
            time.sleep(0.02)
            steps.append(time.monotonic() - began)
    seconds = time.monotonic() - began
    group.gather_objects(None)
    engine.close()
    return model.value.data[:1].clone(), steps, seconds, engine.statistics.wait_s


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_blend_after_the_emulated_duration(pool: Pool, waits: bool) -> None:
    for rank, found in enumerate(pool.run(gossip, waits, world=2)):
        value, steps, seconds, waited_s = found
        assert value.item() == [0.25, 0.75][rank]
        assert EXPECTED_S - 0.01 <= seconds < SOON_S
        assert (waited_s > EXPECTED_S / 2) == waits
        assert waits or len(steps) > 5
