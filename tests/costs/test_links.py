"""Links of workers: values, users' descriptions, and how long messages take."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from lightning_loco import Link, Topology, get_topology
from lightning_loco.costs import LINKS, NETWORKS, Links, LinkTimes, as_links, read_links
from lightning_loco.topology import TOPOLOGIES

NAN = math.nan
WAN, DSL, LAN = LINKS["wan"], LINKS["dsl"], LINKS["lan"]
BYTES = 1_000_000


def test_seconds_of_a_link() -> None:
    assert Link(1).seconds(125_000) == pytest.approx(1.0)
    assert Link(100, 5.0, 5.0).seconds(12_500_000) == pytest.approx(1.0)  # without the latency
    assert Link(math.inf).seconds(10**12) == 0.0
    assert Link(7).seconds(0) == 0.0


def test_slower_takes_the_worse_of_each_property() -> None:
    assert Link(10, 0.1, 0.0).slower(Link(20, 0.05, 0.01)) == Link(10, 0.1, 0.01)
    for link in LINKS.values():
        assert link.slower(link) == link


def test_named_links_are_ordered_by_bandwidth() -> None:
    by_speed = sorted(LINKS, key=lambda name: LINKS[name].mbit_per_s)
    assert by_speed == ["dsl", "wan", "lan", "datacentre"]


def test_invalid_links_are_an_error(subtests: pytest.Subtests) -> None:
    rows = [
        ({"mbit_per_s": 0}, ValueError, r"mbit_per_s of a link must be positive .*, got 0"),
        ({"mbit_per_s": -1.0}, ValueError, "must be positive .*, got -1.0"),
        ({"mbit_per_s": NAN}, ValueError, "must be positive .*, got nan"),
        ({"mbit_per_s": "100"}, TypeError, "mbit_per_s of a link must be a number, got '100'"),
        ({"mbit_per_s": True}, TypeError, "mbit_per_s of a link must be a number, got True"),
        ({"latency_s": -0.1}, ValueError, "latency_s of a link is in seconds, at least 0 .* -0.1"),
        ({"latency_s": math.inf}, ValueError, "latency_s of a link .* finite, got inf"),
        ({"latency_s": None}, TypeError, "latency_s of a link must be a number, got None"),
        ({"jitter_s": -1}, ValueError, "jitter_s of a link is in seconds, at least 0 .* got -1"),
        ({"jitter_s": NAN}, ValueError, "jitter_s of a link .* got nan"),
    ]
    for values, error, text in rows:
        with subtests.test(str(values)), pytest.raises(error, match=text):
            Link(**{"mbit_per_s": 100, **values})


FILE = """
default: wan
workers:
  3: dsl
  2: {mbit_per_s: 50, latency_s: 0.01}
pairs:
  0-1: lan
  1->2: {mbit_per_s: 10}
