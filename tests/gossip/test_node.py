"""Nodes fetch exactly what others publish, and close leaves nothing behind."""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_loco.algorithms.pairwise_average import PairwiseAverage, Tag
from lightning_loco.compression import BFloat16, Codec, ErrorFeedback, Float16, Int8
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.gossip import (
    NodeListDiscovery,
    Peer,
    PeerNode,
    PeerStatistics,
    StoreDiscovery,
    fetch_decisions,
)
from lightning_loco.gossip.node import make_discovery, open_node
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.model.flat import FlatLayout
from lightning_loco.transport import Client, write_certificate
from tests.harness.gossip_nodes import (
    HOST,
    NodeProcess,
    fetch,
    fetch_until,
    make_node,
    peers,
    replying,
    two_nodes,
    wait_until_ended,
)
from tests.harness.guards import open_files, threads_named
from tests.harness.limits import LONG_S, SOON_S, wait_until
from tests.harness.pool import Pool
from tests.harness.programs import free_ports


def test_two_nodes_fetch_from_each_other_exactly(subtests: pytest.Subtests) -> None:
    for numel in (1, 7, 16_384, 100_003, 1_000_000):
        with subtests.test(numel=numel):
            exchange(numel)


def exchange(numel: int) -> None:
    with two_nodes(numel) as nodes:
        flats = torch.randn(2, numel)
        for index, node in enumerate(nodes):
            node.publish(flats[index], Tag(index, index / 10))
        for index, node in enumerate(nodes):
            received = fetch(node)
            assert received is not None
            assert torch.equal(received.params, flats[1 - index])
            assert received.tag == Tag(1 - index, (1 - index) / 10)
            assert received.peer == f"p{1 - index}"
            assert received.received_bytes == 4 * numel
            assert 0 < received.fetch_s < 5
            statistics = node.statistics
            assert (statistics.fetches, statistics.bytes_received) == (1, 4 * numel)
            assert statistics.scores == {f"p{1 - index}": 1000}
        assert [node.statistics.bytes_sent for node in nodes] == [4 * numel] * 2


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        (BFloat16(), torch.float64),
        (Float16(), torch.float32),
        (Int8(), torch.float32),
        (Int8(block=12), torch.float64),
    ],
    ids=str,
)
def test_parameters_are_encoded_by_the_codec(
    codec: Codec, dtype: torch.dtype, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for numel, chunk_bytes in itertools.product((1, 257, 100_001), (8, 4096, 2**20)):
        with subtests.test(numel=numel, chunk_bytes=chunk_bytes):
            monkeypatch.setattr(fetch_decisions, "CHUNK_BYTES", chunk_bytes)
            is_long = codec.num_bytes(numel) // chunk_bytes > 3000
            fetch_twice(codec, dtype, 3001 if is_long else numel)


def fetch_twice(codec: Codec, dtype: torch.dtype, numel: int) -> None:
    nodes = peers(2)
    settings: Any = {"schema_checksum": 1, "compression": codec}
    with (
        closing(PeerNode(numel, dtype, NodeListDiscovery(nodes, "p0"), **settings)) as here,
        closing(PeerNode(numel, dtype, NodeListDiscovery(nodes, "p1"), **settings)) as there,
    ):
        for count in range(1, 3):
            flat = torch.randn(numel, dtype=dtype)
            there.publish(flat, Tag(count, 1))
            received = fetch(here)
            assert received is not None
            expected = codec.decode(codec.encode(flat), torch.empty_like(flat))
            assert received.params.dtype == dtype
            assert torch.equal(received.params, expected)
            assert (received.tag.clock, received.received_bytes) == (count, codec.num_bytes(numel))
        num_bytes = 2 * codec.num_bytes(numel)
        assert there.bytes_sent == here.statistics.bytes_received == num_bytes
        assert there.count_sent() == (num_bytes, 2 * numel * dtype.itemsize)
        assert there.count_sent() == (0, 0)


def test_encoded_parameters_are_fetched_over_tls(tmp_path: Path) -> None:
    write_certificate(tmp_path / "job.pem")
    settings = {"compression": "int8", "key_file": tmp_path / "job.pem"}
    with two_nodes(100_001, **settings) as (here, there):
        flat = torch.randn(100_001)
        there.publish(flat, Tag(1, 1))
        received = fetch(here)
        assert received is not None
        assert torch.equal(received.params, Int8().decode(Int8().encode(flat), flat.clone()))


def test_block_may_be_longer_than_a_chunk() -> None:
    block = 2 * fetch_decisions.CHUNK_BYTES
    with two_nodes(100_001, compression=Int8(block=block)) as (here, there):
        there.publish(torch.ones(100_001), Tag(1, 1))
        received = fetch(here)
        assert received is not None
        assert received.received_bytes == block + 4


def test_received_parameters_stay_until_the_next_fetch() -> None:
    with two_nodes() as (here, there):
        for value in range(1, 20):
            there.publish(torch.full((1000,), float(value)), Tag(value, 0))
            received = fetch(here)
            assert received is not None
            there.publish(torch.full((1000,), -1.0), Tag(0, 0))
            assert received.params.unique().tolist() == [value]
            assert received.tag.clock == value


def test_result_is_returned_once_and_waits_can_be_short() -> None:
    with two_nodes() as (here, there):
        assert here.wait() is None  # none was started
        there.publish(torch.ones(1000), Tag(0, 0))
        here.start_fetch()
        wait_until_ended(here)
        assert here.wait(0.0) is not None
        assert here.wait() is None
        here.start_fetch()
        here.start_fetch()  # replaces the first
        assert here.wait() is not None
        assert here.wait() is None


def test_single_node_has_no_peer() -> None:
    node = make_node(peers(1), 0)
    node.publish(torch.ones(1000), Tag(0, 0))
    assert fetch(node) is None
    node.close()


def test_clock_and_loss_that_are_not_finite_are_refused() -> None:
    with two_nodes() as (here, there):
        there.publish(torch.ones(1000), Tag(math.nan, math.inf))
        assert fetch(here) is None
        there.publish(torch.ones(1000), Tag(2.0, 1.0))
        received = fetch(here)
        assert received is not None
        assert received.tag == Tag(2.0, 1.0)


def test_fetched_snapshots_are_consistent_while_others_are_published() -> None:
    """Each of thousands of snapshots holds a single value, and so must every fetched one."""
    numel = 200_000
    with two_nodes(numel) as (here, there):
        stop = threading.Event()
        longest = [0.0]

        def publish() -> None:
            flat = torch.empty(numel)
            value = 0
            while not stop.is_set() or value < 2000:
                value += 1
                flat.fill_(value)
                started = time.perf_counter()
                there.publish(flat, Tag(value, value))
                longest[0] = max(longest[0], time.perf_counter() - started)

        there.publish(torch.zeros(numel), Tag(0, 0))  # before this a fetch returns nothing
        thread = threading.Thread(target=publish)
        thread.start()
        clocks = []
        for _ in range(50):
            received = fetch(here)
            if received is not None:
                assert received.params.unique().tolist() == [received.tag.clock]
                clocks.append(received.tag.clock)
        stop.set()
        thread.join()
        assert len(clocks) > 40
        assert clocks == sorted(clocks)
        assert longest[0] < 1.0


def test_no_thread_file_or_port_is_left_after_close() -> None:
    nodes = peers(2)
    for _ in range(5):
        opened = [make_node(nodes, index) for index in range(2)]
        opened[1].publish(torch.ones(1000), Tag(0, 0))
        assert fetch(opened[0]) is not None
        # Including the thread of the connection.
        assert len(threads_named("loco-peer", "loco-server")) == 5
        opened[0].start_fetch()  # this fetch is not awaited
        for node in opened:
            node.close()
            node.close()
        assert threads_named("loco-peer", "loco-server") == []
    before = open_files()
    node = make_node(nodes, 0)
    node.close()
    assert open_files() <= before
    for peer in nodes:
        socket.create_server((HOST, peer.port)).close()


def test_close_does_not_wait_for_a_silent_peer() -> None:
    nodes = peers(2)
    with socket.create_server((HOST, nodes[1].port)) as server:
        server.settimeout(SOON_S)
        here = make_node(nodes, 0, fetch_timeout_s=LONG_S)
        here.start_fetch()
        with server.accept()[0]:  # the fetch is running
            started = time.monotonic()
            here.close()
            assert time.monotonic() - started < SOON_S
        assert not here.has_ended
        assert (here.statistics.timeouts, here.statistics.refused) == (0, 0)


def test_error_names_a_taken_port_and_leaves_nothing() -> None:
    nodes = peers(2)
    with socket.create_server((HOST, nodes[0].port)):
        before = open_files()
        with pytest.raises(RuntimeError, match=f"Port {nodes[0].port} of {HOST} is taken.*End"):
            make_node(nodes, 0)
        assert threads_named("loco-peer", "loco-server") == []
        assert open_files() <= before
    with pytest.raises(RuntimeError, match=r"Cannot listen on port .*host='0.0.0.0'"):
        make_node(nodes, 0, host="192.0.2.1")


def test_port_and_host_can_be_chosen() -> None:
    nodes = peers(2)
    (port,) = free_ports(1)
    node = make_node(nodes, 0, port=port, host="0.0.0.0")
    assert node.port == port
    node.close()
    node = make_node(nodes, 0)
    assert node.port == nodes[0].port
    node.close()


def test_peers_on_other_machines_without_key_file_are_a_warning() -> None:
    nodes = [*peers(1), Peer("far", "192.0.2.1", 4000)]
    with pytest.warns(UserWarning, match="without a key file.*key_file=FILE") as caught:
        make_node(nodes, 0).close()
    assert len(caught) == 1


def test_errors_name_invalid_arguments_and_leave_nothing(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"fetch_timeout_s": 0}, "must be positive, got 0"),
        ({"compression": "zip"}, "one of none, bf16, fp16, int8, int4, e3m0, sparse"),
        ({"compression": "int4"}, "too roughly"),
        ({"compression": "sparse"}, "too roughly"),
        ({"compression": ErrorFeedback(Int8())}, "Pulls take no error feedback"),
        ({"numel": 0}, "no parameters"),
    ]
    for settings, message in rows:
        with subtests.test(settings=settings):
            before = open_files()
            with pytest.raises(ValueError, match=message):
                make_node(peers(2), 0, **settings)
            assert open_files() <= before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    discovery = NodeListDiscovery(peers(2), "p0")
    with pytest.raises(ValueError, match=f"float32 or torch.float64, got {dtype}"):
        PeerNode(10, dtype, discovery, schema_checksum=1)


