"""How long messages take, against plain loops over messages and links."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_loco import Link, Topology, get_topology
from lightning_loco.links.links import Links, LinkTimes, as_links

BYTES = 1_000_000


def ring_all_reduce(links: Links, n: int, message: float) -> float:
    """Each worker passes a share on to the next one, again and again, when it has got its own."""
    here, free = [0.0] * n, [0.0] * n
    for _ in range(2 * (n - 1)):
        arrives = []
        for worker in range(n):
            before = (worker - 1) % n
            link = links.between(before, worker)
            free[before] = max(free[before], here[before]) + link.seconds(message / n)
            arrives.append(max(here[worker], free[before] + link.latency_s))
        here = arrives
    return max(here)


def test_an_all_reduce_on_equal_links_is_a_ring(subtests: pytest.Subtests) -> None:
    for n in (2, 3, 4, 7):
        with subtests.test(n=n):
            links = Links(Link(80, 0.01))
            span = LinkTimes(links, n).mean(2 * (n - 1) / n * BYTES, 2 * (n - 1), 0)
            assert span.seconds == pytest.approx(ring_all_reduce(links, n, BYTES))
            assert span.busy_s == pytest.approx(2 * (n - 1) / n * 0.1)


def test_the_slowest_link_keeps_an_all_reduce_waiting(subtests: pytest.Subtests) -> None:
    """Never less than the ring takes, and hardly more where one link is by far the slowest."""
    for seed in range(10):
        with subtests.test(seed=seed):
            draw = random.Random(seed)
            n = draw.randint(2, 6)
            links = as_links([Link(draw.uniform(10, 100), draw.uniform(0, 0.01)) for _ in range(n)])
            numbers = 2 * (n - 1) / n * BYTES, 2 * (n - 1), 0
            estimate = LinkTimes(links, n).mean(*numbers).seconds
            assert ring_all_reduce(links, n, BYTES) <= estimate * (1 + 1e-9)
            worst = Links(links.default, workers=((draw.randrange(n), Link(1, 0.1)),))
            span, ring = LinkTimes(worst, n).mean(*numbers), ring_all_reduce(worst, n, BYTES)
            assert 0.9 * span.seconds <= ring <= span.seconds * (1 + 1e-9)
            assert span.busy_s == pytest.approx(8e-6 * numbers[0])


def by_messages(links: Links, n: int, worker: int, topology: Topology, t: int) -> float:
    """How long links are busy until a worker has all its messages and has sent its own."""
    matrix = topology.mixing_matrix(n, t)
    messages = [(i, j) for i, j in itertools.permutations(range(n), 2) if matrix[j, i] != 0]
    up, down = [0.0] * n, [0.0] * n
    for sender, receiver in messages:
        if links.own(sender, receiver) is None:
            up[sender] += links.of(sender).seconds(BYTES)
            down[receiver] += links.of(receiver).seconds(BYTES)
    busy = [0.0]
    for sender, receiver in messages:
        own = links.own(sender, receiver)
        if worker in (sender, receiver):
            busy.append(up[sender] if own is None else own.seconds(BYTES))
        if worker == receiver and own is None:
            busy.append(down[receiver])
    return max(busy)


def test_neighbours_share_links_with_all_that_passes(subtests: pytest.Subtests) -> None:
    names = ("ring", "star", "complete", "one_peer_exponential")
    for name, seed in itertools.product(names, range(5)):
        with subtests.test(name, seed=seed):
            draw = random.Random(seed)
            n, topology = draw.choice([2, 4, 8]), get_topology(name)
            workers = tuple((worker, Link(draw.uniform(10, 100))) for worker in range(n))
            pairs = tuple(
                (*pair, Link(draw.uniform(1, 200)))
                for pair in itertools.permutations(range(n), 2)
                if draw.random() < 0.3
            )
            links = Links(Link(1), workers, pairs)
            times = LinkTimes(links, n)
            for worker, t in itertools.product(range(n), range(3)):
                span = times.neighbors(worker, BYTES, topology, t)
                assert span.busy_s == pytest.approx(by_messages(links, n, worker, topology, t))
                assert span.latency_s == 0


def test_neighbours_are_as_late_as_the_furthest() -> None:
    links = as_links({"default": Link(100, 0.01), "pairs": {"2->0": Link(100, 0.5)}})
    times, ring = LinkTimes(links, 4), get_topology("ring")
    latencies = [times.neighbors(worker, BYTES, ring, 0).latency_s for worker in range(4)]
    assert latencies == [0.01] * 4  # on a ring of four 0 and 2 do not meet
    complete = get_topology("complete")
    latencies = [times.neighbors(worker, BYTES, complete, 0).latency_s for worker in range(4)]
    assert latencies == [0.5, 0.01, 0.01, 0.01]


def test_a_worker_alone_sends_nothing() -> None:
    times = LinkTimes(Links(Link(1, 1)), 1)
    assert times.mean(BYTES, 0, 0).seconds == 0
    assert times.neighbors(0, BYTES, get_topology("ring"), 0).seconds == 0


def test_a_fetch_goes_there_and_back() -> None:
    links = as_links([Link(80, 0.1), Link(8, 0.2)])
    span = LinkTimes(links, 2).fetch(0, 1, BYTES, 0)
    assert span.seconds == pytest.approx(1.0 + 2 * 0.2)
    apart = as_links({"default": Link(80), "pairs": {"1->0": Link(8, 0.3), "0->1": Link(1, 0.1)}})
    assert LinkTimes(apart, 2).fetch(0, 1, BYTES, 0).seconds == pytest.approx(1.0 + 0.4)


def test_jitter_is_drawn_from_seed_round_and_worker() -> None:
    def latencies(seed: int) -> list[float]:
        times = LinkTimes(Links(Link(100, 0.1, 0.05), seed=seed), 4)
        return [times.mean(BYTES, 1, t).latency_s for t in range(50)]

    drawn = latencies(0)
    assert drawn == latencies(0)
    assert drawn != latencies(1)
    assert len(set(drawn)) == 50
    assert all(0.1 <= latency <= 0.15 for latency in drawn)
    assert max(drawn) - min(drawn) > 0.01
    times, ring = LinkTimes(Links(Link(100, 0.1, 0.05)), 4), get_topology("ring")
    assert len({times.neighbors(w, BYTES, ring, 0).latency_s for w in range(4)}) > 1
