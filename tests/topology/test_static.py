"""Fixed graphs, compared with networkx and closed forms of their spectra."""

from __future__ import annotations

import math
import re

import networkx as nx
import pytest
import torch

from lightning_loco.topology import (
    Complete,
    FixedGraph,
    FromGraph,
    Grid,
    Hypercube,
    Ring,
    Star,
    Torus,
    consensus_rate,
)


def numbered(graph: nx.Graph) -> nx.Graph:
    """Sort nodes to 0..N-1, and drop the self-loops that networkx adds for a side of 1."""
    graph = nx.convert_node_labels_to_integers(graph, ordering="sorted")
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


Pair = tuple[FixedGraph, nx.Graph]

each_family = pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(Ring(), nx.cycle_graph(n)) for n in range(2, 13)], id="ring"),
        pytest.param([(Complete(), nx.complete_graph(n)) for n in range(2, 13)], id="complete"),
        pytest.param([(Star(), nx.star_graph(n - 1)) for n in range(2, 13)], id="star"),
        pytest.param(
            [(Grid(rows=r), nx.grid_2d_graph(r, c)) for r in range(1, 4) for c in range(1, 5)],
            id="grid",
        ),
        pytest.param(
            [
                (Torus(rows=r), nx.grid_2d_graph(r, c, periodic=True))
                for r in range(1, 4)
                for c in range(1, 5)
            ],
            id="torus",
        ),
        pytest.param([(Hypercube(), nx.hypercube_graph(k)) for k in range(1, 5)], id="hypercube"),
    ],
)


@each_family
def test_neighbors_are_those_of_networkx(pairs: list[Pair], subtests: pytest.Subtests) -> None:
    for topology, graph in pairs:
        graph = numbered(graph)
        num_workers = len(graph)
        with subtests.test(str(topology), num_workers=num_workers):
            for worker in graph:
                assert topology.neighbors(worker, num_workers) == sorted(graph[worker])
                assert topology.degree(worker, num_workers) == len(graph[worker])


@each_family
def test_weights_follow_from_the_degrees(pairs: list[Pair], subtests: pytest.Subtests) -> None:
    for topology, graph in pairs:
        graph = numbered(graph)
        with subtests.test(str(topology), num_workers=len(graph)):
            degrees = dict(graph.degree)
            expected = torch.zeros(len(graph), len(graph), dtype=torch.float64)
            for i, j in graph.edges:
                expected[i, j] = expected[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
            expected += torch.diag(1 - expected.sum(dim=1))
            matrix = topology.mixing_matrix(len(graph))
            torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-15)


def test_table_of_consensus_rates(subtests: pytest.Subtests) -> None:
    for topology, expected in (
        (Ring(), [0.8047, 0.9493, 0.9872, 0.9968]),
        (Torus(), [0.5, 0.6, 0.8828, 0.8828]),
        (Hypercube(), [0.5, 0.6, 0.6667, 0.7143]),
        (Star(), [0.875, 0.9375, 0.9688, 0.9844]),
        (Complete(), [0.0, 0.0, 0.0, 0.0]),
    ):
        with subtests.test(str(topology)):
            rates = [consensus_rate(topology, n) for n in (8, 16, 32, 64)]
            assert rates == pytest.approx(expected, abs=5e-5)


def test_undirected_exponential_graph() -> None:
    rates = [
        consensus_rate(
            FromGraph(nx.circulant_graph(n, [2**k for k in range(n.bit_length() - 1)])), n
        )
        for n in (8, 16, 32, 64)
    ]
    assert rates == pytest.approx([0.3333, 0.5, 0.6, 0.6667], abs=5e-5)


def test_closed_forms() -> None:
    for n in range(4, 33):
        # Small rings have a negative eigenvalue larger than lambda_2.
        ring = max(abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / n)) for k in range(1, n))
        assert consensus_rate(Ring(), n) == pytest.approx(ring, abs=1e-12)
        assert consensus_rate(Star(), n) == pytest.approx(1 - 1 / n, abs=1e-12)
        assert consensus_rate(Complete(), n) == pytest.approx(0, abs=1e-12)
    for side in range(4, 9):
        torus = 3 / 5 + 2 / 5 * math.cos(2 * math.pi / side)
        assert consensus_rate(Torus(), side * side) == pytest.approx(torus, abs=1e-12)
    for power in range(1, 8):
        cube = 1 - 2 / (1 + power)
        assert consensus_rate(Hypercube(), 2**power) == pytest.approx(cube, abs=1e-12)


def test_shapes_are_the_squarest() -> None:
    shapes = [Torus().shape(n) for n in (1, 7, 8, 12, 16, 36, 4096)]
    assert shapes == [(1, 1), (1, 7), (2, 4), (3, 4), (4, 4), (6, 6), (64, 64)]


def test_a_prime_torus_is_a_ring() -> None:
    assert torch.equal(Torus().mixing_matrix(7), Ring().mixing_matrix(7))


def test_hypercube_of_six() -> None:
    message = (
        "Topology 'hypercube' needs a power of two workers, got 6. "
        "Use topology=ring or topology=exponential, or run 4 or 8 workers."
    )
    for ask in (
        Hypercube().check,
        Hypercube().mixing_matrix,
        lambda n: Hypercube().neighbors(0, n),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            ask(6)


def test_rows_that_do_not_divide() -> None:
    with pytest.raises(
        ValueError, match="'torus' with rows=4 needs a multiple of 4 workers, got 6"
    ):
        Torus(rows=4).check(6)
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        Grid(rows=0)
