"""Topologies by name, and conversion of other values to topologies."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

from lightning_loco.topology import (
    TOPOLOGIES,
    FromFile,
    FromGraph,
    FromMatrix,
    RandomMatching,
    Ring,
    as_topology,
    get_topology,
)

NAMES = (
    "ring complete star torus grid hypercube exponential one_peer_exponential xor random_matching "
    "random_two_peer"
)


def test_names() -> None:
    assert " ".join(TOPOLOGIES) == NAMES
    for name in TOPOLOGIES:
        assert get_topology(name).name == name
        assert as_topology(name) == get_topology(name)


def test_unknown_name(subtests: pytest.Subtests) -> None:
    for name, near in (
        ("rng", "ring"),
        ("Ring", "ring"),
        ("one-peer-exponential", "one_peer_exponential"),
        ("matching", "random_matching"),
        ("zzz", None),
    ):
        for ask in (get_topology, as_topology):
            with subtests.test(name, ask=ask.__name__):
                with pytest.raises(ValueError, match=f"^Unknown topology '{name}'") as caught:
                    ask(name)
                message = str(caught.value)
                assert NAMES.replace(" ", ", ") in message
                assert ("Did you mean" in message) is (near is not None)
                if near:
                    assert f"Did you mean '{near}'?" in message


def test_objects_pass_through() -> None:
    topology = RandomMatching(seed=3)
    assert as_topology(topology) is topology


def test_graphs_and_matrices() -> None:
    graph = nx.path_graph(3)
    matrix = FromGraph(graph).mixing_matrix(3)
    assert as_topology(graph) == FromGraph(graph)
    for form in (matrix, matrix.numpy(), matrix.tolist(), tuple(map(tuple, matrix.tolist()))):
        assert as_topology(form) == FromMatrix(matrix)
    assert torch.equal(as_topology(np.array([[1.0]])).mixing_matrix(1), torch.ones(1, 1).double())


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "graph.edges"
    path.write_text("0 1\n")
    assert as_topology(path) == as_topology(str(path)) == FromFile(path)
    with pytest.raises(
        ValueError, match=r"Unknown topology '.*missing\.edges'.* not a file either"
    ):
        as_topology(str(tmp_path / "missing.edges"))


def test_a_name_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ring").write_text("0 1\n")
    monkeypatch.chdir(tmp_path)
    assert as_topology("ring") == Ring()
    assert as_topology(Path("ring")) == FromFile("ring")


def test_error_for_an_asymmetric_matrix_contains_the_fix() -> None:
    with pytest.raises(ValueError, match=r"FromMatrix\(matrix, directed=True\)"):
        as_topology([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]])


def test_a_class_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got the class Ring\. Write Ring\(\)"):
        as_topology(Ring)


@pytest.mark.parametrize("value", [None, 3, {"ring": 1}])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="A topology must be a name, a Topology, a networkx graph"):
        as_topology(value)