def test_statistics_are_zero_before_the_first_fetch() -> None:
    with two_nodes() as (here, _):
        assert here.statistics == PeerStatistics(scores={"p1": 1000})


def test_statistics_are_a_copy() -> None:
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
    nodes = peers(2)
    with (
        replying(nodes[1].port, lambda requested: (b"nonsense", b"")),
        closing(make_node(nodes, 0)) as here,
    ):
        assert fetch(here) is None
        assert here.statistics.malformed == 1
        for count in (2, 3):
            with closing(Client(HOST, here.port)) as client, pytest.raises(ConnectionError):
                client.request(b"nonsense", timeout_s=LONG_S)
            wait_until(
                lambda c=count: here.statistics.malformed == c,
                "the malformed message was not counted",
            )


@pytest.mark.soak
@pytest.mark.process
def test_no_reply_is_lost_among_thousands() -> None:
    nodes = peers(2)
    numel = 100_000
    here = make_node(nodes, 0, numel, fetch_timeout_s=5.0)
    there = NodeProcess(nodes, 1, 1.0, numel)
    fetch_until(here, lambda received: received is not None)
    for _ in range(200):
        assert fetch(here) is not None
    assert here.statistics.timeouts == 0
    there.end()
    here.close()


# Settings that create a node: nodes of a list, ranks of a job, and a single worker.

