"""Which outer momentum a run needs, and whether the persistence of pseudo-gradients tells it.

The demo's GPT, smaller (0.2M parameters), is trained by four simulated workers under DiLoCo with
``outer_lr=0.7``. Groups:

grid    A round every 5, 10, 40 and 160 local steps, two inner learning rates, outer momentum 0,
        0.5, 0.9 and ``"auto"``, and plain averaging (``outer_lr=1``).
tuning  Fine-tuning of a model of Python source on the text of Python's help: the whole model or
        LoRA adapters, a round every 10 and 50 local steps, likewise.
radial  The direction and the length of pseudo-gradients averaged for themselves, as decoupled
        DiLoCo does (RDA), beside their plain mean, with a round every 10 and 40 local steps.
hidden  Async DiLoCo with four fragments and streaming DiLoCo with two, whose results are applied
        local steps later: outer momentum, and ``mix``, the share of the local parameters that is
        kept.

  python benchmarks/momentum.py --screen                     all groups, five seeds for close rows
  python benchmarks/momentum.py --groups grid --seeds 0 1 --png momentum.png

The rows of a block have the same method, learning rate and number of steps between rounds.
``--screen`` trains all rows with the first two seeds, and with the other seeds those whose mean
loss is within 1 % of the lowest of their block. Finished trainings are kept in momentum.json, so an
interrupted run continues where it was.

How to read it: means over the seeds, with standard deviations. ``above`` is the difference to the
best row of the same block in percent, seed by seed. ``persistence`` is the mean cosine of the angle
between the mean pseudo-gradients of successive rounds, and ``outer step`` is ``outer_lr / (1 -
momentum * persistence)``, how far an outer step moves along pseudo-gradients that persist so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import harness
import torch
from harness import mean_and_deviation
from matplotlib import colormaps
from matplotlib.figure import Figure
from quality_seeds import QUICK, Result, Row, every, key_of, train_row
from simulated import Task, new_model, train_missing
from torch import Tensor

from lightning_loco import AsyncDiLoCoStrategy, DiLoCo, Simulation, StreamingDiLoCoStrategy
from lightning_loco.algorithms.decoupled_diloco import radial_mean, weighted_mean
from lightning_loco.algorithms.outer_momentum import OuterMomentum, momentum_for, outer_step
from lightning_loco.algorithms.robust import RobustMean

OUTER_LR = 0.7
CLOSE = 1.01
"""Of ``--screen``: the mean loss of a row with all seeds, relative to the lowest of its block."""


@dataclasses.dataclass(frozen=True)
class RadialMean(RobustMean):
    """The mean of decoupled DiLoCo as an ``aggregate``; the first tensor is an embedding.

    Args:
        lengths: Of the tensors of the model.
    """

    lengths: tuple[int, ...]

    is_elementwise = False

    def combine(self, messages: Tensor, weights: Sequence[float]) -> Tensor:
        """Return the mean of each tensor."""
        shares = [weight / sum(weights) for weight in weights]
        embedding, *others = messages.split(self.lengths, dim=1)
        means = [weighted_mean(embedding, shares), *(radial_mean(one, shares) for one in others)]
        return torch.cat(means)


@functools.cache  # each look for a result needs them
def lengths_of(task: Task) -> tuple[int, ...]:
    """The lengths of the tensors of a model."""
    return tuple(parameter.numel() for parameter in new_model(task).parameters())


class Cell(NamedTuple):
    """One row of a table.

    Attributes:
        every: Local steps between rounds.
        lr: Inner learning rate.
        outer_lr: Outer learning rate.
        momentum: Outer momentum.
        tunes: What is fine-tuned, as in :class:`quality_seeds.Row`.
        is_radial: Whether :class:`RadialMean` is used.
        mix: Of async or streaming DiLoCo.
        method: Whose rounds: of ``"async"`` or ``"streaming"`` DiLoCo, or blocking ones.
    """

    every: int
    lr: float
    outer_lr: float
    momentum: OuterMomentum
    tunes: Any = ""
    is_radial: bool = False
    mix: float = 0.0
    method: Literal["", "async", "streaming"] = ""

    @property
    def block(self) -> tuple[Any, ...]:
        """Rows of the same block are compared."""
        return self.method or self.tunes, self.every, self.lr

    @property
    def title(self) -> str:
        """What the rows of a block differ in."""
        setting = f"{self.outer_lr:g}, {self.momentum}" + (", RDA" if self.is_radial else "")
        return setting + (f", mix {self.mix:g}" if self.method else "")

    @property
    def steps(self) -> int:
        """Local steps: eight rounds or more."""
        return max(-(-300 // self.every), 8) * self.every

    def row(self, task: Task) -> Row:
        """Return the training."""
        outer: Any = {"outer_lr": self.outer_lr, "outer_momentum": self.momentum, "mix": self.mix}
        if self.method == "async":
            return Row(AsyncDiLoCoStrategy(self.every, **outer).settings, task=task)
        if self.method == "streaming":
            delay = self.every // 10
            return Row(StreamingDiLoCoStrategy(self.every, 2, delay, **outer).settings, task=task)
        algorithm = DiLoCo(self.outer_lr, self.momentum)
        if self.is_radial:
            algorithm = dataclasses.replace(algorithm, aggregate=RadialMean(lengths_of(task)))
        return Row(every(self.every, algorithm), task=task, tunes=self.tunes)


FIXED = ((1.0, 0.0), (OUTER_LR, 0.0), (OUTER_LR, 0.5), (OUTER_LR, 0.9))
SETTINGS: tuple[tuple[float, OuterMomentum], ...] = (*FIXED, (OUTER_LR, "auto"))
Mixed = tuple[float, OuterMomentum, float]  # outer learning rate, momentum, mix
MIXED: list[Mixed] = [(0.6, 0.8, 0.25), (OUTER_LR, "auto", 0.25), (OUTER_LR, "auto", 0.1)]
HIDDEN: dict[Literal["async", "streaming"], list[Mixed]] = {
    "async": MIXED,
    "streaming": [(0.4, 0.9, 0.5), *MIXED, (OUTER_LR, 0.8, 0.1)],
}
GROUPS: dict[str, list[Cell]] = {
    "grid": [
        Cell(every, lr, *setting)
        for every in (5, 10, 40, 160)
        for lr in (1e-3, 3e-3)
        for setting in SETTINGS
    ],
    "tuning": [
        Cell(every, 3e-3, *setting, tunes)
        for tunes in ("whole", "adapters")
        for every in (10, 50)
        for setting in SETTINGS
    ],
    "radial": [
        Cell(every, 3e-3, OUTER_LR, momentum, "", is_radial)
        for every in (10, 40)
        for momentum in (0.0, 0.5, 0.9)
        for is_radial in (False, True)
    ],
    "hidden": [
        Cell(every, lr, outer_lr, momentum, "", False, mix, method)
        for method, settings in HIDDEN.items()
        for every in (10, 40)
        for lr in (1e-3, 3e-3)
        for outer_lr, momentum, mix in settings
    ],
}


class Training(NamedTuple):
    """A cell with a seed."""

    cell: Cell
    seed: int

    def task(self, options: argparse.Namespace) -> Task:
        """What is trained."""
        if options.quick:
            return QUICK._replace(steps=4 * self.cell.every)
        return Task(self.cell.steps, lr=self.cell.lr, clip=1.0)

    def key(self, options: argparse.Namespace) -> str:
        """Its key in the file of results."""
        task = self.task(options)
        return key_of(self.cell.row(task), task, self.seed)

    def train(self, options: argparse.Namespace) -> Result:
        """The loss of the consensus, and the mean persistence of all rounds."""
        found: dict[int, float] = {}

        def look(simulation: Simulation) -> None:
            engine: Any = simulation.participants[0]
            engine.measure_outer_gradient = True
            if engine.statistics.persistence is not None:
                found[engine.worker.round_index] = engine.statistics.persistence

        task = self.task(options)
        result = train_row(self.cell.row(task), task, self.seed, look)
        return {**result, "persistence": statistics.fmean(found.values())}


def values(cell: Cell, column: str, found: dict[str, Result], options: Any) -> dict[int, float]:
    """A number of a cell by seed."""
    keys = {seed: Training(cell, seed).key(options) for seed in options.seeds}
    return {seed: found[key][column] for seed, key in keys.items() if key in found}


def mean(cell: Cell, column: str, found: dict[str, Result], options: Any) -> float:
    """The mean of a number of a cell over its seeds."""
    return statistics.fmean(values(cell, column, found, options).values())


def step_of(cell: Cell, persistence: float) -> float:
    """How far an outer step moves along pseudo-gradients that persist."""
    momentum = cell.momentum
    if momentum == "auto":
        momentum = momentum_for(cell.outer_lr, persistence)
    return outer_step(cell.outer_lr, momentum, persistence)


def above_best(cell: Cell, found: dict[str, Result], options: Any) -> list[float]:
    """How far the losses are above those of the best row of the block, in percent, by seed.

    Only rows that have all seeds of this one are compared with it.
    """
    losses = values(cell, "loss", found, options)
    cells = [other for group in GROUPS.values() for other in group if other.block == cell.block]
    others = [values(other, "loss", found, options) for other in cells]
    block = [
        {seed: other[seed] for seed in losses} for other in others if losses.keys() <= other.keys()
    ]
    best = min(block, key=lambda of: statistics.fmean(of.values()))
    return [100 * (loss / best[seed] - 1) for seed, loss in losses.items()]


def close(group: str, found: dict[str, Result], options: Any) -> list[Cell]:
    """The cells of a group whose loss is close to the lowest of their block."""
    loss = {cell: mean(cell, "loss", found, options) for cell in GROUPS[group]}
    lowest = {
        cell.block: min(loss[other] for other in loss if other.block == cell.block) for cell in loss
    }
    return [cell for cell in loss if loss[cell] <= CLOSE * lowest[cell.block]]


def show(group: str, found: dict[str, Result], options: argparse.Namespace) -> None:
    """Print the table of a group."""
    rows = []
    for cell in GROUPS[group]:
        persistence = mean(cell, "persistence", found, options)
        losses = list(values(cell, "loss", found, options).values())
        what = cell.method or cell.tunes
        rows.append(
            [
                f"{what} {cell.every} lr {cell.lr:g}".strip(),
                cell.title,
                str(len(losses)),
                mean_and_deviation(losses, 3),
                mean_and_deviation(above_best(cell, found, options), 1),
                f"{persistence:.2f}",
                f"{step_of(cell, persistence):.2f}",
            ]
        )
    header = [group, "outer lr, momentum", "seeds", "validation loss", "above, %"]
    harness.print_table([*header, "persistence", "outer step"], rows)


def draw(found: dict[str, Result], options: argparse.Namespace, path: Path) -> None:
    """The loss of each cell of the grid above the best of its block, by its outer step."""
    blocks: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for cell in GROUPS["grid"]:
        persistence = mean(cell, "persistence", found, options)
        above = statistics.fmean(above_best(cell, found, options))
        blocks.setdefault(cell.block, []).append((step_of(cell, persistence), above))
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    for number, ((_, every_steps, lr), points) in enumerate(blocks.items()):
        steps, above = zip(*sorted(points), strict=True)
        panel.plot(
            steps,
            above,
            color=colormaps["tab10"].colors[number // 2],
            marker="os"[number % 2],
            linestyle=("-", "--")[number % 2],
            label=f"a round every {every_steps} steps, lr {lr:g}",
        )
    panel.set_xlabel("outer_lr / (1 - momentum * persistence)")
    panel.set_ylabel("loss above the best of the same line, %")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = harness.parse(
        __doc__,
        groups=list(GROUPS),
        seeds=[0, 1, 2, 3, 4],
        screen=False,  # all but the first two seeds for close rows only
        jobs=os.cpu_count() or 1,
        png="",
        out=Path(__file__).with_suffix(".json"),
        quick={
            **{"groups": ["radial"], "seeds": [0]},
            **{"out": harness.OUTPUTS / "momentum_quick.json"},
        },
        choices={"groups": GROUPS},
    )

    def describe(training: Training, result: Result) -> str:
        cell = training.cell
        return f"{cell.block} {cell.title}, seed {training.seed}: {result['loss']:.4f}"

    def train(cells: Sequence[Cell], seeds: Sequence[int]) -> dict[str, Result]:
        wanted = [Training(cell, seed) for seed in seeds for cell in cells]
        return train_missing({one.key(options): one for one in wanted}, describe, options)

    first = options.seeds[:2] if options.screen else options.seeds
    results = train([cell for group in options.groups for cell in GROUPS[group]], first)
    if options.screen:
        now = argparse.Namespace(**{**vars(options), "seeds": first})
        deciding = [cell for group in options.groups for cell in close(group, results, now)]
        results = train(deciding, options.seeds[2:])
    for group in options.groups:
        show(group, results, options)
    if options.png:
        draw(results, options, Path(options.png))
    print(f"All results are in {options.out}")


if __name__ == "__main__":
    main()
