"""Laws that every topology keeps, enumerated over all of them and N = 1..12."""

from __future__ import annotations

import pickle
import time

import networkx as nx
import pytest
import torch

from lightning_loco.topology import (
    TOPOLOGIES,
    Complete,
    Exponential,
    FromFile,
    FromGraph,
    FromMatrix,
    Grid,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    RandomTwoPeer,
    Ring,
    Star,
    Topology,
    Torus,
    Xor,
    get_topology,
)

SETTINGS = [
    *(kind() for kind in TOPOLOGIES.values()),
    *(kind(weighting="uniform") for kind in (Ring, Complete, Star, Grid, Torus, Hypercube)),
    RandomMatching(seed=7),
    RandomTwoPeer(seed=-3),
]
DIRECTED = (Exponential, OnePeerExponential)


def custom_topologies(num_workers: int) -> list[Topology]:
    path = nx.path_graph(num_workers)
    made: list[Topology] = [
        FromGraph(path),
        FromGraph(path, weighting="uniform"),
        FromMatrix(Star().mixing_matrix(num_workers)),
        FromMatrix(Exponential().mixing_matrix(num_workers), directed=True),
    ]
    if num_workers > 1:
        cycle = nx.cycle_graph(num_workers, create_using=nx.DiGraph)
        made.append(FromGraph(cycle, weighting="uniform"))
    return made


def cases() -> list[pytest.ParameterSet]:
    made = []
    for num_workers in range(1, 13):
        fitting = [
            topology
            for topology in SETTINGS
            if not (isinstance(topology, (Hypercube, Xor)) and num_workers & (num_workers - 1))
        ]
        for topology in fitting + custom_topologies(num_workers):
            made.append(pytest.param(topology, num_workers, id=f"{topology}-{num_workers}"))
    return made


def rounds(topology: Topology, num_workers: int) -> range:
    return range(topology.period(num_workers) or 20)


@pytest.mark.parametrize(("topology", "num_workers"), cases())
def test_mixing_matrix_is_doubly_stochastic_and_symmetric(
    topology: Topology, num_workers: int
) -> None:
    topology.check(num_workers)
    one = torch.ones(num_workers, dtype=torch.float64)
    for t in rounds(topology, num_workers):
        matrix = topology.mixing_matrix(num_workers, t)
        assert matrix.shape == (num_workers, num_workers)
        assert matrix.dtype == torch.float64
        torch.testing.assert_close(matrix @ one, one, rtol=0, atol=1e-12)
        torch.testing.assert_close(matrix.T @ one, one, rtol=0, atol=1e-12)
        assert matrix.min() >= 0
        if not isinstance(topology, (*DIRECTED, FromMatrix, FromGraph)):
            assert torch.equal(matrix, matrix.T)
            eigenvalues = torch.linalg.eigvalsh(matrix)
            assert eigenvalues[-1] <= 1 + 1e-12
            assert eigenvalues[0] > -1 + 1e-3