ALONE = WorkerGroup(worker=0, num_workers=1)


def settings(**given: Any) -> PairwiseSettings:
    return PairwiseSettings(PairwiseAverage(), **{"fetch_timeout_s": 5.0, **given})


def layout(size: int = 3) -> FlatLayout:
    return FlatLayout(nn.Linear(size, 1).named_parameters())


def test_nodes_of_a_list_fetch_from_each_other() -> None:
    nodes = peers(2)
    opened = [
        open_node(settings(nodes=nodes, name=node.name), ALONE, layout(), seed)
        for seed, node in enumerate(nodes)
    ]
    assert [node.port for node in opened] == [node.port for node in nodes]
    opened[1].publish(torch.arange(4.0), Tag(3, 0.5))
    received = fetch(opened[0])
    assert received is not None
    assert (received.params.tolist(), received.peer) == ([0.0, 1.0, 2.0, 3.0], "p1")
    for node in opened:
        node.close()


def test_node_with_another_model_is_refused() -> None:
    nodes = peers(2)
    opened = [
        open_node(settings(nodes=nodes, name=node.name), ALONE, layout(size), 0)
        for node, size in zip(nodes, (3, 4), strict=True)
    ]
    opened[1].publish(torch.zeros(5), Tag(0, 0))
    assert fetch(opened[0]) is None
    assert opened[0].statistics.refused == 1
    for node in opened:
        node.close()


