"""Laws that hold for every topology, checked for N = 1..12."""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable, Sequence

import networkx as nx
import pytest
import torch

from lightning_loco.topology import (
    TOPOLOGIES,
    Exponential,
    FromFile,
    FromGraph,
    FromMatrix,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    RandomTwoPeer,
    Ring,
    Star,
    Topology,
    Xor,
    get_topology,
)

Make = Callable[[int], Topology]
"""A function from a number of workers to a topology."""

UP_TO_12 = range(1, 13)
POWERS = (1, 2, 4, 8)


def always(topology: Topology) -> tuple[Make, Sequence[int]]:
    """Return the same topology for every number of workers that it supports."""
    sizes = POWERS if isinstance(topology, (Hypercube, Xor)) else UP_TO_12
    return lambda num_workers: topology, sizes


SHIPPED = (
    *(kind() for kind in TOPOLOGIES.values()),
    RandomMatching(seed=7),
    RandomTwoPeer(seed=-3),
)
ROWS: dict[str, tuple[Make, Sequence[int]]] = {
    **{str(topology): always(topology) for topology in SHIPPED},
    "path": (lambda n: FromGraph(nx.path_graph(n)), UP_TO_12),
    "uniform path": (lambda n: FromGraph(nx.path_graph(n), weighting="uniform"), UP_TO_12),
    "directed cycle": (
        lambda n: FromGraph(nx.cycle_graph(n, create_using=nx.DiGraph), weighting="uniform"),
        range(2, 13),
    ),
    "matrix": (lambda n: FromMatrix(Star().mixing_matrix(n)), UP_TO_12),
    "directed matrix": (
        lambda n: FromMatrix(Exponential().mixing_matrix(n), directed=True),
        UP_TO_12,
    ),
}
DIRECTED = (Exponential, OnePeerExponential)

each_topology = pytest.mark.parametrize(
    ("make", "sizes"), [pytest.param(*row, id=name) for name, row in ROWS.items()]
)


def rounds(topology: Topology, num_workers: int) -> range:
    return range(topology.period(num_workers) or 20)


@functools.cache
def matrices_of(make: Make, num_workers: int) -> torch.Tensor:
    """Return the mixing matrices of a period, or of 20 random rounds: ``(R, N, N)``."""
    topology = make(num_workers)
    return torch.stack(
        [topology.mixing_matrix(num_workers, t) for t in rounds(topology, num_workers)]
    )


@each_topology
def test_mixing_matrix_is_doubly_stochastic_and_symmetric(
    make: Make, sizes: Sequence[int], subtests: pytest.Subtests
) -> None:
    for num_workers in sizes:
        with subtests.test(num_workers=num_workers):
            topology = make(num_workers)
            topology.check(num_workers)
            matrices = matrices_of(make, num_workers)
            ones = torch.ones(len(matrices), num_workers, dtype=torch.float64)
            assert matrices.shape[1:] == (num_workers, num_workers)
            assert matrices.dtype == torch.float64
            torch.testing.assert_close(matrices.sum(2), ones, rtol=0, atol=1e-12)
            torch.testing.assert_close(matrices.sum(1), ones, rtol=0, atol=1e-12)
            assert matrices.min() >= 0
            if not isinstance(topology, (*DIRECTED, FromMatrix, FromGraph)):
                assert torch.equal(matrices, matrices.mT)
                eigenvalues = torch.linalg.eigvalsh(matrices)
                assert eigenvalues.max() <= 1 + 1e-12
                assert eigenvalues.min() > -1 + 1e-3


