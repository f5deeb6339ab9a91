"""``lightning-loco topology``: the neighbours on a graph, how fast gossip mixes, and its settings.

A few numbers decide how well gossip works on a graph: the share of the distance between workers
that a round leaves, and the settings that GASLoC chooses with ``"auto"``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from lightning_loco.algorithms.gasloc import GASLoC
from lightning_loco.topology import (
    TOPOLOGIES,
    Topology,
    as_topology,
    chi,
    consensus_rate,
    gossip_radius,
    optimal_gossip,
)
from lightning_loco.topology.matchings import RandomTopology

MAX_WORKERS = 1024
"""More would take minutes: the eigenvalues of dense matrices are computed."""

_EXACT = 1e-9
"""A share below this is due to rounding."""

_MAX_NAMED = 8
_SHOWN_ROUNDS = 4


def run(args: argparse.Namespace) -> int:
    """Print the report of ``args.topology`` for ``args.workers``, and draw it to ``args.png``.

    Returns the exit status.

    Raises:
        ValueError: If the topology is unknown or does not fit the number of workers, or the file
            cannot be written.
    """
    if not 2 <= args.workers <= MAX_WORKERS:
        raise ValueError(f"--workers must be from 2 to {MAX_WORKERS}, got {args.workers}.")
    topology = as_topology(args.topology)
    topology.check(args.workers)
    print(describe(topology, args.workers, args.topology))
    if args.png:
        draw(topology, args.workers, args.png)
        print(f"\nWrote {args.png}")
    return 0


def describe(topology: Topology, num_workers: int, name: str) -> str:
    """Return the report of a topology, called ``name`` on the command line."""
    rows = [
        *_neighbours(topology, num_workers),
        *_convergence(topology, num_workers),
        *_acceleration(topology, num_workers),
    ]
    lines = [f"{name}, {num_workers} workers", *(f"{title:<20}{text}" for title, text in rows)]
    lines += ["", "GASLoC with gossip_step=auto momentum=auto:"]
    for form, note in (("gossiped", "the default"), ("local", "as in the paper")):
        lines.append(_gasloc(topology, num_workers, form, note))
    node = "topology" if name in TOPOLOGIES else "topology=file topology.path"
    lines += ["", f"python train.py algorithm=gasloc {node}={name} trainer.devices={num_workers}"]
    return "\n".join(lines)


def _neighbours(topology: Topology, num_workers: int) -> list[tuple[str, str]]:
    """Return the neighbours of a worker, in the first rounds if they change."""
    period = topology.period(num_workers)
    rounds = range(1 if period == 1 else min(period or _SHOWN_ROUNDS, _SHOWN_ROUNDS))
    of_worker_0 = [_named(topology.receivers(0, num_workers, one)) for one in rounds]
    counts = [
        len(topology.receivers(worker, num_workers, one))
        for one in rounds
        for worker in range(num_workers)
    ]
    low, high = min(counts), max(counts)
    many = f"{high}" if low == high else f"{low} to {high}"
    changes = {1: "the same in every round", None: "drawn anew in every round"}
    rows = [
        ("neighbours", f"{many}, {changes.get(period, f'repeated every {period} rounds')}"),
        ("of worker 0", "; then ".join(of_worker_0) + ("; ..." if period != 1 else "")),
    ]
    per_round = sum(counts) / len(counts)
    all_reduce = 2 * (num_workers - 1) / num_workers
    sent = f"{per_round:.3g} times the model per worker and round (ring all-reduce: "
    return [*rows, ("sent", f"{sent}{all_reduce:.3g})")]


def _convergence(topology: Topology, num_workers: int) -> list[tuple[str, str]]:
    """Return how fast plain averaging brings all workers to their mean."""
    rate = consensus_rate(topology, num_workers)
    if rate < _EXACT:
        period = topology.period(num_workers)
        after = "a round" if period == 1 else f"{period} rounds"
        return [("spectral gap", "1"), ("to the mean", f"exact after {after} of averaging")]
    rounds = math.ceil(math.log(0.01) / math.log(rate))
    left = f"{100 * rate:.3g} % of the distance between workers is left per round of averaging"
    return [
        ("spectral gap", f"{1 - rate:.4g}"),
        ("to the mean", f"{left}, 1 % after {rounds} rounds"),
    ]


def _acceleration(topology: Topology, num_workers: int) -> list[tuple[str, str]]:
    """Return the possible gain of momentum, on graphs with a fixed spectrum."""
    try:
        condition = chi(topology, num_workers)
    except ValueError:
        why = "not defined: the graph changes from round to round, or is directed"
        return [("chi", why)]
    best = optimal_gossip(topology, num_workers)
    pair = f"gossip_step={best.gossip_step:.4g} momentum={best.momentum:.4g} momentum_on=local"
    return [
        ("chi", f"{condition:.4g}; its square root, with momentum: {math.sqrt(condition):.4g}"),
        ("without local steps", f"{pair} would leave {_share(best.rate)} per round"),
    ]


def _gasloc(topology: Topology, num_workers: int, form: str, note: str) -> str:
    made = GASLoC(momentum_on="gossiped" if form == "gossiped" else "local").prepare(
        num_workers, topology
    )
    assert made.gossip_step != "auto"
    assert made.momentum != "auto"
    rate = gossip_radius(topology, num_workers, made.gossip_step, made.momentum, made.momentum_on)
    settings = f"gossip_step={made.gossip_step:g} momentum={made.momentum:g}"
    return f"  momentum_on={form:<10}{settings}, leaves {_share(rate)} per round ({note})"


def _share(rate: float) -> str:
    return f"{100 * rate:.3g} %" if rate >= _EXACT else "nothing"


def _named(workers: Sequence[int]) -> str:
    if not workers:
        return "none"
    rest = f" and {len(workers) - _MAX_NAMED} more" if len(workers) > _MAX_NAMED else ""
    return ", ".join(map(str, workers[:_MAX_NAMED])) + rest


def draw(topology: Topology, num_workers: int, path: str) -> None:
    """Draw the workers on a circle with the edges of one period, or of a round if it is random.

    Raises:
        ValueError: If the file cannot be written, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            "--png needs matplotlib. Run in a checkout of lightning_loco: "
            "pip install -c constraints.txt -e '.[report]'"
        ) from error
    import networkx as nx  # type: ignore[import-untyped]

    rounds = 1 if isinstance(topology, RandomTopology) else topology.period(num_workers) or 1
    edges = {
        (min(worker, other), max(worker, other))
        for one in range(rounds)
        for worker in range(num_workers)
        for other in topology.receivers(worker, num_workers, one)
    }
    graph = nx.Graph()
    graph.add_nodes_from(range(num_workers))
    graph.add_edges_from(sorted(edges))
    figure = Figure(figsize=(6, 6), layout="tight")
    axes = figure.subplots()
    is_large = num_workers > 64
    nx.draw_networkx(
        graph,
        pos=nx.circular_layout(graph),
        ax=axes,
        with_labels=not is_large,
        node_size=20 if is_large else 300,
        node_color="#2563eb",
        font_color="white",
        font_size=8,
        edge_color="#9ca3af",
    )
    rate = consensus_rate(topology, num_workers)
    axes.set_title(f"{num_workers} workers, spectral gap {1 - rate:.3g}")
    axes.set_axis_off()
    try:
        figure.savefig(Path(path), dpi=120)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"--png cannot write {path}: {reason}.") from error