@pytest.mark.parametrize(("topology", "num_workers"), cases())
def test_repeated_rounds_reach_the_mean(topology: Topology, num_workers: int) -> None:
    """The mean of all workers never moves, and everybody gets there."""
    torch.manual_seed(0)
    start = values = torch.randn(num_workers, dtype=torch.float64)
    matrices = [topology.mixing_matrix(num_workers, t) for t in rounds(topology, num_workers)]
    for _ in range(1500 // len(matrices) + 1):
        for matrix in matrices:
            values = matrix @ values
    torch.testing.assert_close(values, start.mean().expand(num_workers), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("topology", "num_workers"), cases())
def test_weights_and_receivers_are_the_rows_and_columns_of_the_matrix(
    topology: Topology, num_workers: int
) -> None:
    for t in rounds(topology, num_workers):
        matrix = topology.mixing_matrix(num_workers, t)
        for worker in range(num_workers):
            row = topology.weights(worker, num_workers, t)
            expected = {j: w for j, w in enumerate(matrix[worker].tolist()) if w or j == worker}
            assert row == expected
            assert list(row) == sorted(row)
            column = matrix[:, worker].nonzero().flatten().tolist()
            assert topology.receivers(worker, num_workers, t) == [j for j in column if j != worker]


@pytest.mark.parametrize("topology", [*SETTINGS, *custom_topologies(1)], ids=str)
def test_one_worker_keeps_everything(topology: Topology) -> None:
    assert topology.weights(0, 1, 5) == {0: 1.0}
    assert topology.receivers(0, 1, 5) == []


@pytest.mark.parametrize("topology", [*SETTINGS, *custom_topologies(4)], ids=str)
def test_matrices_repeat_after_the_period(topology: Topology) -> None:
    period = topology.period(4)
    if period is None:
        matrices = [topology.mixing_matrix(4, t) for t in range(40)]
        assert any(not torch.equal(matrices[0], other) for other in matrices)
    else:
        for t in range(period):
            first = topology.mixing_matrix(4, t)
            assert torch.equal(first, topology.mixing_matrix(4, t + 3 * period))


@pytest.mark.parametrize("topology", [*SETTINGS, *custom_topologies(4)], ids=str)
def test_matchings_are_disjoint_pairs_at_one_half(topology: Topology) -> None:
    if not topology.is_matching:
        assert topology.laplacian_scale == 1.0
        return
    assert topology.laplacian_scale == 2.0
    for t in rounds(topology, 8):
        laplacian = topology.laplacian_scale * (torch.eye(8) - topology.mixing_matrix(8, t))
        expected = torch.tensor([0.0, 2.0], dtype=torch.float64).repeat_interleave(4)
        torch.testing.assert_close(torch.linalg.eigvalsh(laplacian), expected)


@pytest.mark.parametrize("topology", [*SETTINGS, *custom_topologies(4)], ids=str)
def test_pickle_copy_is_equal(topology: Topology) -> None:
    copy = pickle.loads(pickle.dumps(topology))
    assert copy == topology
    assert hash(copy) == hash(topology)
    assert torch.equal(copy.mixing_matrix(4, 3), topology.mixing_matrix(4, 3))


def test_file_pickle_carries_the_graph(tmp_path) -> None:
    path = tmp_path / "graph.edges"
    path.write_text("0 1\n")
    topology = FromFile(path)
    path.unlink()
    assert pickle.loads(pickle.dumps(topology)).weights(0, 2) == {0: 0.5, 1: 0.5}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_large_numbers_of_workers_are_quick(name: str) -> None:
    topology = get_topology(name)

    def seconds() -> float:
        started = time.thread_time()
        for worker in (0, 1, 4095):
            row = topology.weights(worker, 4096, 3)
            assert sum(row.values()) == pytest.approx(1, abs=1e-12)
            assert topology.receivers(worker, 4096, 3)
        return time.thread_time() - started

    assert min(seconds() for _ in range(3)) < 0.25


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4, 0), r"worker must be in \[0, 4\), got 4"),
        ((-1, 4, 0), r"worker must be in \[0, 4\), got -1"),
        ((0, 0, 0), "num_workers must be at least 1, got 0"),
        ((0, 4, -1), "round_index counts rounds from 0, got -1"),
    ],
)
def test_arguments_out_of_range(name: str, arguments: tuple[int, int, int], message: str) -> None:
    topology = get_topology(name)
    with pytest.raises(ValueError, match=message):
        topology.weights(*arguments)
    with pytest.raises(ValueError, match=message):
        topology.receivers(*arguments)


@pytest.mark.parametrize("num_workers", [True, 4.0, "4"])
def test_number_of_workers_must_be_an_int(num_workers: object) -> None:
    with pytest.raises(TypeError, match="num_workers must be an int, got"):
        Ring().check(num_workers)