@each_topology
def test_repeated_rounds_reach_the_mean(
    make: Make, sizes: Sequence[int], subtests: pytest.Subtests
) -> None:
    """The mean of all workers is constant, and all workers converge to it."""
    for num_workers in sizes:
        with subtests.test(num_workers=num_workers):
            torch.manual_seed(0)
            start = torch.randn(num_workers, dtype=torch.float64)
            matrices = matrices_of(make, num_workers)
            period = functools.reduce(lambda first, then: then @ first, matrices)
            values = torch.linalg.matrix_power(period, 1500 // len(matrices) + 1) @ start
            torch.testing.assert_close(values, start.mean().expand(num_workers), rtol=0, atol=1e-12)


@each_topology
def test_weights_and_receivers_are_the_rows_and_columns_of_the_matrix(
    make: Make, sizes: Sequence[int], subtests: pytest.Subtests
) -> None:
    for num_workers in sizes:
        with subtests.test(num_workers=num_workers):
            topology = make(num_workers)
            for t, matrix in enumerate(matrices_of(make, num_workers)):
                for worker in range(num_workers):
                    row = topology.weights(worker, num_workers, t)
                    entries = enumerate(matrix[worker].tolist())
                    assert row == {j: w for j, w in entries if w or j == worker}
                    assert list(row) == sorted(row)
                    column = matrix[:, worker].nonzero().flatten().tolist()
                    others = [j for j in column if j != worker]
                    assert topology.receivers(worker, num_workers, t) == others


def test_a_single_worker_has_weight_one(subtests: pytest.Subtests) -> None:
    for name, (make, sizes) in ROWS.items():
        if 1 not in sizes:
            continue
        with subtests.test(name):
            topology = make(1)
            assert topology.weights(0, 1, 5) == {0: 1.0}
            assert topology.receivers(0, 1, 5) == []


def test_matrices_repeat_after_the_period(subtests: pytest.Subtests) -> None:
    for name, (make, _) in ROWS.items():
        with subtests.test(name):
            topology = make(4)
            period = topology.period(4)
            if period is None:
                matrices = [topology.mixing_matrix(4, t) for t in range(40)]
                assert any(not torch.equal(matrices[0], other) for other in matrices)
            else:
                for t in range(period):
                    first = topology.mixing_matrix(4, t)
                    assert torch.equal(first, topology.mixing_matrix(4, t + 3 * period))


def test_matchings_are_disjoint_pairs_at_one_half(subtests: pytest.Subtests) -> None:
    expected = torch.tensor([0.0, 2.0], dtype=torch.float64).repeat_interleave(4)
    for name, (make, _) in ROWS.items():
        with subtests.test(name):
            topology = make(8)
            if not topology.is_matching:
                assert topology.laplacian_scale == 1.0
                continue
            assert topology.laplacian_scale == 2.0
            for t in rounds(topology, 8):
                laplacian = topology.laplacian_scale * (torch.eye(8) - topology.mixing_matrix(8, t))
                torch.testing.assert_close(torch.linalg.eigvalsh(laplacian), expected)


def test_pickle_copy_is_equal(subtests: pytest.Subtests) -> None:
    for name, (make, _) in ROWS.items():
        with subtests.test(name):
            topology = make(4)
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


def test_large_numbers_of_workers_are_fast(subtests: pytest.Subtests) -> None:
    def seconds(topology: Topology) -> float:
        started = time.thread_time()
        for worker in (0, 1, 4095):
            row = topology.weights(worker, 4096, 3)
            assert sum(row.values()) == pytest.approx(1, abs=1e-12)
            assert topology.receivers(worker, 4096, 3)
        return time.thread_time() - started

    for name in TOPOLOGIES:
        with subtests.test(name):
            topology = get_topology(name)
            assert min(seconds(topology) for _ in range(3)) < 0.25


def test_arguments_out_of_range(subtests: pytest.Subtests) -> None:
    for name in TOPOLOGIES:
        topology = get_topology(name)
        for arguments, message in (
            ((4, 4, 0), r"worker must be in \[0, 4\), got 4"),
            ((-1, 4, 0), r"worker must be in \[0, 4\), got -1"),
            ((0, 0, 0), "num_workers must be at least 1, got 0"),
            ((0, 4, -1), "round_index counts rounds from 0, got -1"),
        ):
            with subtests.test(name, arguments=arguments):
                with pytest.raises(ValueError, match=message):
                    topology.weights(*arguments)
                with pytest.raises(ValueError, match=message):
                    topology.receivers(*arguments)


@pytest.mark.parametrize("num_workers", [True, 4.0, "4"])
def test_number_of_workers_must_be_an_int(num_workers: object) -> None:
    with pytest.raises(TypeError, match="num_workers must be an int, got"):
        Ring().check(num_workers)
