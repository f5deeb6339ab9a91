"""A picture of trainings: their loss along local steps, bytes sent and time across a slow link."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.figure import Figure

from lightning_loco import Link

LABELS = (
    "local step",
    "MB sent by a worker",
    "seconds, at {:g} Mbit/s and {:g} s a local step",
)


class Curve(NamedTuple):
    """One training.

    Attributes:
        name: In the legend.
        losses: Local steps and validation losses.
        bytes_sent: By one worker, up to the last of these steps.
        is_hidden: Whether local steps continue while a message is under way.
    """

    name: str
    losses: list[tuple[int, float]]
    bytes_sent: float
    is_hidden: bool

    def seconds_of_a_step(self, link: Link, compute_s: float) -> float:
        """How long a local step takes with its share of the exchanges.

        Example:
            >>> waits = Curve("waits", [(10, 2.0)], bytes_sent=10e6, is_hidden=False)
            >>> waits.seconds_of_a_step(Link(mbit_per_s=100), compute_s=0.25)
            0.33
            >>> waits._replace(is_hidden=True).seconds_of_a_step(Link(100), compute_s=0.25)
            0.25
        """
        exchange_s = link.seconds(self.bytes_sent / self.losses[-1][0])
        return max(compute_s, exchange_s) if self.is_hidden else compute_s + exchange_s


def draw(curves: list[Curve], link: Link, compute_s: float, path: Path) -> None:
    """Three panels with a line for each training, as a PNG."""
    figure = Figure(figsize=(15, 5), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    colors = colormaps["tab10" if len(curves) <= 10 else "tab20"].colors
    for panel, label in zip(panels, LABELS, strict=True):
        panel.set_prop_cycle(color=colors)
        panel.set_xlabel(label.format(link.mbit_per_s, compute_s))
        panel.grid(alpha=0.3)
    for curve in curves:
        steps, losses = zip(*curve.losses, strict=True)
        megabytes = curve.bytes_sent / steps[-1] / 1e6
        seconds = curve.seconds_of_a_step(link, compute_s)
        for panel, scale in zip(panels, (1, megabytes, seconds), strict=True):
            along = [scale * step for step in steps]
            panel.plot(along, losses, marker="o", markersize=3, label=curve.name)
    panels[0].set_ylabel("validation loss of the consensus (nats per byte)")
    panels[1].set_xscale("symlog", linthresh=1)
    panels[2].set_xscale("log")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
