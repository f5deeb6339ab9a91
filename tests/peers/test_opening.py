"""Opening a node: for the nodes of a list, the ranks of a job, and a worker alone."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_loco.algorithms.pairwise import PairwiseAverage, Tag
from lightning_loco.codecs import BFloat16
from lightning_loco.comm.flat import FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.peers import NodeDirectory, StoreDirectory, write_key_file
from lightning_loco.peers.opening import open_directory, open_node
from lightning_loco.peers.settings import PairwiseSettings
from tests.peers.helpers import (
    fetch,
    fetch_until,
    open_files,
    peer_threads,
    peers,
    wait_until_ended,
)
from tests.pool import Pool

ALONE = WorkerGroup(worker=0, num_workers=1)


def settings(**given: Any) -> PairwiseSettings:
    return PairwiseSettings(PairwiseAverage(), **{"fetch_timeout_s": 5.0, **given})


def layout(size: int = 3) -> FlatLayout:
    return FlatLayout(nn.Linear(size, 1).named_parameters())


def test_nodes_listen_at_their_ports_and_read_from_each_other() -> None:
    nodes = peers(2)
    made = [
        open_node(settings(nodes=nodes, name=node.name), ALONE, layout(), seed)
        for seed, node in enumerate(nodes)
    ]
    assert [node.port for node in made] == [node.port for node in nodes]
    made[1].publish(torch.arange(4.0), Tag(3, 0.5))
    received = fetch(made[0])
    assert received is not None
    assert (received.params.tolist(), received.peer) == ([0.0, 1.0, 2.0, 3.0], "p1")
    for node in made:
        node.close()


def test_a_node_with_another_model_is_refused() -> None:
    nodes = peers(2)
    made = [
        open_node(settings(nodes=nodes, name=node.name), ALONE, layout(size), 0)
        for node, size in zip(nodes, (3, 4), strict=True)
    ]
    made[1].publish(torch.zeros(5), Tag(0, 0))
    assert fetch(made[0]) is None
    assert made[0].statistics.refused == 1
    for node in made:
        node.close()


def test_what_the_user_has_set_reaches_the_node(tmp_path: Path) -> None:
    write_key_file(tmp_path / "job.key")
    nodes = peers(2)
    chosen = {"compression": "bf16", "key_file": tmp_path / "job.key"}
    made = [
        open_node(settings(nodes=nodes, name="p0", **chosen), ALONE, layout(), 0),
        open_node(settings(nodes=nodes, name="p1", **chosen), ALONE, layout(), 1),
    ]
    made[1].publish(torch.full((4,), 1.001), Tag(0, 0))
    received = fetch(made[0])
    assert received is not None
    assert received.params.tolist() == [1.0] * 4
    assert received.received_bytes == BFloat16().row_bytes
    for node in made:
        node.close()
    with socket.create_server((nodes[1].host, nodes[1].port)):
        impatient = settings(nodes=nodes, name="p0", fetch_timeout_s=0.1)
        node = open_node(impatient, ALONE, layout(), 0)
        assert fetch(node) is None
        wait_until_ended(node)
        assert node.statistics.timeouts == 1
        assert node._fetching._reader.fetch_timeout_s == 0.1
        node.close()


def test_a_worker_alone_has_no_peers() -> None:
    directory = open_directory(settings(), ALONE)
    assert isinstance(directory, NodeDirectory)
    assert directory.names == []
    assert directory.is_local
    node = open_node(settings(), ALONE, layout(), 0)
    assert fetch(node) is None
    node.close()


def test_a_taken_port_leaves_nothing() -> None:
    (peer,) = peers(1)
    with socket.create_server((peer.host, peer.port)):
        before = open_files()
        with pytest.raises(RuntimeError, match=f"Port {peer.port} of {peer.host} is taken"):
            open_node(settings(nodes=[peer], name="p0"), ALONE, layout(), 0)
        assert peer_threads() == []
        assert open_files() <= before


def ranks_read(rank: int, world: int) -> tuple[str, bool, list[str], float]:
    group = WorkerGroup.create(timeout_s=30)
    directory = open_directory(settings(), group)
    node = open_node(settings(), group, layout(), rank)
    node.publish(torch.full((4,), float(rank)), Tag(rank, 0))
    seen = []
    fetch_until(node, lambda r: r is not None and seen.append(r) is None)
    group.gather_objects(None)  # serve until all have read
    node.close()
    group.close()
    kind = type(directory).__name__
    return kind, directory.is_local, directory.names, float(seen[0].params[0])


def test_ranks_of_one_job_on_one_machine_find_each_other_at_its_loopback(pool: Pool) -> None:
    results = pool.run(ranks_read, world=2)
    assert results[0] == (StoreDirectory.__name__, True, ["worker1"], 1.0)
    assert results[1] == (StoreDirectory.__name__, True, ["worker0"], 0.0)
