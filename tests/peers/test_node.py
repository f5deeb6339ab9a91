"""Nodes: what one publishes another receives, and nothing is left after close."""

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

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.codecs import BFloat16, Codec, ErrorFeedback, Float16, Int8
from lightning_loco.peers import NodeDirectory, Peer, PeerNode, write_key_file
from tests.limits import LONG_S, SOON_S
from tests.peers.helpers import (
    HOST,
    NodeProcess,
    fetch,
    fetch_until,
    make_node,
    open_files,
    peer_threads,
    peers,
    two_nodes,
)
from tests.programs import free_ports


def test_two_nodes_read_from_each_other_exactly(subtests: pytest.Subtests) -> None:
    for numel, chunk_bytes in itertools.product(
        (1, 7, 16_384, 100_003, 1_000_000), (8, 4096, 2**20)
    ):
        with subtests.test(numel=numel, chunk_bytes=chunk_bytes):
            exchange(3000 if 4 * numel // chunk_bytes > 3000 else numel, chunk_bytes)


def exchange(numel: int, chunk_bytes: int) -> None:
    with two_nodes(numel, chunk_bytes=chunk_bytes) as nodes:
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
def test_values_travel_as_a_codec_writes_them(
    codec: Codec, dtype: torch.dtype, subtests: pytest.Subtests
) -> None:
    for numel, chunk_bytes in itertools.product((1, 257, 100_001), (8, 4096, 2**20)):
        with subtests.test(numel=numel, chunk_bytes=chunk_bytes):
            is_long = codec.num_bytes(numel) // chunk_bytes > 3000
            pull_twice(codec, dtype, 3001 if is_long else numel, chunk_bytes)


def pull_twice(codec: Codec, dtype: torch.dtype, numel: int, chunk_bytes: int) -> None:
    nodes = peers(2)
    settings: Any = {"schema_checksum": 1, "compression": codec, "chunk_bytes": chunk_bytes}
    with (
        closing(PeerNode(numel, dtype, NodeDirectory(nodes, "p0"), **settings)) as here,
        closing(PeerNode(numel, dtype, NodeDirectory(nodes, "p1"), **settings)) as there,
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


def test_encoded_parameters_travel_with_keys_too(tmp_path: Path) -> None:
    write_key_file(tmp_path / "job.key")
    settings = {"compression": "int8", "key_file": tmp_path / "job.key", "chunk_bytes": 8000}
    with two_nodes(100_001, **settings) as (here, there):
        flat = torch.randn(100_001)
        there.publish(flat, Tag(1, 1))
        received = fetch(here)
        assert received is not None
        assert torch.equal(received.params, Int8().decode(Int8().encode(flat), flat.clone()))


def test_a_block_may_be_longer_than_a_chunk_is_to_be() -> None:
    with two_nodes(100_001, compression=Int8(block=20_000), chunk_bytes=8) as (here, there):
        there.publish(torch.ones(100_001), Tag(1, 1))
        received = fetch(here)
        assert received is not None
        assert received.received_bytes == 6 * 20_004


def test_the_latest_is_received_and_stays_until_the_next_fetch() -> None:
    with two_nodes() as (here, there):
        for value in range(1, 20):
            there.publish(torch.full((1000,), float(value)), Tag(value, 0))
            received = fetch(here)
            assert received is not None
            there.publish(torch.full((1000,), -1.0), Tag(0, 0))
            assert received.params.unique().tolist() == [value]
            assert received.tag.clock == value


def test_a_fetch_is_handed_over_once_and_waits_can_be_short() -> None:
    with two_nodes() as (here, there):
        assert here.wait() is None  # none was started
        there.publish(torch.ones(1000), Tag(0, 0))
        here.start_fetch()
        deadline = time.monotonic() + 5
        while not here.has_ended and time.monotonic() < deadline:
            time.sleep(0.001)
        assert here.has_ended
        assert here.wait(0.0) is not None
        assert here.wait() is None
        here.start_fetch()
        here.start_fetch()  # replaces the first
        assert here.wait() is not None
        assert here.wait() is None


def test_a_single_node_has_nobody_to_read_from() -> None:
    node = make_node(peers(1), 0)
    node.publish(torch.ones(1000), Tag(0, 0))
    assert fetch(node) is None
    node.close()


def test_a_clock_and_a_loss_that_are_not_finite_are_refused() -> None:
    with two_nodes() as (here, there):
        there.publish(torch.ones(1000), Tag(math.nan, math.inf))
        assert fetch(here) is None
        there.publish(torch.ones(1000), Tag(2.0, 1.0))
        received = fetch(here)
        assert received is not None
        assert received.tag == Tag(2.0, 1.0)


def test_a_fast_publisher_and_a_slow_reader() -> None:
    """Thousands of publications, each of one value: what is read is always of one value."""
    numel = 200_000
    with two_nodes(numel, chunk_bytes=32_768, window=2) as (here, there):
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

        there.publish(torch.zeros(numel), Tag(0, 0))  # what is fetched before is nothing
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


def test_after_close_no_thread_no_file_and_no_port_is_left() -> None:
    nodes = peers(2)
    for _ in range(5):
        made = [make_node(nodes, index) for index in range(2)]
        made[1].publish(torch.ones(1000), Tag(0, 0))
        assert fetch(made[0]) is not None
        assert len(peer_threads()) == 4
        made[0].start_fetch()  # is never waited for
        for node in made:
            node.close()
            node.close()
        assert peer_threads() == []
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
        with server.accept()[0]:  # so the fetch is under way
            started = time.monotonic()
            here.close()
            assert time.monotonic() - started < SOON_S
        assert not here.has_ended
        assert (here.statistics.timeouts, here.statistics.refused) == (0, 0)


def test_a_taken_port_is_named_with_a_mend_and_leaves_nothing() -> None:
    nodes = peers(2)
    with socket.create_server((HOST, nodes[0].port)):
        before = open_files()
        with pytest.raises(RuntimeError, match=f"Port {nodes[0].port} of {HOST} is taken.*End"):
            make_node(nodes, 0)
        assert peer_threads() == []
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


def test_without_keys_there_is_one_warning_for_other_machines() -> None:
    nodes = [*peers(1), Peer("far", "192.0.2.1", 4000)]
    with pytest.warns(UserWarning, match="without keys.*key_file=FILE") as caught:
        make_node(nodes, 0).close()
    assert len(caught) == 1


def test_bad_settings_are_named_and_leave_nothing(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"fetch_timeout_s": 0}, "must be positive, got 0"),
        ({"chunk_bytes": 2**23}, "multiple of 8 up to 4194304, got 8388608"),
        ({"chunk_bytes": 12}, "multiple of 8"),
        ({"window": 9}, "1 to 8, got 9"),
        ({"compression": "zip"}, "one of none, bf16, fp16, int8, int4, e3m0, sparse"),
        ({"compression": "int4"}, "too roughly"),
        ({"compression": "sparse"}, "too roughly"),
        ({"compression": ErrorFeedback(Int8())}, "Pulls take no error feedback"),
        ({"compression": Int8(block=2**22)}, "4194308 bytes for a block.*smaller block"),
        ({"numel": 0}, "no parameters"),
    ]
    for settings, message in rows:
        with subtests.test(settings=settings):
            before = open_files()
            with pytest.raises(ValueError, match=message):
                make_node(peers(2), 0, **settings)
            assert open_files() <= before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_another_dtype_is_refused(dtype: torch.dtype) -> None:
    directory = NodeDirectory(peers(2), "p0")
    with pytest.raises(ValueError, match=f"float32 or torch.float64, got {dtype}"):
        PeerNode(10, dtype, directory, schema_checksum=1)


@pytest.mark.soak
@pytest.mark.process
def test_no_reply_is_lost_among_thousands() -> None:
    nodes = peers(2)
    numel, chunk_bytes = 100_000, 4000
    here = make_node(nodes, 0, numel, chunk_bytes=chunk_bytes, fetch_timeout_s=5.0)
    there = NodeProcess(nodes, 1, 1.0, numel)
    fetch_until(here, lambda received: received is not None)
    for _ in range(200):
        assert fetch(here) is not None
    assert here.statistics.timeouts == 0
    there.end()
    here.close()