def test_settings_are_passed_to_the_node(tmp_path: Path) -> None:
    write_certificate(tmp_path / "job.pem")
    nodes = peers(2)
    chosen = {"compression": "bf16", "key_file": tmp_path / "job.pem"}
    opened = [
        open_node(settings(nodes=nodes, name="p0", **chosen), ALONE, layout(), 0),
        open_node(settings(nodes=nodes, name="p1", **chosen), ALONE, layout(), 1),
    ]
    opened[1].publish(torch.full((4,), 1.001), Tag(0, 0))
    received = fetch(opened[0])
    assert received is not None
    assert received.params.tolist() == [1.0] * 4
    assert received.received_bytes == BFloat16().row_bytes
    for node in opened:
        node.close()
    with socket.create_server((nodes[1].host, nodes[1].port)):
        short_timeout = settings(nodes=nodes, name="p0", fetch_timeout_s=0.1)
        node = open_node(short_timeout, ALONE, layout(), 0)
        assert fetch(node) is None
        wait_until_ended(node)
        assert node.statistics.timeouts == 1
        assert node._fetching._fetcher.decisions.fetch_timeout_s == 0.1
        node.close()


def test_single_worker_has_no_peers() -> None:
    discovery = make_discovery(settings(), ALONE)
    assert isinstance(discovery, NodeListDiscovery)
    assert discovery.names == []
    assert discovery.is_local
    node = open_node(settings(), ALONE, layout(), 0)
    assert fetch(node) is None
    node.close()


def test_taken_port_leaves_nothing() -> None:
    (peer,) = peers(1)
    with socket.create_server((peer.host, peer.port)):
        before = open_files()
        with pytest.raises(RuntimeError, match=f"Port {peer.port} of {peer.host} is taken"):
            open_node(settings(nodes=[peer], name="p0"), ALONE, layout(), 0)
        assert threads_named("loco-peer", "loco-server") == []
        assert open_files() <= before


def fetch_between_ranks(rank: int, world: int) -> tuple[str, bool, list[str], float]:
    group = WorkerGroup.create(timeout_s=30)
    discovery = make_discovery(settings(), group)
    node = open_node(settings(), group, layout(), rank)
    node.publish(torch.full((4,), float(rank)), Tag(rank, 0))
    seen = []
    fetch_until(node, lambda r: r is not None and seen.append(r) is None)
    group.gather_objects(None)  # serve until all have fetched
    node.close()
    group.close()
    kind = type(discovery).__name__
    return kind, discovery.is_local, discovery.names, float(seen[0].params[0])


def test_ranks_on_one_machine_use_its_loopback(pool: Pool) -> None:
    results = pool.run(fetch_between_ranks, world=2)
    assert results[0] == (StoreDiscovery.__name__, True, ["worker1"], 1.0)
    assert results[1] == (StoreDiscovery.__name__, True, ["worker0"], 0.0)
