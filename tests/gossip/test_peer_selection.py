"""Directories: peers are found in the store or in a list, and mistakes are named."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch.distributed as dist

from lightning_loco.gossip import (
    NodeDirectory,
    Peer,
    StoreDirectory,
    address_towards,
)
from tests.frozen import freeze_process
from tests.store_server import server_in_a_process

NODES = [Peer("a", "localhost", 4001), Peer("b", "127.0.0.2", 4002), Peer("c", "::1", 4003)]


def test_workers_find_each_other_in_the_store_also_late_and_after_a_restart() -> None:
    store = dist.HashStore()
    first, second = (StoreDirectory(store, worker, 3) for worker in range(2))
    assert first.names == ["worker1", "worker2"]
    assert first.find("worker1") is None
    second.announce(4000)
    assert first.find("worker1") == Peer("worker1", "127.0.0.1", 4000)
    second.announce(5000)
    assert first.find("worker1") == Peer("worker1", "127.0.0.1", 4000)  # asks only once
    first.forget("worker1")
    assert first.find("worker1") == Peer("worker1", "127.0.0.1", 5000)
    assert first.find("worker2") is None
    assert first.port is None


def test_who_has_announced_itself_is_found() -> None:
    with server_in_a_process() as (store, server):
        freeze_process(server)
        announcing = threading.Thread(target=StoreDirectory(store, 1, 2).announce, args=(4000,))
        announcing.start()
        announcing.join(0.2)
        assert announcing.is_alive()
        os.kill(server, signal.SIGCONT)
        announcing.join()
        assert StoreDirectory(store, 0, 2).find("worker1") == Peer("worker1", "127.0.0.1", 4000)


def test_a_store_directory_knows_whether_others_are_elsewhere() -> None:
    store = dist.HashStore()
    assert StoreDirectory(store, 0, 2).is_local
    assert not StoreDirectory(store, 0, 2, host="10.0.0.1").is_local
    with pytest.raises(ValueError, match="0 to 1, got 2"):
        StoreDirectory(store, 2, 2)


def test_nodes_of_a_list() -> None:
    directory = NodeDirectory([*NODES[:2], {"name": "c", "host": "::1", "port": 4003}], "b")
    assert directory.names == ["a", "c"]
    assert directory.port == 4002
    assert directory.nodes == NODES
    assert directory.is_local
    assert directory.find("c") == NODES[2]
    assert not NodeDirectory([*NODES, Peer("d", "10.0.0.1", 4000)], "a").is_local
    assert not NodeDirectory([*NODES, Peer("d", "trainer-7", 4000)], "a").is_local


def test_bad_nodes_are_named(subtests: pytest.Subtests) -> None:
    rows: list[tuple[list[Any], type[Exception], str]] = [
        ([*NODES, NODES[0]], ValueError, "doubled names: a"),
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
            NodeDirectory(nodes, "a")


def test_the_address_towards_this_machine() -> None:
    assert address_towards("localhost") in ("127.0.0.1", "::1")
