"""Custom matrices and graphs: accepted ones, and error messages for the others."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

from lightning_loco.topology import FromFile, FromGraph, FromMatrix, Ring, Torus

PATH = [[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]


def test_matrix_in_any_form(subtests: pytest.Subtests) -> None:
    for matrix in (
        PATH,
        tuple(map(tuple, PATH)),
        [torch.tensor(row) for row in PATH],
        torch.tensor(PATH, requires_grad=True),
        torch.tensor(PATH, dtype=torch.bfloat16),
        np.array(PATH),
        np.array(PATH, dtype=np.float32),
    ):
        with subtests.test(matrix=matrix):
            topology = FromMatrix(matrix)
            topology.check(3)
            assert topology == FromMatrix(PATH)
            assert topology.mixing_matrix(3).tolist() == PATH
            assert topology.weights(0, 3) == {0: 0.5, 1: 0.5}
            assert topology.receivers(0, 3) == [1]


def test_matrix_is_copied() -> None:
    matrix = torch.tensor(PATH)
    topology = FromMatrix(matrix)
    matrix.zero_()
    assert topology.mixing_matrix(3).tolist() == PATH


def test_read_only_array_gives_no_warning() -> None:
    matrix = np.array(PATH)
    matrix.flags.writeable = False
    assert FromMatrix(matrix).num_workers == 3


def test_float32_sums_are_good_enough() -> None:
    FromMatrix(Torus().mixing_matrix(12).float()).check(12)


def test_zero_and_negative_diagonals_are_accepted() -> None:
    triangle = FromMatrix([[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    assert triangle.weights(0, 3) == {0: 0.0, 1: 0.5, 2: 0.5}
    swing = FromMatrix([[-0.1, 0.55, 0.55], [0.55, -0.1, 0.55], [0.55, 0.55, -0.1]])
    assert swing.weights(1, 3) == {0: 0.55, 1: -0.1, 2: 0.55}


def test_matrix_refused(subtests: pytest.Subtests) -> None:
    for matrix, message in (
        ([[0.5, 0.5], [0.5, 0.4]], r"row 1 of the mixing matrix sums to 0\.9, not to 1"),
        (
            [[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]],
            r"not symmetric: entry \[0, 1\] is 0\.3 and \[1, 0\] is 0\.2.*directed=True",
        ),
        ([[0.5, 0.5], [0.9, 0.1]], r"column 0 sums to 1\.4"),
        ([[1, 0], [0, 1]], r"graph of the matrix is not connected: .* 2 parts, \[0\], \[1\]"),
        ([[0, 1], [1, 0]], "does not converge to the mean: .* eigenvalue of size 1,"),
        ([[2, -1], [-1, 2]], "does not converge to the mean: .* eigenvalue of size 3,"),
        ([[0.5, 0.5]], r"must be square, \(N, N\) for N workers, got shape \(1, 2\)"),
        ([], r"must be square.* got shape \(0,\)"),
        (np.zeros((0, 0)), r"must be square.* got shape \(0,\)"),
        (torch.tensor(1.0), r"must be square.* got shape \(\)"),
        ([[1.0, 0.0], [1.0]], "must hold N rows of N numbers"),
        ([["a", "b"], ["c", "d"]], "must hold N rows of N numbers"),
        ([0.5, 0.5], "must hold N rows of N numbers"),
        (
            [[float("nan"), 1], [1, 0]],
            "row 0 of the mixing matrix holds a weight that is not finite",
        ),
    ):
        with subtests.test(matrix=matrix), pytest.raises(ValueError, match=message):
            FromMatrix(matrix)


def test_directed_matrix() -> None:
    matrix = [[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]]
    topology = FromMatrix(matrix, directed=True)
    assert topology.mixing_matrix(3).tolist() == matrix
    one_way = FromMatrix([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]], directed=True)
    assert one_way.receivers(0, 3) == [1]


def test_directed_matrix_refused() -> None:
    with pytest.raises(ValueError, match=r"not doubly stochastic: column 0 sums to 1\.5"):
        FromMatrix([[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]], directed=True)
    with pytest.raises(ValueError, match="does not converge"):
        FromMatrix([[0, 0, 1], [1, 0, 0], [0, 1, 0]], directed=True)


def test_wrong_number_of_workers() -> None:
    topology = FromMatrix(PATH)
    for ask in (topology.check, topology.mixing_matrix, lambda n: topology.weights(0, n, 0)):
        with pytest.raises(
            ValueError, match="'matrix' was made for 3 workers, got 4. Run 3 workers"
        ):
            ask(4)


def test_graph_weights() -> None:
    graph = nx.Graph([(0, 1), (1, 2), (1, 3)])
    assert FromGraph(graph).weights(1, 4) == pytest.approx({0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25})
    assert FromGraph(nx.path_graph(4)).weights(0, 4) == pytest.approx({0: 2 / 3, 1: 1 / 3})
    uniform = FromGraph(graph, weighting="uniform")
    assert uniform.weights(0, 4) == pytest.approx({0: 0.75, 1: 0.25})


def test_graph_with_edge_weights() -> None:
    graph = nx.Graph()
    graph.add_weighted_edges_from([(0, 1, 0.5), (1, 2, 0.25)])
    assert FromGraph(graph, weighting="edges").mixing_matrix(3).tolist() == PATH


def test_laplacian_weights(tmp_path: Path) -> None:
    """The degrees minus the adjacency; an edge without a weight counts as 1."""
    ring, lopsided = nx.cycle_graph(6), weighted((0, 1, 2.0), (1, 2, 0.5), (1, 3, 1.0))
    path = tmp_path / "ring.edges"
    nx.write_edgelist(ring, path, data=False)
    for graph, topology in (
        (ring, FromGraph(ring, "laplacian")),
        (ring, FromFile(path, "laplacian")),
        (lopsided, FromGraph(lopsided, "laplacian")),
        (nx.path_graph(2), FromGraph(nx.path_graph(2), "laplacian")),
    ):
        mixing = topology.mixing_matrix(len(graph))
        laplacian = topology.laplacian_scale * (torch.eye(len(graph)).double() - mixing)
        adjacency = torch.tensor(nx.to_numpy_array(graph, sorted(graph))).double()
        expected = adjacency.sum(0).diag() - adjacency
        torch.testing.assert_close(laplacian, expected, rtol=0, atol=1e-14)
        assert mixing.diagonal().min() > 0
    assert FromGraph(nx.empty_graph(1), "laplacian").weights(0, 1) == {0: 1.0}


def test_graph_is_copied() -> None:
    graph = nx.cycle_graph(5)
    topology = FromGraph(graph)
    graph.clear()
    torch.testing.assert_close(topology.mixing_matrix(5), Ring().mixing_matrix(5))


def test_directed_graph_sends_along_its_edges() -> None:
    topology = FromGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0)]))
    assert topology.receivers(0, 3) == [1]
    assert topology.weights(1, 3) == {0: 0.5, 1: 0.5}


def test_balanced_directed_graph_takes_uniform_weights() -> None:
    graph = nx.DiGraph([(0, 1), (1, 0), (1, 2), (2, 3), (3, 1)])
    matrix = FromGraph(graph, weighting="uniform").mixing_matrix(4)
    torch.testing.assert_close(matrix.sum(dim=0), torch.ones(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="directed graph: .*not doubly stochastic"):
        FromGraph(graph)


def weighted(*edges: tuple[int, int, object]) -> nx.Graph:
    graph = nx.Graph()
    graph.add_weighted_edges_from(edges)
    return graph


def test_graph_refused(subtests: pytest.Subtests) -> None:
    for graph, weighting, message in (
        (
            nx.Graph([(0, 1), (2, 3)]),
            "metropolis",
            r"not connected: .* 2 parts, \[0, 1\], \[2, 3\]",
        ),
        (nx.empty_graph(20), "metropolis", r"20 parts, \[0\], \[1\], \[2\], \[3\], \.\.\."),
        (nx.DiGraph([(0, 1), (1, 2)]), "uniform", "not doubly stochastic"),
        (nx.Graph([("a", "b")]), "metropolis", r"workers 0\.\.N-1, got 'a', 'b'\. .*convert_node"),
        (nx.Graph([(1, 2)]), "metropolis", r"workers 0\.\.N-1, got 1, 2\."),
        (nx.Graph(), "metropolis", r"workers 0\.\.N-1, got none\."),
        (nx.Graph([(0, 1), (1, 1)]), "metropolis", "Worker 1 has an edge to itself"),
        (nx.MultiGraph([(0, 1), (0, 1)]), "metropolis", "multigraph"),
        (nx.path_graph(3), "edges", "Edge 1 - 0 has the weight None"),
        (weighted((0, 1, "heavy")), "edges", "has the weight 'heavy'"),
        (weighted((0, 1, 0.0)), "edges", "must be a finite number other than 0"),
        (weighted((0, 1, 1.0)), "edges", "these edge weights does not converge"),
        (
            nx.path_graph(3),
            "equal",
            "weighting must be 'metropolis', 'uniform', 'edges' or 'laplacian', got 'equal'",
        ),
        (weighted((0, 1, -1.0)), "laplacian", r"weight -1\.0; it must be finite and positive"),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=message):
            FromGraph(graph, weighting)


def test_graph_must_be_a_graph() -> None:
    with pytest.raises(TypeError, match="takes a networkx graph, got list"):
        FromGraph([[0, 1]])
