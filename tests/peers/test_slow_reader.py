"""Fetches on slower links: as late as foretold, nobody waits, too late is a timeout."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import Link, PairwiseAverage, PairwiseEngine
from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.comm import WorkerGroup
from lightning_loco.comm.links import as_links
from lightning_loco.peers import slow_reader
from lightning_loco.peers.settings import PairwiseSettings
from lightning_loco.peers.slow_reader import fetch_seconds
from tests.algorithms.toys import Point
from tests.limits import LONG_S, SOON_S
from tests.peers.helpers import fetch, make_node, peers, two_nodes, wait_until_ended
from tests.pool import Pool

NUMEL = 250_000
SLOW = Link(mbit_per_s=16, latency_s=0.05)
FORETOLD = 0.5 + 2 * 0.05


def after(seconds: float) -> Any:
    return lambda peer, num_bytes, count: seconds


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long the readers' threads have been told to sleep."""
    found = []

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            found.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(slow_reader, "threading", SimpleNamespace(Event=Noted))
    return found


def test_a_fetch_ends_when_it_would_there(sleeps: list[float]) -> None:
    with two_nodes(slow=after(0.4), fetch_timeout_s=LONG_S) as (here, there):
        there.publish(torch.full((1000,), 3.0), Tag(1, 1))
        began = time.monotonic()
        received = fetch(here)
        assert 0.39 <= time.monotonic() - began < SOON_S
        (slept_s,) = sleeps
        assert slept_s <= 0.4
        assert received is not None
        assert received.params.tolist() == [3.0] * 1000
        assert (received.emulated_s, received.fetch_s) == (0.4, 0.4)
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


def test_what_would_take_longer_than_the_timeout_is_one(sleeps: list[float]) -> None:
    with two_nodes(slow=after(LONG_S), fetch_timeout_s=0.5) as (here, there):
        there.publish(torch.ones(1000), Tag(1, 1))
        began = time.monotonic()
        assert fetch(here) is None
        assert 0.49 <= time.monotonic() - began < SOON_S
        wait_until_ended(here)
        assert (here.statistics.fetches, here.statistics.timeouts) == (0, 1)
        assert max(sleeps, default=0.0) <= 0.5


def test_neither_a_short_wait_nor_closing_waits_for_the_link(sleeps: list[float]) -> None:
    with two_nodes(slow=after(LONG_S), fetch_timeout_s=2 * LONG_S) as (here, there):
        there.publish(torch.ones(1000), Tag(1, 1))
        began = time.monotonic()
        here.start_fetch()
        assert not here.has_ended
        while not sleeps:
            assert time.monotonic() - began < SOON_S
            assert here.wait(timeout_s=0.1) is None
        assert here.wait(timeout_s=0.1) is None
        assert not here.has_ended
    assert time.monotonic() - began < SOON_S
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
