"""A topology from an edge-list file."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import networkx as nx  # type: ignore[import-untyped]

from lightning_loco.topology.custom import CustomTopology, check_graph, graph_rows


@dataclass(frozen=True)
class FromFile(CustomTopology):
    """A graph read from an edge-list file with one edge ``i j`` or ``i j weight`` per line.

    Workers are numbered from 0; ``#`` begins a comment. What ``networkx.write_edgelist`` and
    ``write_weighted_edgelist`` write can be read. If the edges have weights, all of them must, and
    the weights are the entries ``W[i, j] = W[j, i]`` of the mixing matrix; otherwise Metropolis
    weights are taken.

    Args:
        path: the file; it is read at construction.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no edge (the message names it), or a graph that `FromGraph`
            refuses.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "path.edges")
        ...     _ = path.write_text("0 1  # a path of three workers\\n1 2\\n")
        ...     FromFile(path).receivers(1, 3)
        [0, 2]
    """

    name: ClassVar[str] = "file"

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        path = Path(self.path)
        object.__setattr__(self, "path", str(path))
        graph = _read_graph(path)
        try:
            check_graph(graph)
            weighted = bool(nx.get_edge_attributes(graph, "weight"))
            self._set_rows(graph_rows(graph, "edges" if weighted else "metropolis"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _read_graph(path: Path) -> nx.Graph:
    graph = nx.Graph()
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), start=1):
        words = line.partition("#")[0].split(maxsplit=2)
        if not words:
            continue
        try:
            i, j = (int(word) for word in words[:2])
            weight = _read_weight(words[2:])
        except (ValueError, SyntaxError, TypeError, AttributeError):
            i = j = -1
        if min(i, j) < 0:
            raise ValueError(
                f"{path}, line {number}: expected 'i j' or 'i j weight' with whole numbers from 0 "
                f"for the workers, got {line.strip()!r}."
            )
        if graph.has_edge(i, j) and graph.edges[i, j].get("weight") != weight:
            raise ValueError(
                f"{path}, line {number}: edge {i} - {j} was given before with another weight. "
                "Name each edge once."
            )
        graph.add_edge(i, j, **({} if weight is None else {"weight": weight}))
    if not graph:
        raise ValueError(
            f"{path} holds no edges. Write one edge 'i j' per line, with workers numbered from 0."
        )
    missing = next(worker for worker in range(len(graph) + 1) if worker not in graph)
    if missing < len(graph):
        raise ValueError(
            f"{path}: worker {missing} is in no edge, but worker {max(graph)} is. "
            "Number the workers from 0 without gaps, and give each one an edge."
        )
    return graph


def _read_weight(words: list[str]) -> float | None:
    """The weight after 'i j': none, a number, or a dict as ``nx.write_edgelist`` writes it."""
    if not words:
        return None
    if words[0].startswith("{"):
        value = ast.literal_eval(words[0]).get("weight")
        return None if value is None else float(value)
    return float(words[0])
