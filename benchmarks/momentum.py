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

  python benchmarks/momentum.py                            all groups, page and picture
  python benchmarks/momentum.py --groups grid --seeds 0 1

The cells of a row have the same method, learning rate and number of steps between rounds. All are
trained with the first two seeds, and those whose mean loss is then within 1 % of the lowest of
their row with the other seeds, too. Finished trainings are kept in momentum.json, so an interrupted
run continues where it was, and the tables and the picture of docs/results/momentum.md are written.

How to read it: means over the seeds, with standard deviations. The lowest of a row is bold, cells
with two seeds are in italics, and the last column is how far the default is above the lowest of the
others, seed by seed. ``persistence`` is the mean cosine of the angle between the mean
pseudo-gradients of successive rounds, and ``outer step`` is ``outer_lr / (1 - momentum *
persistence)``, how far an outer step moves along pseudo-gradients that persist so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import harness
import torch
from harness import mean_and_deviation
from matplotlib import colormaps
from matplotlib.figure import Figure
from quality_seeds import ADAPTER_LR, QUICK, Result, Row, every, key_of, train_row
from simulated import Task, new_model, train_missing
from torch import Tensor

from lightning_loco import AsyncDiLoCoStrategy, DiLoCo, Simulation, StreamingDiLoCoStrategy
from lightning_loco.algorithms.decoupled_diloco import radial_mean, weighted_mean
from lightning_loco.algorithms.outer_momentum import OuterMomentum, momentum_for, outer_step
from lightning_loco.algorithms.robust import RobustMean

OUTER_LR = 0.7
CLOSE = 1.01
"""A cell is trained with all seeds if its mean loss is at most this times the lowest of its row."""