seed: 7
"""


def test_one_link_for_all() -> None:
    assert as_links(None) is None
    for value in ("wan", WAN, {"mbit_per_s": 100, "latency_s": 0.03, "jitter_s": 0.003}):
        links = as_links(value)
        assert links == Links(WAN)
        assert as_links(links) is links
        assert links.between(0, 5) == links.of_worker(3) == WAN
        assert links.of_pair(0, 5) is None
        links.check(17)


def test_one_link_for_each_worker() -> None:
    links = as_links(["lan", Link(20), "wan"])
    assert [links.of_worker(worker) for worker in range(3)] == [LAN, Link(20), WAN]
    assert links.between(0, 1) == links.between(1, 0) == Link(20, LAN.latency_s)
    assert links.between(2, 0) == WAN.slower(LAN)
    links.check(3)
    with pytest.raises(ValueError, match="link has 3 entries, .* there are 4 workers. Give one"):
        links.check(4)


def write_file(folder: Path, text: str, name: str = "links.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_workers_and_pairs_from_a_file(tmp_path: Path) -> None:
    links = as_links(write_file(tmp_path, FILE))
    assert [links.of_worker(worker) for worker in range(4)] == [WAN, WAN, Link(50, 0.01), DSL]
    assert links.of_pair(0, 1) == links.of_pair(1, 0) == LAN
    assert links.of_pair(1, 2) == links.between(1, 2) == Link(10)
    assert links.of_pair(2, 1) is None
    assert links.between(2, 1) == WAN.slower(Link(50, 0.01))
    assert links.seed == 7
    links.check(4)
    with pytest.raises(ValueError, match="link names worker 3, but there are 3 workers, numbered"):
        links.check(3)


def test_files_in_json_and_of_other_forms(tmp_path: Path) -> None:
    table = {"default": "wan", "pairs": {"0-1": "lan"}}
    path = write_file(tmp_path, json.dumps(table), "links.json")
    assert as_links(path) == as_links(Path(path)) == as_links(table)
    assert read_links(write_file(tmp_path, "[wan, dsl]")) == as_links(["wan", "dsl"])
    assert read_links(write_file(tmp_path, "dsl")) == Links(DSL)
    assert read_links(write_file(tmp_path, "mbit_per_s: 20")) == Links(Link(20))


def test_invalid_descriptions_are_an_error(subtests: pytest.Subtests) -> None:
    rows = [
        ("wam", ValueError, r"link must be one of wan, dsl, lan, datacentre, .* got 'wam'"),
        (100, TypeError, r"link must be a name such as 'wan', a Link\(...\), .* got 100"),
        (True, TypeError, "link must be a name .* got True"),
        ([], ValueError, "link is an empty list"),
        (["wan", "moon"], ValueError, r"link\[1\] must be one of wan, .* got 'moon'"),
        (["wan", 3], TypeError, r"link\[1\] must be a name .* got 3"),
        ({"mbit_per_s": -3}, ValueError, "mbit_per_s of a link must be positive .*, got -3"),
        ({"latency_s": 0.1}, ValueError, "link needs mbit_per_s, got {'latency_s': 0.1}"),
        ({"speed": 3}, ValueError, "link has no 'speed'. Use default, workers, pairs, sites, "),
        ({"workers": {0: "wan"}}, ValueError, "link needs 'default'"),
        ({"default": "wan", "workers": ["wan"]}, ValueError, "link.workers must be a map, got"),
        ({"default": "wan", "workers": {"a": "dsl"}}, ValueError, "workers' numbers from 0 on"),
        ({"default": "wan", "workers": {-1: "dsl"}}, ValueError, "from 0 on, got -1"),
        ({"default": "wan", "pairs": {"0": "dsl"}}, ValueError, "as in 0-1 or 0->1, got '0'"),
        ({"default": "wan", "pairs": {"1-1": "dsl"}}, ValueError, "two workers, .* got '1-1'"),
        ({"default": "wan", "pairs": {"0-1": {"mbit": 1}}}, ValueError, r"\[0-1\] has no 'mbit'"),
        (
            {"default": "wan", "sites": 2},
            ValueError,
            "several sites need between_sites, .* sites=2",
        ),
        ({"default": "wan", "between_sites": "lan"}, ValueError, "sites need between_sites, "),
        ({"default": "wan", "sites": 0}, ValueError, "sites is a number from 1 on"),
        ({"default": "wan", "sites": "2"}, TypeError, "sites of the links must be an integer"),
        ({"default": "wan", "seed": "x"}, TypeError, "seed of the links must be an integer"),
        ("no/such.yaml", FileNotFoundError, "There is no file of links 'no/such.yaml'"),
        (Path("nowhere"), FileNotFoundError, "There is no file of links 'nowhere'"),
    ]
    for value, error, text in rows:
        with subtests.test(str(value)), pytest.raises(error, match=text):
            as_links(value)


REPEATED = [
    f"&{name} [{', '.join([f'*{before}'] * 10)}]" for before, name in itertools.pairwise("abcdefg")
]
MANY_TIMES = f"[&a [{', '.join('x' * 10)}], {', '.join(REPEATED)}]"
"""A list whose aliases expand to ten million values."""


def test_invalid_files_are_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    rows = [
        ("", "there is no link in it, only None"),
        ("wam", "there is no link in it, only 'wam'"),
        ("[", "cannot be read: "),
        ("default: wan\nworkers: {0: moon}", r"link.workers\[0\] must be one of wan, .* 'moon'"),
        ("mbit_per_s: fast", "mbit_per_s of a link must be a number, got 'fast'"),
        ("mbit_per_s: 2001-99-99", "cannot be read: month must be in 1..12"),
        ("[" * 5000, "is nested too deeply"),
        (f"default: wan\nworkers: {MANY_TIMES}", "cannot be read: its aliases repeat too much"),
        ("default: wan\nworkers: &all [*all]", "cannot be read: its aliases repeat too much"),
        (f"default: wan\nworkers: [{'slow, ' * 1000}]", "link.workers must be a map"),
    ]
    for text, message in rows:
        with subtests.test(text):
            path = write_file(tmp_path, text)
            with pytest.raises(ValueError, match=message) as caught:
                as_links(path)
            assert path in str(caught.value)
            assert len(str(caught.value)) < 1000


def test_an_alias_may_repeat_a_link(tmp_path: Path) -> None:
    workers = ", ".join(f"{worker}: *slow" for worker in range(1, 2000))
    slow = "0: &slow {mbit_per_s: 5, latency_s: 0.02, jitter_s: 0.001}"
    links = as_links(write_file(tmp_path, f"default: wan\nworkers: {{{slow}, {workers}}}"))
    assert links.of_worker(1999) == Link(5, 0.02, 0.001)


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        as_links(tmp_path)


def ring_all_reduce(links: Links, n: int, message: float) -> float:
    """Simulate a ring: each worker forwards a part as soon as it has received one."""
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


def test_an_all_reduce_on_equal_links_takes_as_long_as_a_ring(subtests: pytest.Subtests) -> None:
    for n in (2, 3, 4, 7):
        with subtests.test(n=n):
            links = Links(Link(80, 0.01))
            time = LinkTimes(links, n).mean(2 * (n - 1) / n * BYTES, 2 * (n - 1), 0)
            assert time.seconds == pytest.approx(ring_all_reduce(links, n, BYTES))
            assert time.busy_s == pytest.approx(2 * (n - 1) / n * 0.1)


def test_an_all_reduce_takes_as_long_as_its_slowest_link(subtests: pytest.Subtests) -> None:
    """Never less than a simulated ring, and hardly more if one link is by far the slowest."""
    for seed in range(10):
        with subtests.test(seed=seed):
            draw = random.Random(seed)
            n = draw.randint(2, 6)
            links = as_links([Link(draw.uniform(10, 100), draw.uniform(0, 0.01)) for _ in range(n)])
            numbers = 2 * (n - 1) / n * BYTES, 2 * (n - 1), 0
            estimate = LinkTimes(links, n).mean(*numbers).seconds
            assert ring_all_reduce(links, n, BYTES) <= estimate * (1 + 1e-9)
            worst = Links(links.default, workers=((draw.randrange(n), Link(1, 0.1)),))
            time, ring = LinkTimes(worst, n).mean(*numbers), ring_all_reduce(worst, n, BYTES)
            assert 0.9 * time.seconds <= ring <= time.seconds * (1 + 1e-9)
            assert time.busy_s == pytest.approx(8e-6 * numbers[0])


def busy_seconds(links: Links, n: int, worker: int, topology: Topology, t: int) -> float:
    """Return how long links are busy until a worker has received and sent all messages."""
    matrix = topology.mixing_matrix(n, t)
    messages = [(i, j) for i, j in itertools.permutations(range(n), 2) if matrix[j, i] != 0]
    up, down = [0.0] * n, [0.0] * n
    for sender, receiver in messages:
        if links.of_pair(sender, receiver) is None:
            up[sender] += links.of_worker(sender).seconds(BYTES)
            down[receiver] += links.of_worker(receiver).seconds(BYTES)
    busy = [0.0]
    for sender, receiver in messages:
        own = links.of_pair(sender, receiver)
        if worker in (sender, receiver):
            busy.append(up[sender] if own is None else own.seconds(BYTES))
        if worker == receiver and own is None:
            busy.append(down[receiver])
    return max(busy)


def test_messages_to_neighbors_share_links(subtests: pytest.Subtests) -> None:
    for name, seed in itertools.product(TOPOLOGIES, range(5)):
        with subtests.test(name, seed=seed):
            draw = random.Random(seed)
            n, topology = draw.choice([2, 4, 8]), get_topology(name)
            workers = tuple(
                (worker, Link(draw.uniform(10, 100), draw.random())) for worker in range(n)
            )
            pairs = tuple(
                (*pair, Link(draw.uniform(1, 200), draw.random()))
                for pair in itertools.permutations(range(n), 2)
                if draw.random() < 0.3
            )
            between = Link(draw.uniform(1, 50), draw.random()) if seed % 2 else None
            sites = 1 if between is None else 2
            links = Links(Link(1), workers, pairs, sites=sites, between_sites=between).of_size(n)
            times = LinkTimes(links, n)
            for worker, t in itertools.product(range(n), range(3)):
                time = times.all_neighbors(BYTES, topology, t).of_worker(worker)
                assert time.busy_s == pytest.approx(busy_seconds(links, n, worker, topology, t))
                peers = set(topology.weights(worker, n, t)) - {worker}
                latencies = [links.between(peer, worker).latency_s for peer in peers]
                assert time.latency_s == max(latencies, default=0)


def test_workers_at_different_sites_have_a_link_for_themselves() -> None:
    links = as_links({"default": "lan", "sites": 2, "between_sites": "wan"})
    assert links is not None
    with pytest.raises(ValueError, match=r"known number of workers. Use links.of_size"):
        links.between(0, 1)
    of_five = links.of_size(5)
    assert [of_five.site_of(worker) for worker in range(5)] == [0, 0, 0, 1, 1]
    assert of_five.between(0, 2) == LAN
    assert of_five.between(2, 3) == of_five.of_pair(3, 2) == WAN
    # Pairs of workers do not share the links between the sites, and the ring crosses them.
    times = LinkTimes(links, 4)
    assert times.mean(BYTES, 6, 0).busy_s == WAN.seconds(BYTES)
    assert times.all_neighbors(BYTES, get_topology("complete"), 0).busy_s[0] == WAN.seconds(BYTES)
    with pytest.raises(ValueError, match="link has 2 sites, but there are 1 workers"):
        links.check(1)


TWO_SITES = {"default": "datacentre", "sites": 2, "between_sites": {"mbit_per_s": 100}}
ONE_LINE = as_links({**TWO_SITES, "uplink_mbit_per_s": 80})


def leaving(links: Links, n: int, topology: Topology, t: int) -> int:
    """Return the messages that leave the busiest site, or enter it."""
    counts: Counter[tuple[str, int]] = Counter()
    for sender, receiver in messages_between(n, topology, t):
        if links.site_of(sender) != links.site_of(receiver):
            counts["from", links.site_of(sender)] += 1
            counts["to", links.site_of(receiver)] += 1
    return max(counts.values(), default=0)


def messages_between(n: int, topology: Topology, t: int) -> list[tuple[int, int]]:
    return [(w, peer) for w in range(n) for peer in topology.receivers(w, n, t)]


def test_workers_share_the_uplink_of_their_site(subtests: pytest.Subtests) -> None:
    assert ONE_LINE is not None
    n, alone_s = 8, 8e-6 * BYTES / 80
    for name in ("ring", "complete", "random_matching", "hypercube", "one_peer_exponential"):
        topology, times = get_topology(name), LinkTimes(ONE_LINE, n)
        for t in range(6):
            with subtests.test(name, t=t):
                busy_s = times.all_neighbors(BYTES, topology, t).busy_s.max()
                count = leaving(ONE_LINE.of_size(n), n, topology, t)
                inside = LinkTimes(Links(LINKS["datacentre"]), n)
                inside_s = inside.all_neighbors(BYTES, topology, t).busy_s.max()
                assert busy_s == pytest.approx(max(count * alone_s, inside_s))
    # A ring leaves each site twice, the worst matching with all four workers.
    assert leaving(ONE_LINE.of_size(8), 8, get_topology("ring"), 0) == 2
    assert leaving(ONE_LINE.of_size(8), 8, get_topology("hypercube"), 0) == 4


def test_an_all_reduce_in_a_ring_leaves_a_site_once_and_one_among_all_often() -> None:
    assert ONE_LINE is not None
    for n in (2, 3, 4, 8):
        sent = 2 * (n - 1) / n * BYTES
        ring = LinkTimes(ONE_LINE, n).mean(sent, 2 * (n - 1), 0)
        assert ring.busy_s == pytest.approx(8e-6 * sent / 80)
        among_all = LinkTimes(ONE_LINE, n).mean(sent, 2, 0)
        sites = [ONE_LINE.of_size(n).site_of(worker) for worker in range(n)]
        crossing = [sum(sites[v] != sites[w] for v in range(n)) for w in range(n)]
        left = sum(c for w, c in enumerate(crossing) if sites[w] == 0) * sent / (n - 1)
        assert among_all.busy_s == pytest.approx(8e-6 * left / 80)
    # Workers 0, 2, 1, 3 in this order cross the line four times, two in each direction.
    crossed = LinkTimes(ONE_LINE, 4).mean(BYTES, 6, 0, [0, 2, 1, 3])
    assert crossed.busy_s == pytest.approx(2 * 8e-6 * BYTES / 80)


def test_links_of_pairs_have_no_part_in_an_uplink() -> None:
    links = as_links({**TWO_SITES, "uplink_mbit_per_s": 80, "pairs": {"1-2": "lan"}})
    assert links is not None
    times, ring = LinkTimes(links, 4), get_topology("ring")
    alone_s = 8e-6 * BYTES / 80
    assert times.all_neighbors(BYTES, ring, 0).busy_s[1] == pytest.approx(LAN.seconds(BYTES))
    assert times.all_neighbors(BYTES, ring, 0).busy_s[0] == pytest.approx(alone_s)
    assert times.mean(BYTES, 6, 0).busy_s == pytest.approx(alone_s)
    pairs = {f"{worker}-{peer}": "lan" for worker in (0, 1) for peer in (2, 3)}
    links = as_links({**TWO_SITES, "uplink_mbit_per_s": 80, "pairs": pairs})
    assert links is not None
    assert LinkTimes(links, 4).mean(BYTES, 1, 0).busy_s == pytest.approx(LAN.seconds(BYTES / 3))


def test_fetches_share_an_uplink_as_if_all_workers_fetched_at_once() -> None:
    """Of 8 workers, 4 fetch across sites, each with probability 4/7."""
    assert ONE_LINE is not None
    times, alone_s = LinkTimes(ONE_LINE, 8), 8e-6 * BYTES / 80
    assert times.fetch(0, 7, BYTES, 0).busy_s == pytest.approx(16 / 7 * alone_s)
    assert times.fetch(0, 1, BYTES, 0).busy_s == LINKS["datacentre"].seconds(BYTES)
    assert LinkTimes(ONE_LINE, 2).fetch(0, 1, BYTES, 0).busy_s == pytest.approx(alone_s)


def test_what_is_sent_to_all_takes_the_links_of_gossip_with_all(subtests: pytest.Subtests) -> None:
    """A part of a message goes to each other worker: links of workers, pairs, sites and uplinks."""
    complete = get_topology("complete")
    for seed in range(24):
        draw = random.Random(seed)
        n = draw.choice([4, 5, 8])
        workers = tuple((worker, Link(draw.uniform(10, 100), draw.random())) for worker in range(n))
        pairs = tuple(
            (*pair, Link(draw.uniform(1, 99), draw.random()))
            for pair in itertools.permutations(range(n), 2)
            if draw.random() < (0, 0.2, 0.9)[seed % 3]
        )
        sites = {"sites": 2, "between_sites": Link(draw.uniform(5, 50), 2.0)} if seed % 2 else {}
        if sites and seed % 4 == 1:
            sites["uplink_mbit_per_s"] = draw.uniform(1, 50)
        with subtests.test(seed=seed):
            times = LinkTimes(Links(LAN, workers, pairs, **sites), n)
            found = times.mean(BYTES, 1, 0)
            gossip = times.all_neighbors(BYTES / (n - 1), complete, 0)
            assert found.busy_s == pytest.approx(gossip.busy_s.max())
            assert found.latency_s == pytest.approx(gossip.latency_s.max())


def test_an_exchange_of_all_with_all_is_possible_for_many_workers() -> None:
    """All pairs of 100,000 workers would not fit into memory."""
    n, slow = 100_000, Link(1, 0.5)
    times = LinkTimes(Links(Link(100, 0.01), pairs=((3, 9, slow),)), n)
    found = times.mean(BYTES, 2, 0)
    assert found.busy_s == pytest.approx(Link(100).seconds(BYTES))
    assert found.latency_s == 2 * 0.5
    assert times.slowest_link() == Link(100, 0.01)


def test_invalid_uplinks_are_an_error(subtests: pytest.Subtests) -> None:
    for values, error, text in (
        ({"sites": 1, "uplink_mbit_per_s": 9}, ValueError, "at least two sites. Give sites and"),
        ({**TWO_SITES, "uplink_mbit_per_s": 0}, ValueError, "must be positive .* got 0"),
        ({**TWO_SITES, "uplink_mbit_per_s": NAN}, ValueError, "must be positive .* got nan"),
        ({**TWO_SITES, "uplink_mbit_per_s": "1"}, TypeError, "must be a number, got '1'"),
        ({**TWO_SITES, "uplinks": 1}, ValueError, "link has no 'uplinks'. Use .*uplink_mbit_per_s"),
    ):
        with subtests.test(text), pytest.raises(error, match=text):
            as_links({"default": "lan", **values})


def test_networks_by_name() -> None:
    for name, network in NETWORKS.items():
        assert as_links(name) is network
        network.check(4)
    slow = LinkTimes(NETWORKS["one_slow_link"], 8).mean(BYTES, 1, 0)
    assert slow == LinkTimes(Links(DSL), 8).mean(BYTES, 1, 0)._replace(latency_s=slow.latency_s)


def test_the_latency_of_neighbors_is_the_longest() -> None:
    links = as_links({"default": Link(100, 0.01), "pairs": {"2->0": Link(100, 0.5)}})
    times, ring = LinkTimes(links, 4), get_topology("ring")
    latencies = [
        times.all_neighbors(BYTES, ring, 0).of_worker(worker).latency_s for worker in range(4)
    ]
    assert latencies == [0.01] * 4  # on a ring of four, 0 and 2 are not neighbors
    complete = get_topology("complete")
    latencies = [
        times.all_neighbors(BYTES, complete, 0).of_worker(worker).latency_s for worker in range(4)
    ]
    assert latencies == [0.5, 0.01, 0.01, 0.01]


def test_a_single_worker_sends_nothing() -> None:
    times = LinkTimes(Links(Link(1, 1)), 1)
    assert times.mean(BYTES, 0, 0).seconds == 0
    assert times.all_neighbors(BYTES, get_topology("ring"), 0).of_worker(0).seconds == 0


def test_a_fetch_has_the_latency_of_request_and_reply() -> None:
    links = as_links([Link(80, 0.1), Link(8, 0.2)])
    time = LinkTimes(links, 2).fetch(0, 1, BYTES, 0)
    assert time.seconds == pytest.approx(1.0 + 2 * 0.2)
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
    assert len({times.all_neighbors(BYTES, ring, 0).of_worker(w).latency_s for w in range(4)}) > 1
