"""Custom topologies: from a mixing matrix, a networkx graph or a file of edges.

All check their input at construction, so errors are raised before any process starts.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import networkx as nx  # type: ignore[import-untyped]

from lightning_loco.topology.topology import (
    TOLERANCE,
    Topology,
    check_connected,
    check_count,
    check_doubly_stochastic,
)

if TYPE_CHECKING:
    from torch import Tensor

EdgeWeighting = Literal["metropolis", "uniform", "edges", "laplacian"]
Row = dict[int, float]


@dataclass(frozen=True)
class CustomTopology(Topology):
    """A fixed mixing matrix for one number of workers, stored as sparse rows."""

    num_workers: int = field(init=False)
    entries: tuple[tuple[tuple[int, float], ...], ...] = field(init=False, repr=False)
    laplacian_scale: float = field(init=False, repr=False, default=1.0)

    def _set_rows(self, rows: Sequence[Row], laplacian_scale: float = 1.0) -> None:
        object.__setattr__(self, "laplacian_scale", laplacian_scale)
        object.__setattr__(self, "num_workers", len(rows))
        object.__setattr__(self, "entries", tuple(tuple(sorted(row.items())) for row in rows))

    def check_num_workers(self, num_workers: int) -> None:
        check_count(num_workers)
        if num_workers != self.num_workers:
            raise ValueError(
                f"Topology '{self.name}' was made for {self.num_workers} workers, got "
                f"{num_workers}. Run {self.num_workers} workers, or make it for {num_workers}."
            )

    def check(self, num_workers: int) -> None:
        # Everything else was checked at construction.
        self.check_num_workers(num_workers)

    def weights(self, worker: int, num_workers: int, round_index: int = 0) -> Row:
        self.require(worker, num_workers, round_index)
        return dict(self.entries[worker])


@dataclass(frozen=True)
class FromMatrix(CustomTopology):
    """A user's mixing matrix, the same in every round.

    Args:
        matrix: ``(N, N)`` tensor, array or nested list; ``matrix[i][j]`` is the share of worker j's
            message in what worker i receives. Rows and columns sum to 1 within 1e-6; the diagonal
            may be zero or negative.
        directed: Accept a matrix that is not symmetric; it must still be doubly stochastic.

    Raises:
        ValueError: If it is not a square matrix of finite numbers, a row or column does not sum to
            1, it is not symmetric or not connected, or its powers do not converge to the mean (an
            eigenvalue outside (-1, 1]).

    Example:
        >>> FromMatrix([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]).weights(0, 3)
        {0: 0.5, 1: 0.5}
    """

    name: ClassVar[str] = "matrix"

    matrix: InitVar[Any]
    directed: bool = False

    def __post_init__(self, matrix: Any) -> None:
        import torch

        try:
            numbers = (
                matrix.tolist() if hasattr(matrix, "tolist") else [list(row) for row in matrix]
            )
            dense = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"A mixing matrix must hold N rows of N numbers, got {reprlib.repr(matrix)}."
            ) from error
        if dense.ndim != 2 or dense.shape[0] != dense.shape[1] or not dense.numel():
            raise ValueError(
                "A mixing matrix must be square, (N, N) for N workers, got shape "
                f"{tuple(dense.shape)}. Give one row and one column per worker."
            )
        rows = [
            {j: w for j, w in enumerate(row) if w or i == j} for i, row in enumerate(dense.tolist())
        ]
        check_doubly_stochastic("The matrix", rows)
        if not self.directed:
            _check_symmetric(dense)
        check_connected(
            "The graph of the matrix",
            len(rows),
            ((i, j) for i, row in enumerate(rows) for j in row),
        )
        _check_converges("the matrix", dense)
        self._set_rows(rows)


@dataclass(frozen=True)
class FromGraph(CustomTopology):
    r"""A user's networkx graph, whose nodes are the workers 0..N-1.

    In a directed graph an edge (i, j) means that i sends to j, and degrees count incoming edges.
    The outgoing weights of every worker must sum to its incoming ones: ``uniform`` needs as many
    outgoing as incoming edges at each worker, ``metropolis`` also the same number everywhere.

    Args:
        graph: ``networkx.Graph`` or ``DiGraph`` with nodes 0..N-1 and no self-loops.
        weighting: The weight ``W[i, j]`` of an edge. ``"metropolis"``:
            ``1 / (1 + max(degree_i, degree_j))``; ``"uniform"``: ``1 / (1 + max_degree)``;
            ``"edges"``: the edge attribute ``weight``. The worker's own weight is 1 minus the sum.
            ``"laplacian"``: the attribute ``weight``, or 1 without it, is the weight
            :math:`\lambda_{ij}` in the Laplacian, whose diagonal is their sum; GASLoC's
            ``gossip_step`` then applies to the Laplacian, and ``W`` is scaled to be stable.

    Raises:
        TypeError: If it is not a networkx graph.
        ValueError: If there are nodes other than 0..N-1, self-loops or parallel edges, it is not
            connected, or its mixing matrix is not doubly stochastic or does not converge.

    Example:
        >>> import networkx as nx
        >>> FromGraph(nx.path_graph(3)).weights(0, 3)
        {0: 0.6666666666666667, 1: 0.3333333333333333}
    """

    name: ClassVar[str] = "graph"

    graph: InitVar[nx.Graph]
    weighting: EdgeWeighting = "metropolis"

    def __post_init__(self, graph: nx.Graph) -> None:
        if self.weighting not in get_args(EdgeWeighting):
            raise ValueError(
                "weighting must be 'metropolis', 'uniform', 'edges' or 'laplacian', got "
                f"{self.weighting!r}."
            )
        _check_graph(graph)
        self._set_rows(*_graph_rows(graph, self.weighting))
        if self.weighting == "edges":
            _check_converges("these edge weights", self.mixing_matrix(self.num_workers))


@dataclass(frozen=True)
class FromFile(CustomTopology):
    """A graph read from an edge-list file with one edge ``i j`` or ``i j weight`` per line.

    Workers are numbered from 0; ``#`` begins a comment. networkx's ``write_edgelist`` and
    ``write_weighted_edgelist`` write such files. Either all edges have a weight or none. The
    weights are the entries ``W[i, j] = W[j, i]`` of the mixing matrix; without weights, Metropolis
    weights are used.

    Args:
        path: The file; it is read at construction.
        weighting: None as above, or one of `FromGraph`; ``"laplacian"`` takes the weights of the
            file, or 1, as weights in the Laplacian.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line is not an edge, or `FromGraph` refuses the graph.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "path.edges")
        ...     nx.write_edgelist(nx.path_graph(3), path)
        ...     FromFile(path).receivers(1, 3)
        [0, 2]
    """

    name: ClassVar[str] = "file"

    path: str | os.PathLike[str]
    weighting: EdgeWeighting | None = None

    def __post_init__(self) -> None:
        path = os.fspath(self.path)
        object.__setattr__(self, "path", path)
        try:
            graph = _read_edges(path)
            is_weighted = bool(nx.get_edge_attributes(graph, "weight"))
            weighting = self.weighting or ("edges" if is_weighted else "metropolis")
            found = FromGraph(graph, weighting)
            self._set_rows([dict(row) for row in found.entries], found.laplacian_scale)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _read_edges(path: str) -> nx.Graph:
    try:
        return nx.read_edgelist(path, nodetype=int)
    except TypeError:  # not the format of write_edgelist
        pass
    try:
        return nx.read_weighted_edgelist(path, nodetype=int)
    except (TypeError, IndexError) as error:
        raise ValueError(
            f"Write one edge 'i j' or 'i j weight' per line, with integers for the workers: {error}"
        ) from error


def _check_symmetric(dense: Tensor) -> None:
    gap = (dense - dense.T).abs()
    if gap.max() > TOLERANCE:
        i, j = divmod(int(gap.argmax()), len(dense))
        raise ValueError(
            f"The matrix is not symmetric: entry [{i}, {j}] is {dense[i, j]:.7g} and [{j}, {i}] is "
            f"{dense[j, i]:.7g}. Make the two equal, or pass FromMatrix(matrix, directed=True) if "
            "workers may receive from other workers than they send to."
        )


def _check_converges(what: str, dense: Tensor) -> None:
    """Raise unless the powers of a doubly stochastic matrix converge to the mean."""
    import torch

    rest = dense - 1 / len(dense)
    symmetric = torch.equal(rest, rest.T)
    eigenvalues = torch.linalg.eigvalsh(rest) if symmetric else torch.linalg.eigvals(rest)
    largest = float(eigenvalues.abs().max())
    if largest >= 1 - 1e-12:
        raise ValueError(
            f"Gossip with {what} does not converge to the mean: besides the 1 of the mean it has "
            f"an eigenvalue of size {largest:.7g}, and all must be below 1. "
            "Increase the diagonal, for example (W + I) / 2."
        )


def _check_graph(graph: nx.Graph) -> None:
    """Raise unless the graph is simple, connected and has the nodes 0..N-1."""
    if not isinstance(graph, nx.Graph):
        raise TypeError(
            f"FromGraph takes a networkx graph, got {type(graph).__name__}. "
            "Use FromMatrix for a matrix."
        )
    num_workers = graph.number_of_nodes()
    if not num_workers or set(graph) != set(range(num_workers)):
        raise ValueError(
            f"The nodes of the graph must be the workers 0..N-1, got {_first_nodes(graph)}. "
            "networkx.convert_node_labels_to_integers(graph) numbers them."
        )
    if graph.is_multigraph():
        raise ValueError(
            "The graph is a multigraph. Merge parallel edges with networkx.Graph(graph) or "
            "networkx.DiGraph(graph)."
        )
    loops = list(nx.nodes_with_selfloops(graph))
    if loops:
        raise ValueError(
            f"Worker {loops[0]} has an edge to itself. Remove self-loops: the weight that the "
            "edges leave is always the worker's own."
        )
    check_connected("The graph", num_workers, graph.edges)


def _graph_rows(graph: nx.Graph, weighting: EdgeWeighting) -> tuple[list[Row], float]:
    """Return sparse rows of the mixing matrix, and the scale of the Laplacian.

    A directed edge (j, i) gives ``W[i, j]``.
    """
    senders = graph.pred if graph.is_directed() else graph.adj
    degrees = [len(senders[worker]) for worker in range(len(graph))]
    largest, scale = max(degrees), 1.0
    rows: list[Row] = []
    edges: list[Row] = []
    if weighting in ("edges", "laplacian"):
        unit = {"weight": 1.0} if weighting == "laplacian" else {}
        edges = [
            {j: _edge_weight(i, j, {**unit, **senders[i][j]}, weighting) for j in senders[i]}
            for i in range(len(graph))
        ]
    if weighting == "laplacian":  # as "uniform" if all weights are 1
        totals = [math.fsum(row.values()) for row in edges]
        scale = max(totals) + max((w for row in edges for w in row.values()), default=1.0)
    for worker in range(len(graph)):
        if edges:
            row = {j: weight / scale for j, weight in edges[worker].items()}
        elif weighting == "uniform":
            row = dict.fromkeys(senders[worker], 1 / (1 + largest))
        else:
            row = {j: 1 / (1 + max(degrees[worker], degrees[j])) for j in senders[worker]}
        row[worker] = 1 - math.fsum(row.values())
        rows.append(row)
    if graph.is_directed():
        check_doubly_stochastic("The directed graph", rows)
    return rows, scale


def _edge_weight(
    worker: int, peer: int, attributes: dict[str, Any], weighting: EdgeWeighting
) -> float:
    try:
        weight = float(attributes["weight"])
    except (KeyError, TypeError, ValueError):
        weight = math.nan
    is_laplacian = weighting == "laplacian"
    if not math.isfinite(weight) or weight == 0 or (weight < 0 and is_laplacian):
        rule = "finite and positive" if is_laplacian else "a finite number other than 0"
        raise ValueError(
            f"Edge {peer} - {worker} has the weight {attributes.get('weight')!r}; it must be "
            f"{rule}. Set the edge attribute 'weight', or use "
            "weighting='metropolis'."
        )
    return weight


def _first_nodes(graph: nx.Graph) -> str:
    nodes = [repr(node) for node in graph]
    return ", ".join(nodes[:5] + ["..."] * (len(nodes) > 5)) or "none"
