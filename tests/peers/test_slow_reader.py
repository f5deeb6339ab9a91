"""Fetches on slower links: as late as foretold, nobody waits, too late is a timeout."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import Link, PairwiseAverage, PairwiseEngine
from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.background import begin
from lightning_loco.comm import WorkerGroup
from lightning_loco.comm.links import as_links
from lightning_loco.peers import NodeDirectory
from lightning_loco.peers.fetching import FetchingThread
from lightning_loco.peers.flow import FlowControl
from lightning_loco.peers.reader import Reader
from lightning_loco.peers.settings import PairwiseSettings
from lightning_loco.peers.slow_reader import SlowReader, fetch_seconds
from tests.algorithms.toys import Point
from tests.limits import HARNESS_S, LONG_S, SOON_S
from tests.manual_clock import ManualClock
from tests.peers.helpers import MODEL, fetch, make_node, peers, serving, two_nodes
from tests.pool import Pool

NUMEL = 250_000
SLOW = Link(mbit_per_s=16, latency_s=0.05)
FORETOLD = 0.5 + 2 * 0.05


def after(seconds: float) -> Any:
    return lambda peer, num_bytes, count: seconds


@contextlib.contextmanager
def reading_later(seconds: float, **settings: Any) -> Iterator[tuple[SlowReader, ManualClock]]:
    """A reader whose only peer has published, on a link on which fetches take so long."""
    nodes, clock = peers(2), ManualClock()
    directory = NodeDirectory(nodes, nodes[0].name)
    flow = FlowControl(directory.names, seed=0)
    with serving(nodes[1], 3.0):
        reader = Reader(MODEL, directory, flow, clock=clock, **settings)
        try:
            yield SlowReader(reader, after(seconds), clock=clock), clock
        finally:
            reader.close()


def test_a_fetch_ends_when_it_would_there() -> None:
    with reading_later(0.5, fetch_timeout_s=LONG_S) as (reader, clock):
        fetching = begin(lambda: reader.fetch(LONG_S))
        clock.wait_until_waiting()
        assert clock.asked == [0.5]
        clock.advance(0.5)
        received = fetching.result(HARNESS_S)
        assert received is not None
        assert received.params.tolist() == [3.0] * 1000
        assert (received.emulated_s, received.fetch_s) == (0.5, 0.5)
        assert reader.counts.fetches == 1


def test_a_node_reads_later() -> None:
    with two_nodes(slow=after(0.4), fetch_timeout_s=LONG_S) as (here, there):
        there.publish(torch.full((1000,), 3.0), Tag(1, 1))
        received = fetch(here)
        assert received is not None
        assert received.params.tolist() == [3.0] * 1000
        assert received.emulated_s == 0.4
        assert received.fetch_s >= 0.4
        assert here.statistics.wait_s >= 0.39
        assert here.statistics.fetches == 1


def test_seconds_depend_on_peer_bytes_and_number() -> None:
    asked = []

    def note(peer: str, num_bytes: int, count: int) -> float:
        asked.append((peer, num_bytes, count))
        return 0.0

    nodes = peers(2)
    here, there = make_node(nodes, 0, slow=note), make_node(nodes, 1)
    there.publish(torch.ones(1000), Tag(1, 1))
    assert fetch(here) is not None
    assert fetch(here) is not None
    assert asked == [("p1", 4000, 0), ("p1", 4000, 1)]
    here.close()
    there.close()


def test_what_would_take_longer_than_the_timeout_is_one() -> None:
    with reading_later(LONG_S, fetch_timeout_s=0.5) as (reader, clock):
        fetching = begin(lambda: reader.fetch(0.5))
        clock.wait_until_waiting()
        assert clock.asked == [0.5]
        clock.advance(0.5)
        assert fetching.result(HARNESS_S) is None
        assert (reader.counts.fetches, reader.counts.timeouts) == (0, 1)


def test_neither_a_short_wait_nor_closing_waits_for_the_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with reading_later(LONG_S, fetch_timeout_s=2 * LONG_S) as (reader, clock):
        thread = FetchingThread(reader)
        thread.start()
        thread.start_fetch()
        clock.wait_until_waiting()
        assert thread.wait(timeout_s=0.1) is None
        assert not thread.has_ended
        thread.close()  # the clock stands still
    assert not caplog.records
    assert not [one for one in threading.enumerate() if one.name.startswith("loco")]


def test_peers_have_the_links_of_their_numbers() -> None:
    links = as_links([Link(8), Link(80), Link(800, 0.5)])
    nodes = [{"name": name, "host": "127.0.0.1", "port": 45000 + i} for i, name in enumerate("abc")]
    settings = PairwiseSettings(PairwiseAverage(), nodes, "b", link=links).prepare(1)
    seconds = fetch_seconds(settings, WorkerGroup(0, 1))
    assert seconds is not None
    assert seconds("a", 10**6, 0) == pytest.approx(1.0)
    assert seconds("c", 10**6, 0) == pytest.approx(0.1 + 2 * 0.5)
    ranks = fetch_seconds(PairwiseSettings(PairwiseAverage(), link=links), WorkerGroup(2, 3))
    assert ranks is not None
    assert ranks("worker0", 10**6, 0) == pytest.approx(1.0 + 2 * 0.5)
    assert fetch_seconds(PairwiseSettings(PairwiseAverage()), WorkerGroup(2, 3)) is None


def test_links_that_do_not_fit() -> None:
    settings = PairwiseSettings(PairwiseAverage(), link=as_links(["wan"] * 3))
    with pytest.raises(ValueError, match="link has 3 entries, .* there are 2 workers"):
        settings.prepare(2)
    assert settings.prepare(3).describe() == PairwiseSettings(PairwiseAverage()).describe()
    with pytest.raises(TypeError, match=r"link must be as_links\('wan'\) or None, got 'wan'"):
        PairwiseSettings(PairwiseAverage(), link="wan")  # type: ignore[arg-type]


def gossip(rank: int, world: int, waits: bool) -> tuple[Tensor, list[float], float, float]:
    """One blend; after how long it was there, and what was waited for."""
    model = Point(torch.full((NUMEL,), float(rank)))
    engine = PairwiseEngine(model, PairwiseAverage(factor=0.25), link=SLOW, fetch_timeout_s=LONG_S)
    model.value.data.fill_(rank)
    group = engine.worker.group
    engine._clock = 1.0
    engine._serve()
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
    statistics = engine.statistics
    assert statistics.emulated_s == pytest.approx(FORETOLD)
    group.gather_objects(None)
    engine.close()
    return model.value.data[:1].clone(), steps, seconds, statistics.emulated_wait_s


@pytest.mark.parametrize("waits", [True, False])
def test_gossip_of_ranks_is_late_and_only_those_wait_who_want_to(pool: Pool, waits: bool) -> None:
    for rank, found in enumerate(pool.run(gossip, waits, world=2)):
        value, steps, seconds, waited_s = found
        assert value.item() == [0.25, 0.75][rank]
        assert FORETOLD - 0.01 <= seconds < SOON_S
        assert (waited_s > FORETOLD / 2) == waits
        assert waits or len(steps) > 5
