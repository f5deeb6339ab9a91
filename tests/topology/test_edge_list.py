"""Edge-list files: supported formats and invalid lines."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest
import torch

from lightning_loco.topology import FromFile, FromGraph


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "graph.edges"
    path.write_text(text)
    return path


def test_plain_edges_take_metropolis_weights(tmp_path: Path) -> None:
    topology = FromFile(write(tmp_path, "# a path\n\n0 1\n1\t2  # the end\n 1 0\n"))
    expected = FromGraph(nx.path_graph(3)).mixing_matrix(3)
    assert torch.equal(topology.mixing_matrix(3), expected)


def test_weights_are_entries_of_the_matrix(tmp_path: Path) -> None:
    topology = FromFile(write(tmp_path, "0 1 0.5\n1 2 .25\n"))
    topology.check(3)
    assert topology.mixing_matrix(3).tolist() == [[0.5, 0.5, 0], [0.5, 0.25, 0.25], [0, 0.25, 0.75]]


def test_reads_what_networkx_writes(tmp_path: Path) -> None:
    graph = nx.cycle_graph(5)
    path = tmp_path / "graph.edges"
    nx.write_edgelist(graph, path)
    assert torch.equal(FromFile(path).mixing_matrix(5), FromGraph(graph).mixing_matrix(5))
    nx.set_edge_attributes(graph, 0.3, "weight")
    expected = FromGraph(graph, weighting="edges").mixing_matrix(5)
    for writer in (nx.write_edgelist, nx.write_weighted_edgelist):
        writer(graph, path)
        assert torch.equal(FromFile(path).mixing_matrix(5), expected)


def test_bad_line_is_shown(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for line, shown in (
        ("0 x", "nodes 0,x to type"),
        ("0 1.5", "nodes 0,1.5 to type"),
        ("0 1 heavy", "data heavy to type"),
        ("0 1 0.5 0.5", r"\['0.5', '0.5'\]"),
        ("0 1 {1}", r"data \{1\} to type"),
    ):
        path = write(tmp_path, f"# graph\n0 1\n{line}\n")
        message = rf"graph\.edges: Write one edge 'i j' or .*{shown}"
        with subtests.test(line=line), pytest.raises(ValueError, match=message):
            FromFile(path)


def test_file_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for text, message in (
        ("# nothing\n", "nodes of the graph must be the workers 0..N-1, got none"),
        ("0 -1\n", "must be the workers 0..N-1, got 0, -1"),
        ("0 1\n2 3\n", r"graph\.edges: The graph is not connected: .*\[0, 1\], \[2, 3\]"),
        ("0 1\n1 3\n", "must be the workers 0..N-1, got 0, 1, 3"),
        ("0 1\n1 1000000000000\n", "must be the workers 0..N-1, got 0, 1, 1000000000000"),
        ("0 1\n1 1\n", r"graph\.edges: Worker 1 has an edge to itself"),
        ("0 1 {'weight': [1]}\n", r"has the weight \[1\]"),
        ("0 1 0.5\n1 2\n", "has the weight None"),
        ("0 1 nan\n", "has the weight nan"),
        ("0 1 1.5\n", "does not converge"),
    ):
        with subtests.test(text=text), pytest.raises(ValueError, match=message):
            FromFile(write(tmp_path, text))


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.edges"
    path.write_bytes(b"\x80\x02\xff\n")
    with pytest.raises(ValueError, match=r"graph\.edges: 'utf-8' codec can't decode"):
        FromFile(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.edges"):
        FromFile(tmp_path / "missing.edges")
