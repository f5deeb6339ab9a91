"""Peers that are empty, wrong, silent or missing: fetches end in time, and find them later."""

from __future__ import annotations

import itertools
import logging
import math
import socket
import threading
import time
from contextlib import closing
from typing import Any

import pytest
import torch

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.compression import Int8
from lightning_loco.gossip import Peer, PeerNode, StoreDiscovery
from tests.harness.gossip_nodes import (
    HOST,
    fetch,
    fetch_until,
    make_node,
    peers,
    silent,
    two_nodes,
    wait_until_ended,
)
from tests.harness.limits import LONG_S, SOON_S

pytestmark = pytest.mark.recovery


def test_peer_without_parameters_is_not_a_failure() -> None:
    with two_nodes(fetch_timeout_s=LONG_S) as (here, _):
        started = time.monotonic()
        for _ in range(5):
            assert fetch(here) is None
        assert time.monotonic() - started < SOON_S
        assert (here.statistics.empty, here.statistics.timeouts) == (5, 0)
        assert here.statistics.scores == {"p1": 1000}


def test_parameters_that_are_not_finite_are_rejected(subtests: pytest.Subtests) -> None:
    indices = (0, 499_999, 999_999)
    for value, index in itertools.product((math.nan, math.inf, -math.inf), indices):
        with subtests.test(value=value, index=index), two_nodes(1_000_000) as (here, there):
            flat = torch.zeros(1_000_000)
            flat[index] = value
            there.publish(flat, Tag(0, 0))
            assert fetch(here) is None
            assert here.statistics.not_finite == 1
            assert here.statistics.scores == {"p1": 900}
            there.publish(torch.zeros(1_000_000), Tag(0, 0))
            assert fetch(here) is not None


def test_peers_with_another_model_are_refused_and_logged(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    rows: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"schema_checksum": 5}, "it has another model"),
        ({}, {"compression": "int8"}, "another compression. Give all peers the same one"),
        ({"compression": "bf16"}, {"compression": "fp16"}, "another compression"),
        ({"compression": Int8()}, {"compression": Int8(block=128)}, "another compression"),
        ({"compression": "int8"}, {}, "another compression"),
    ]
    for ours, other, text in rows:
        with subtests.test(ours=ours, other=other):
            caplog.clear()
            nodes = peers(2)
            with (
                closing(make_node(nodes, 0, **{"schema_checksum": 1, **ours})) as here,
                closing(make_node(nodes, 1, **{"schema_checksum": 1, **other})) as there,
            ):
                there.publish(torch.zeros(1000), Tag(0, 0))
                for _ in range(3):
                    assert fetch(here) is None
            assert here.statistics.scores == {"p1": 700}
            assert here.statistics.refused == 3
            (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
            assert record.getMessage().startswith("Reading from peer p1 failed: ")
            assert text in record.getMessage()


def test_peer_that_is_not_running_is_found_once_it_starts() -> None:
    nodes = peers(2)
    here = make_node(nodes, 0, fetch_timeout_s=LONG_S)
    started = time.monotonic()
    for count in range(1, 11):
        assert fetch(here) is None
        assert here.statistics.refused == count
    assert time.monotonic() - started < SOON_S
    assert here.statistics.scores == {"p1": 10}
    for value in (1.0, 2.0, 3.0):
        there = make_node(nodes, 1)
        there.publish(torch.full((1000,), value), Tag(0, 0))
        fetch_until(here, lambda r, v=value: r is not None and bool((r.params == v).all()))
        there.close()
        assert fetch(here) is None
    assert here.statistics.timeouts == 0
    here.close()


def test_next_peer_is_tried_after_a_refusal() -> None:
    nodes = peers(3)
    here, there = (make_node(nodes, index) for index in (0, 2))
    there.publish(torch.ones(1000), Tag(0, 0))
    for _ in range(20):
        received = fetch(here)
        assert received is not None
        assert received.peer == "p2"
    assert here.statistics.refused > 0
    here.close()
    there.close()


def test_silent_peer_costs_half_of_the_timeout() -> None:
    nodes = peers(3)
    with silent(nodes[1]):
        here = make_node(nodes, 0, fetch_timeout_s=0.4)
        there = make_node(nodes, 2)
        there.publish(torch.ones(1000), Tag(0, 0))
        deadline = time.monotonic() + SOON_S
        num_both = 0
        while num_both < 3:  # on a busy machine some fetches may fail
            assert time.monotonic() < deadline, here.statistics
            before = here.statistics.timeouts
            received = fetch(here)
            wait_until_ended(here)
            if received is not None:
                assert received.peer == "p2"
                num_both += here.statistics.timeouts > before
        assert here.statistics.scores["p1"] < 800
        here.close()
        there.close()


def test_wait_ends_with_the_timeout() -> None:
    nodes = peers(4)
    listening = [socket.create_server((HOST, node.port)) for node in nodes[1:]]
    here = make_node(nodes, 0, fetch_timeout_s=0.3)
    for count in range(1, 4):
        started = time.monotonic()
        assert fetch(here) is None
        assert 0.29 < time.monotonic() - started < SOON_S
        wait_until_ended(here)
        assert count <= here.statistics.timeouts <= 2 * count  # no time for a third peer
    here.close()
    for each in listening:
        each.close()


def test_failing_store_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(StoreDiscovery):
        def find(self, name: str) -> Peer | None:
            raise RuntimeError("the store is gone")

    store = torch.distributed.HashStore()
    node = PeerNode(10, torch.float32, Broken(store, 0, 2), schema_checksum=1)
    for _ in range(5):
        assert fetch(node) is None
    node.close()
    assert node.statistics.errors == 5
    assert [r.getMessage() for r in caplog.records] == [
        "Reading from peer worker1 failed: RuntimeError: the store is gone."
    ]


def test_hanging_store_does_not_block_a_wait() -> None:
    released = threading.Event()

    class Slow(StoreDiscovery):
        def find(self, name: str) -> Peer | None:
            released.wait(LONG_S)
            return super().find(name)

    store = torch.distributed.HashStore()
    here = PeerNode(10, torch.float32, Slow(store, 0, 2), schema_checksum=1, fetch_timeout_s=0.2)
    there = PeerNode(10, torch.float32, StoreDiscovery(store, 1, 2), schema_checksum=1)
    there.publish(torch.ones(10), Tag(0, 0))
    for _ in range(3):
        started = time.monotonic()
        assert fetch(here) is None
        assert time.monotonic() - started < SOON_S
        assert not here.has_ended
    released.set()
    fetch_until(here, lambda received: received is not None)
    here.close()
    there.close()


def test_restarted_worker_is_found_at_its_new_port() -> None:
    store = torch.distributed.HashStore()

    def node(worker: int) -> PeerNode:
        discovery = StoreDiscovery(store, worker, 2)
        return PeerNode(10, torch.float32, discovery, schema_checksum=1, seed=worker)

    here, there = node(0), node(1)
    for value in (1.0, 2.0, 3.0):
        there.publish(torch.full((10,), value), Tag(0, 0))
        fetch_until(here, lambda r, v=value: r is not None and bool((r.params == v).all()))
        there.close()
        there = node(1)
    there.close()
    here.close()