KEPT = Path(__file__).with_suffix(".json")
PAGE = harness.ROOT / "docs" / "results" / "momentum.md"
PICTURE = harness.ROOT / "docs" / "images" / "momentum.png"
ROW_TITLES = ("rounds", "every", "learning rate")


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
    """One cell of a table.

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
    def row(self) -> tuple[str, str, str]:
        """The method or what is tuned, local steps between rounds and learning rate of a row."""
        lr = ADAPTER_LR if self.tunes == "adapters" else self.lr
        return self.method or self.tunes or "DiLoCo", str(self.every), f"{lr:g}"

    @property
    def column(self) -> str:
        """The outer settings."""
        momentum = self.momentum if self.momentum == "auto" else f"{self.momentum:g}"
        setting = f"({self.outer_lr:g}, {momentum})" + (", RDA" if self.is_radial else "")
        return setting + (f", {self.mix:g}" if self.method else "")

    @property
    def is_default(self) -> bool:
        """Whether these are the settings that the method has by default."""
        return self.momentum == "auto" and self.mix == (0.25 if self.method else 0)

    @property
    def steps(self) -> int:
        """Local steps: eight rounds or more."""
        return max(-(-300 // self.every), 8) * self.every

    def training(self, task: Task) -> Row:
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
        return key_of(self.cell.training(task), task, self.seed)

    def train(self, options: argparse.Namespace) -> Result:
        """The loss of the consensus, and the mean persistence of all rounds."""
        found: dict[int, float] = {}

        def look(simulation: Simulation) -> None:
            engine: Any = simulation.participants[0]
            engine.measure_outer_gradient = True
            if engine.statistics.persistence is not None:
                found[engine.worker.round_index] = engine.statistics.persistence

        task = self.task(options)
        result = train_row(self.cell.training(task), task, self.seed, look)
        return {**result, "persistence": statistics.fmean(found.values())}


class Results:
    """What the trainings have found.

    Args:
        found: The results by the key of the training.
        options: Of the command line.
    """

    def __init__(self, found: Mapping[str, Result], options: argparse.Namespace) -> None:
        self.found = found
        self._by_cell: dict[Cell, dict[int, Result]] = {}
        for cell in {cell for group in GROUPS.values() for cell in group}:
            keys = {seed: Training(cell, seed).key(options) for seed in options.seeds}
            self._by_cell[cell] = {seed: found[key] for seed, key in keys.items() if key in found}

    def of(self, cell: Cell, name: str = "loss") -> dict[int, float]:
        """A number of a cell by seed."""
        return {seed: result[name] for seed, result in self._by_cell[cell].items()}

    def mean(self, cell: Cell, name: str = "loss") -> float:
        """The mean of a number of a cell over its seeds."""
        return statistics.fmean(self.of(cell, name).values())

    def outer_step(self, cell: Cell) -> float:
        """How far an outer step moves along pseudo-gradients that persist."""
        persistence, momentum = self.mean(cell, "persistence"), cell.momentum
        if momentum == "auto":
            momentum = momentum_for(cell.outer_lr, persistence)
        return outer_step(cell.outer_lr, momentum, persistence)

    def above(self, cell: Cell, others: Iterable[Cell]) -> list[float]:
        """How far a cell is above the lowest other, in percent, by seed.

        Of the others only those count that share most seeds with it.
        """
        losses = self.of(cell)
        pairs = [
            [(loss, found[seed]) for seed, loss in losses.items() if seed in found]
            for found in map(self.of, others)
        ]
        most = max(map(len, pairs))
        lowest = min(
            (found for found in pairs if len(found) == most),
            key=lambda found: sum(other for _, other in found),
        )
        return [100 * (loss / other - 1) for loss, other in lowest]

    def close(self, group: str) -> list[Cell]:
        """The cells of a group whose mean loss is close to the lowest of their row."""
        return [
            cell
            for cells in rows_of(group).values()
            for cell in cells
            if self.mean(cell) <= CLOSE * min(map(self.mean, cells))
        ]

    def losses(self, group: str) -> list[list[str]]:
        """The table of the losses: the header, and the rows."""
        has_default = any(cell.is_default for cell in GROUPS[group])
        lines = [[*ROW_TITLES, *columns_of(group), *(["the default"] if has_default else [])]]
        for row, cells in rows_of(group).items():
            found = [cell for cell in cells if self.of(cell)]
            most = max((len(self.of(cell)) for cell in found), default=0)
            complete = [cell for cell in found if len(self.of(cell)) == most]
            lowest = min(complete, key=self.mean, default=None)
            texts = dict.fromkeys(lines[0][len(row) :], "")
            for cell in found:
                losses = list(self.of(cell).values())
                mark = "**" if cell == lowest else "*" if len(losses) < most else ""
                texts[cell.column] = f"{mark}{mean_and_deviation(losses, 3)}{mark}"
                if cell.is_default and len(found) > 1:
                    above = self.above(cell, [other for other in found if other != cell])
                    texts["the default"] = f"{mean_and_deviation(above, 1)} %"
            lines.append([*row, *texts.values()])
        return lines

    def steps(self, group: str) -> list[list[str]]:
        """The table of outer steps, with the persistence: the header, and the rows."""
        lines = [[*ROW_TITLES, *columns_of(group)]]
        for row, cells in rows_of(group).items():
            texts = dict.fromkeys(columns_of(group), "")
            for cell in filter(self.of, cells):
                persistence = self.mean(cell, "persistence")
                texts[cell.column] = f"{self.outer_step(cell):.2f} ({persistence:.2f})"
            lines.append([*row, *texts.values()])
        return lines

    def tables(self, groups: Iterable[str]) -> dict[str, list[list[str]]]:
        """The tables by name."""
        losses = {group: self.losses(group) for group in groups}
        blocking = [group for group in groups if group != "hidden"]
        return losses | {f"{group}, outer step": self.steps(group) for group in blocking}


def columns_of(group: str) -> list[str]:
    """The outer settings of a table."""
    return list(dict.fromkeys(cell.column for cell in GROUPS[group]))


def rows_of(group: str) -> dict[tuple[str, str, str], list[Cell]]:
    """The cells of a group by the row of its table."""
    rows: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in GROUPS[group]:
        rows.setdefault(cell.row, []).append(cell)
    return rows


def draw(results: Results, path: Path) -> None:
    """The loss of each cell of the grid above the lowest of its row, by its outer step."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    for number, ((_, every_steps, lr), cells) in enumerate(rows_of("grid").items()):
        points = sorted(
            (results.outer_step(cell), statistics.fmean(results.above(cell, cells)))
            for cell in cells
        )
        panel.plot(
            *zip(*points, strict=True),
            color=colormaps["tab10"].colors[number // 2],
            marker="os"[number % 2],
            linestyle=("-", "--")[number % 2],
            label=f"a round every {every_steps} steps, lr {lr}",
        )
    panel.set_xlabel("outer_lr / (1 - momentum * persistence)")
    panel.set_ylabel("loss above the lowest of the same line, %")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = harness.parse(
        __doc__,
        groups=list(GROUPS),
        seeds=[0, 1, 2, 3, 4],
        jobs=os.cpu_count() or 1,
        out=KEPT,
        quick={
            **{"groups": ["radial"], "seeds": [0]},
            **{"out": harness.OUTPUTS / "momentum_quick.json"},
        },
        choices={"groups": GROUPS},
    )

    def describe(training: Training, result: Result) -> str:
        cell = training.cell
        return f"{' '.join(cell.row)} {cell.column}, seed {training.seed}: {result['loss']:.4f}"

    def train(cells: Sequence[Cell], seeds: Sequence[int]) -> dict[str, Result]:
        wanted = [Training(cell, seed) for seed in seeds for cell in cells]
        return train_missing({one.key(options): one for one in wanted}, describe, options)

    first, others = options.seeds[:2], options.seeds[2:]
    found = train([cell for group in options.groups for cell in GROUPS[group]], first)
    # Of the first seeds alone: some cells may have more from an earlier run.
    screened = Results(found, argparse.Namespace(**{**vars(options), "seeds": first}))
    close = [cell for group in options.groups for cell in screened.close(group)]
    results = Results(train(close, others), options)
    for name, (header, *rows) in results.tables(options.groups).items():
        print(name)
        harness.print_table(header, rows)
    print(f"All results are in {options.out}")
    if options.out == KEPT and options.groups == list(GROUPS):
        PAGE.write_text(harness.with_tables(PAGE.read_text(), results.tables(GROUPS)))
        draw(results, PICTURE)


if __name__ == "__main__":
    main()
