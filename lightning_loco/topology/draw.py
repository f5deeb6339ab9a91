"""A picture of a topology, for those who would rather look."""

from __future__ import annotations

import math
import os
from pathlib import Path

from lightning_loco.topology.base import Topology


def draw(
    topology: Topology, num_workers: int, path: str | os.PathLike[str], round_index: int = 0
) -> Path:
    """Draws who mixes with whom in one round.

    Workers lie on a circle; wider lines mean larger weights, arrows one-way messages.

    Args:
        topology: what to draw.
        num_workers: number of workers ``N``; beyond some 64 the lines run together.
        path: where the picture goes; its suffix (.png, .svg, .pdf) chooses the format.
        round_index: which round, from 0.

    Returns:
        The path written.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``num_workers`` does not fit the topology, or an unknown suffix.

    Example:
        >>> import tempfile
        >>> from lightning_loco.topology import Ring
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw(Ring(), 8, Path(folder, "ring.svg")).name
        'ring.svg'
    """
    topology.check_num_workers(num_workers)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Drawing a topology needs matplotlib. Install it with: pip install "
            "lightning-loco[report]"
        ) from error

    rows = [topology.weights(worker, num_workers, round_index) for worker in range(num_workers)]
    heaviest = max(
        (abs(w) for i, row in enumerate(rows) for j, w in row.items() if i != j), default=1.0
    )
    angles = [math.pi / 2 - 2 * math.pi * worker / num_workers for worker in range(num_workers)]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]

    figure = Figure(figsize=(5, 5))
    axes = figure.add_subplot()
    for receiver, row in enumerate(rows):
        for sender, weight in row.items():
            both_ways = receiver in rows[sender]
            if sender == receiver or (both_ways and sender > receiver):
                continue
            arrow = {
                "arrowstyle": "-" if both_ways else "-|>",
                "linewidth": 0.3 + 2 * abs(weight) / heaviest,
                "color": "tab:blue",
                "shrinkA": 9,
                "shrinkB": 9,
            }
            axes.annotate("", xy=places[receiver], xytext=places[sender], arrowprops=arrow)
    across, up = zip(*places, strict=True)
    axes.scatter(across, up, s=240, color="white", edgecolors="black", zorder=3)
    for worker, (x, y) in enumerate(places):
        axes.text(x, y, str(worker), ha="center", va="center", fontsize=8, zorder=4)
    period = topology.period(num_workers)
    when = "" if period == 1 else f", round {round_index}"
    axes.set_title(f"{topology.name}, {num_workers} workers{when}")
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
    axes.set_axis_off()
    figure.savefig(path)
    return Path(path)
