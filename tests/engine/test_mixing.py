"""A worker's mix is its row of the mixing matrix."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.engine.exchanges.neighbor import MixingRow, NeighborExchange
from lightning_loco.topology import Exponential, RandomMatching, Ring


def test_all_mixes_are_the_product_with_the_matrix(subtests: pytest.Subtests) -> None:
    topologies = (Ring(), Exponential(), RandomMatching(3))
    for topology, count in itertools.product(topologies, (1, 2, 3, 5)):
        with subtests.test(str(topology), count=count):
            messages = torch.randn(count, 4, dtype=torch.float64)
            kept = messages.clone()
            exchange = NeighborExchange(WorkerGroup(0, 1), Statistics(), topology)
            mixed = torch.stack(exchange.simulate(messages.unbind(), round_index=2))
            torch.testing.assert_close(mixed, topology.mixing_matrix(count, 2) @ messages)
            assert torch.equal(messages, kept)


def test_without_neighbours_the_message_is_the_result() -> None:
    message = torch.ones(2)
    assert MixingRow.of(Ring(), 0, 1, 0).apply(message, message, {}) is message
