"""Counters of a node: both sides are in them, and a copy stays as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.counts import PeerStatistics
from lightning_loco.peers.protocol import Request
from tests.peers.helpers import (
    MODEL,
    answering,
    dealer,
    fetch,
    make_node,
    peers,
    right_answer,
    two_nodes,
)


def test_before_the_first_fetch_all_counters_are_zero() -> None:
    with two_nodes() as (here, _):
        assert here.statistics == PeerStatistics(scores={"p1": 1000})


def test_a_copy_stays_while_the_counters_go_on() -> None:
    with two_nodes() as (here, there):
        there.publish(torch.ones(1000), Tag(0, 0))
        copies = []
        for _ in range(3):
            assert fetch(here) is not None
            copies.append(here.statistics)
        assert [copy.fetches for copy in copies] == [1, 2, 3]
        assert [copy.bytes_received for copy in copies] == [4000, 8000, 12000]
        assert 0 < copies[0].wait_s < copies[1].wait_s < copies[2].wait_s
        copies[0].scores["p1"] = 5
        assert here.statistics.scores == {"p1": 1000}
        assert there.statistics.bytes_sent == 12000
        assert here.statistics.bytes_sent == there.statistics.fetches == 0


def test_malformed_requests_and_replies_are_counted_together() -> None:
    def answer(request: Request) -> Iterator[list[bytes]]:
        yield [b"nonsense"]
        yield right_answer(request, MODEL.total_bytes, 1.0)

    nodes = peers(2)
    with answering(nodes[1].port, answer):
        here = make_node(nodes, 0)
        assert fetch(here) is not None
        assert here.statistics.malformed == 1
        with dealer(here.port) as connection:
            connection.send(b"nonsense")
            connection.send(b"nonsense")
            deadline = time.monotonic() + 5
            while here.statistics.malformed < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert here.statistics.malformed == 3
        here.close()
