"""Peers in other processes that are killed, stopped, late or restarted delay no other peer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip import Received
from tests.harness.gossip_nodes import (
    NodeProcess,
    fetch,
    fetch_until,
    make_node,
    peers,
    wait_until_ended,
)
from tests.harness.limits import HARNESS_S, LONG_S, SOON_S
from tests.harness.programs import LIMIT_S

TIMEOUT_S = 0.8
LIMIT_PROMPT_S = TIMEOUT_S + 0.3  # other processes share the machine
NUMEL = 100_000


def is_value(value: float) -> Callable[[Received | None], bool]:
    def check(received: Received | None) -> bool:
        return received is not None and received.params.unique().tolist() == [value]

    return check


def is_nothing(received: Received | None) -> bool:
    return received is None


@pytest.mark.process
def test_peer_is_late_killed_and_restarted_at_the_same_port() -> None:
    nodes = peers(2)
    here = make_node(nodes, 0, NUMEL, fetch_timeout_s=LONG_S)
    waits = [*fetch_until(here, is_nothing), *fetch_until(here, is_nothing)]
    for value in (1.0, 2.0):
        there = NodeProcess(nodes, 1, value, NUMEL)
        waits += fetch_until(here, is_value(value))
        here.start_fetch()  # still running when the peer is killed
        there.end()
        here.wait()
        waits += fetch_until(here, is_nothing)
        for _ in range(20):
            waits += fetch_until(here, is_nothing)
    here.close()
    assert max(waits) < SOON_S
    assert here.statistics.timeouts == 0  # connections to a dead peer are refused immediately


@pytest.mark.process
@pytest.mark.parametrize(
    "longest_s", [HARNESS_S, pytest.param(LIMIT_PROMPT_S, marks=pytest.mark.soak, id="prompt")]
)
def test_stopped_peer_costs_at_most_the_timeout_and_recovers(longest_s: float) -> None:
    nodes = peers(2)
    here = make_node(nodes, 0, NUMEL, fetch_timeout_s=TIMEOUT_S)
    there = NodeProcess(nodes, 1, 1.0, NUMEL)
    fetch_until(here, is_value(1.0))
    there.signal(signal.SIGSTOP)
    waits = []
    for _ in range(4):
        waits += fetch_until(here, is_nothing)
    wait_until_ended(here)
    assert here.statistics.timeouts >= 4
    assert here.statistics.scores["p1"] <= 700
    there.signal(signal.SIGCONT)
    waits += fetch_until(here, is_value(1.0))
    there.end()
    here.close()
    assert max(waits) < longest_s


@pytest.mark.process
def test_third_peer_is_used_if_one_is_dead_and_one_is_stopped() -> None:
    nodes = peers(4)
    here = make_node(nodes, 0, NUMEL, fetch_timeout_s=TIMEOUT_S)
    others = [NodeProcess(nodes, index, float(index), NUMEL) for index in (1, 2)]
    third = make_node(nodes, 3, NUMEL)
    third.publish(torch.full((NUMEL,), 3.0), Tag(0, 0))
    others[0].end()
    others[1].signal(signal.SIGSTOP)
    waits, peers_seen = [], []
    for _ in range(60):
        started = time.monotonic()
        received = fetch(here)
        waits.append(time.monotonic() - started)
        peers_seen.append(None if received is None else received.peer)
    others[1].end()
    here.close()
    third.close()
    assert set(peers_seen) <= {"p3", None}
    assert peers_seen.count("p3") >= 55
    assert max(waits) < HARNESS_S
    # Each timeout takes half of TIMEOUT_S. Peers that fail often are tried less often.
    assert here.statistics.timeouts < 30


NEVER_CLOSED = """
import torch
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip import NodeListDiscovery, Peer, PeerNode
nodes = [Peer("a", "127.0.0.1", {}), Peer("b", "127.0.0.1", {})]
opened = [PeerNode(9, torch.float32, NodeListDiscovery(nodes, n), schema_checksum=1) for n in "ab"]
opened[0].publish(torch.ones(9), Tag(1, 1))
opened[1].start_fetch()
assert opened[1].wait() is not None
opened[1].start_fetch()
{}
"""


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("ending", ["", "raise RuntimeError('end')"])
def test_node_that_is_never_closed_does_not_keep_its_process_alive(ending: str) -> None:
    first, second = peers(2)
    script = NEVER_CLOSED.format(first.port, second.port, ending)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ,
    )
    assert ended.returncode == (1 if ending else 0), ended.stderr
    assert ("RuntimeError: end" in ended.stderr) == bool(ending)
    assert "Fatal" not in ended.stderr
