"""Peer discovery in the store or in a list, and the scores that determine the chosen peers."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from lightning_loco.gossip import (
    NodeListDiscovery,
    Peer,
    StoreDiscovery,
)
from lightning_loco.gossip.peer_selection import PeerSelector
from tests.harness.failing import freeze_process
from tests.harness.watchdogs import server_in_a_process

NODES = [Peer("a", "localhost", 4001), Peer("b", "127.0.0.2", 4002), Peer("c", "::1", 4003)]


def test_workers_find_each_other_in_the_store() -> None:
    store = dist.HashStore()
    first, second = (StoreDiscovery(store, worker, 3) for worker in range(2))
    assert first.names == ["worker1", "worker2"]
    assert first.find("worker1") is None
    second.announce(4000)
    assert first.find("worker1") == Peer("worker1", "127.0.0.1", 4000)
    second.announce(5000)
    assert first.find("worker1") == Peer("worker1", "127.0.0.1", 4000)  # looked up only once
    first.forget("worker1")
    assert first.find("worker1") == Peer("worker1", "127.0.0.1", 5000)
    assert first.find("worker2") is None
    assert first.port is None


def test_announce_returns_when_the_entry_is_in_the_store() -> None:
    with server_in_a_process() as (store, server):
        freeze_process(server)
        announcing = threading.Thread(target=StoreDiscovery(store, 1, 2).announce, args=(4000,))
        announcing.start()
        announcing.join(0.2)
        assert announcing.is_alive()
        os.kill(server, signal.SIGCONT)
        announcing.join()
        assert StoreDiscovery(store, 0, 2).find("worker1") == Peer("worker1", "127.0.0.1", 4000)


def test_store_discovery_is_local_only_with_a_loopback_host() -> None:
    store = dist.HashStore()
    assert StoreDiscovery(store, 0, 2).is_local
    assert not StoreDiscovery(store, 0, 2, host="10.0.0.1").is_local
    with pytest.raises(ValueError, match="0 to 1, got 2"):
        StoreDiscovery(store, 2, 2)


def test_nodes_are_taken_from_a_list() -> None:
    discovery = NodeListDiscovery([*NODES[:2], {"name": "c", "host": "::1", "port": 4003}], "b")
    assert discovery.names == ["a", "c"]
    assert discovery.port == 4002
    assert discovery.is_local
    assert discovery.find("c") == NODES[2]
    assert not NodeListDiscovery([*NODES, Peer("d", "10.0.0.1", 4000)], "a").is_local
    assert not NodeListDiscovery([*NODES, Peer("d", "trainer-7", 4000)], "a").is_local


def test_errors_name_invalid_nodes(subtests: pytest.Subtests) -> None:
    rows: list[tuple[list[Any], type[Exception], str]] = [
        ([*NODES, NODES[0]], ValueError, "same name: a"),
        (NODES[1:], ValueError, "no node 'a' in the list, only b, c"),
        ([], ValueError, "only nothing"),
        (["a:4000"], TypeError, "a mapping with name, host and port, got 'a:4000'"),
        ([{"host": "h", "port": 1}], ValueError, "needs a name"),
        ([{"name": "a", "port": 1}], ValueError, "needs a host"),
        ([{"name": "a", "host": "h"}], ValueError, "port in 1 to 65535"),
        ([{"name": "a", "host": "h", "port": 0}], ValueError, "port in 1 to 65535"),
        ([{"name": "a", "host": "h", "port": 65536}], ValueError, "port in 1 to 65535"),
        ([{"name": "a", "host": "h", "port": "80"}], ValueError, "port in 1 to 65535"),
        ([{"name": "a", "host": "h", "port": 1, "prot": 2}], ValueError, "unknown keys: prot"),
    ]
    for nodes, error, message in rows:
        with subtests.test(nodes=nodes), pytest.raises(error, match=message):
            NodeListDiscovery(nodes, "a")


# ------------------------------------------------------------------------- peer selection

NAMES = ["a", "b", "c"]


def test_scores_stay_within_their_bounds() -> None:
    selector = PeerSelector(NAMES, seed=0)
    assert selector.scores == dict.fromkeys(NAMES, 1000)
    selector.record_success("a")
    selector.record_failure("b")
    assert selector.scores == {"a": 1000, "b": 900, "c": 1000}
    selector.record_success("b")
    assert selector.scores["b"] == 910
    for _ in range(20):
        selector.record_failure("b")
    assert selector.scores["b"] == 10


def test_equal_peers_are_chosen_equally_often() -> None:
    selector = PeerSelector(NAMES, seed=1)
    counts = Counter(selector.choose() for _ in range(6000))
    assert set(counts) == set(NAMES)
    assert all(1800 < count < 2200 for count in counts.values())


def test_failed_peers_are_chosen_less_often() -> None:
    selector = PeerSelector(NAMES, seed=2)
    for _ in range(3):
        selector.record_failure("a")
    assert Counter(selector.choose() for _ in range(200))["a"] < 50


def test_dead_peer_is_tried_rarely_and_recovers_its_score() -> None:
    selector = PeerSelector(NAMES, seed=3)
    tries = []
    for number in range(4000):
        name = selector.choose()
        assert name is not None
        if name == "a":
            tries.append(number)
            selector.record_failure("a")
        else:
            selector.record_success(name)
    late = [number for number in tries if number >= 1000]
    assert 10 <= len(late) <= 100
    assert max(b - a for a, b in zip(late, late[1:], strict=False)) <= 990
    # The peer is alive again.
    for _ in range(1000):
        name = selector.choose()
        assert name is not None
        selector.record_success(name)
    assert selector.scores["a"] == 1000
    assert Counter(selector.choose() for _ in range(3000))["a"] > 800


def test_choices_depend_only_on_the_seed() -> None:
    def draws(seed: int) -> list[str | None]:
        selector = PeerSelector(NAMES, seed)
        return [selector.choose() for _ in range(50)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)


@pytest.mark.parametrize("exclude", [["a"], ["a", "b"]])
def test_peers_can_be_excluded(exclude: list[str]) -> None:
    selector = PeerSelector(NAMES, seed=0)
    chosen = {selector.choose(exclude=exclude) for _ in range(100)}
    assert chosen == set(NAMES) - set(exclude)


def test_choice_is_none_if_no_peer_is_left() -> None:
    assert PeerSelector([], seed=0).choose() is None
    assert PeerSelector(NAMES, seed=0).choose(exclude=NAMES) is None
