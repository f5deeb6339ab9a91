"""Whether a hidden round pays: validation loss after equal time, by how long an exchange takes.

Every method trains the demo's GPT for as long as a worker alone needs for ``--steps`` local steps.
How much it trains in that time depends on the exchange: of the whole model it takes ``ratio`` times
as long as a local phase of ``--sync-every`` steps. Blocking rounds stop for it, data-parallel
training stops in every step, hidden rounds stop only if a result is due before it is there, and a
link that is always busy holds all workers up. A learning-rate schedule ends when the time is over.

The workers are simulated (:class:`lightning_loco.Simulation`: the same numbers as real processes),
and so is the time: no machine's noise is in this table. Finished trainings are kept in the file of
``--out`` and repeated only if the settings change, so an interrupted run continues where it was.

  python benchmarks/hidden.py --png hidden.png         the whole table, and a picture
  python benchmarks/hidden.py --text FILE --only diloco streaming_2 alone

How to read it: means over the seeds, with standard deviations if there are several; the best method
of each ratio is marked with a star. From a ratio of 0.3 on, one of
the hidden methods should be below ``diloco`` and below ``alone``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
from harness import mean_and_deviation
from simulated import (
    BATCH,
    Task,
    batches,
    new_model,
    train_alone,
    train_missing,
    train_together,
    validate,
)

from lightning_loco import AsyncDiLoCoStrategy, StreamingDiLoCoStrategy
from lightning_loco.algorithms import (
    DelayedNesterov,
    DiLoCo,
    EagerDiLoCo,
    KeepProgress,
    ModelAverage,
)
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps, Schedule

PAYS_FROM = 0.3

Make = Callable[[int, int], RoundSettings]


def blocking(algorithm: Any) -> Make:
    """Rounds that all workers wait for."""
    return lambda every, exchange: RoundSettings(algorithm, EverySteps(every))


def whole_phase(algorithm: Any, merge_policy: Any = None) -> Make:
    """Rounds whose result comes with the next one; a phase is at least as long as an exchange."""

    def make(every: int, exchange: int) -> RoundSettings:
        schedule = EverySteps(max(every, exchange), overlap=True)
        return RoundSettings(algorithm, schedule, merge_policy=merge_policy)

    return make


def streaming(fragments: int) -> Make:
    """Fragments that take turns; each result lands as soon as it can be there."""

    def make(every: int, exchange: int) -> RoundSettings:
        delay = math.ceil(exchange / fragments)
        return StreamingDiLoCoStrategy(
            max(every, exchange), fragments, delay, mix=0.25, outer_lr=0.6, outer_momentum=0.8
        ).settings

    return make


def four_fragments(every: int, exchange: int) -> RoundSettings:
    """An exchange may take as long as a whole phase."""
    return AsyncDiLoCoStrategy(max(every, exchange), outer_lr=0.6, outer_momentum=0.8).settings


def back_to_back(every: int, exchange: int) -> RoundSettings:
    """Averages that follow each other without a pause, however long one takes."""
    return RoundSettings(ModelAverage(), EverySteps(max(1, exchange), overlap=True))


METHODS: dict[str, Make | None] = {
    "ddp": None,
    "alone": None,
    "diloco": blocking(DiLoCo(0.9, 0.6)),
    "delayed_nesterov": blocking(DelayedNesterov()),
    "async_diloco": four_fragments,
    "a_phase_late": whole_phase(DiLoCo(0.7, 0.0)),
    "kept_progress": whole_phase(DiLoCo(0.7, 0.5), KeepProgress()),
    "eager_diloco": whole_phase(EagerDiLoCo(0.7, 0.0)),
    "streaming_1": streaming(1),
    "streaming_2": streaming(2),
    "streaming_4": streaming(4),
    "async_model_average": back_to_back,
}
HIDDEN = [name for name in METHODS if name not in ("ddp", "alone", "diloco", "delayed_nesterov")]


def cost_of_a_step(schedule: Schedule, exchange: float) -> float:
    """Time of a local step with its share of the rounds, in local steps without rounds.

    Example:
        >>> cost_of_a_step(EverySteps(10), 3.0)
        1.3
        >>> cost_of_a_step(Staggered(10, fragments=2, delay=2), 6.0)  # waits one step in each
        1.2
    """
    every, fragments = schedule.sync_every_of(0), schedule.num_fragments
    hidden = schedule.staleness_of(0) * every
    waits = fragments * max(0.0, exchange / fragments - hidden)
    return max(every + waits, exchange) / every


def task_of(options: argparse.Namespace, steps: int) -> Task:
    """What is trained."""
    return Task(steps, width=16, layers=1) if options.quick else Task(steps)


class Training(NamedTuple):
    """One training of the table.

    Attributes:
        method: Its row.
        ratio: Time of an exchange, divided by the time of a local phase.
        seed: Of weights and batches.
    """

    method: str
    ratio: float
    seed: int

    def plan(self, options: argparse.Namespace) -> tuple[RoundSettings | None, int]:
        """The settings of its rounds, and the number of local steps for which there is time."""
        exchange = self.ratio * options.sync_every
        make = METHODS[self.method]
        if make is None:
            cost = 1.0 if self.method == "alone" else 1.0 + exchange
            return None, int(options.steps / cost)
        settings = make(options.sync_every, math.ceil(exchange))
        cost = cost_of_a_step(settings.schedule, exchange)
        return settings, int(options.steps / cost)

    def key(self, options: argparse.Namespace) -> str:
        """Its key in the file of results: two ratios may have the same training."""
        settings, steps = self.plan(options)
        rounds = None if settings is None else settings.describe()
        made = [options.workers, str(options.text), *task_of(options, steps)]
        return json.dumps([self.method == "alone", rounds, self.seed, *made], default=str)

    def train(self, options: argparse.Namespace) -> float:
        """The validation loss of the consensus."""
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        settings, steps = self.plan(options)
        task, n = task_of(options, steps), options.workers
        data = ByteTextData(path=options.text, batch_size=BATCH, context=task.context)
        data.check(n)
        shares = [batches(data, worker, n, self.seed) for worker in range(n)]
        torch.manual_seed(self.seed)
        model = new_model(task)
        if settings is None:
            train_alone(model, shares[:1] if self.method == "alone" else shares, task)
        else:
            models = [new_model(task) for _ in shares]
            models[0].load_state_dict(model.state_dict())
            simulation = train_together(models, shares, settings, task)
            torch.nn.utils.vector_to_parameters(simulation.consensus(), model.parameters())
        return validate(model, data)


def fit_all(options: argparse.Namespace) -> dict[str, float]:
    """The loss of every training by its key."""
    wanted = {
        training.key(options): training
        for seed in options.seeds
        for ratio in options.ratios
        for training in (Training(method, ratio, seed) for method in options.only)
    }

    def describe(training: Training, loss: float) -> str:
        method, ratio, seed = training
        return f"{method}, ratio {ratio:g}, seed {seed}: {loss:.4f}"

    return train_missing(wanted, describe, options)


def losses_of(
    method: str, ratio: float, losses: dict[str, float], options: argparse.Namespace
) -> list[float]:
    """The loss of each seed."""
    return [losses[Training(method, ratio, seed).key(options)] for seed in options.seeds]


def mean_loss(*of: Any) -> float:
    """The mean over the seeds."""
    return statistics.mean(losses_of(*of))


def row(method: str, losses: dict[str, float], options: argparse.Namespace) -> list[str]:
    """The loss of one method by ratio, and how many local steps there was time for."""
    cells = [method]
    for ratio in options.ratios:
        best = min(mean_loss(other, ratio, losses, options) for other in options.only)
        loss = mean_loss(method, ratio, losses, options)
        _, steps = Training(method, ratio, 0).plan(options)
        found = mean_and_deviation(losses_of(method, ratio, losses, options), 3)
        cells.append(f"{found}{'*' if loss == best else ' '} {steps}")
    return cells


def verdicts(losses: dict[str, float], options: argparse.Namespace) -> list[list[str]]:
    """The best hidden method of each ratio against blocking rounds and one worker alone."""
    rows = []
    hidden = [method for method in options.only if method in HIDDEN]
    for ratio in options.ratios if hidden and {"diloco", "alone"} <= set(options.only) else ():
        found = {method: mean_loss(method, ratio, losses, options) for method in hidden}
        best = min(found, key=found.__getitem__)
        cells = [f"{ratio:g}", best, f"{found[best]:.3f}"]
        for other in ("diloco", "alone"):
            pairs = zip(
                losses_of(best, ratio, losses, options),
                losses_of(other, ratio, losses, options),
                strict=True,
            )
            gaps = [100 * (loss / base - 1) for loss, base in pairs]
            bound = "" if ratio < PAYS_FROM else " ok" if statistics.mean(gaps) < 0 else " MISSED"
            cells.append(f"{mean_and_deviation(gaps, 1)}{bound}")
        rows.append(cells)
    return rows


def draw(losses: dict[str, float], options: argparse.Namespace) -> None:
    """The losses by ratio, as a PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for method in options.only:
        values = [mean_loss(method, ratio, losses, options) for ratio in options.ratios]
        style = "-" if method in HIDDEN else ":" if method == "alone" else "--"
        axes.plot(options.ratios, values, style, marker="o", markersize=3, label=method)
    axes.set(
        xscale="log",
        xlabel="time of an exchange / time of a local phase",
        ylabel="validation loss after equal time (nats per byte)",
    )
    axes.set_xticks(options.ratios, [f"{ratio:g}" for ratio in options.ratios])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(options.png, dpi=120)
    print(f"The picture is in {options.png}")


def main() -> None:
    options = harness.parse(
        __doc__,
        only=list(METHODS),
        ratios=[0.1, 0.3, 0.8, 2.0],
        steps=600,  # of a worker without rounds
        workers=4,
        sync_every=10,
        seeds=[0],
        text=Path,  # default: Python's standard library
        jobs=os.cpu_count() or 1,
        out=harness.OUTPUTS / "hidden.json",
        png=Path,
        quick={
            **{"only": ["alone", "diloco", "streaming_2", "ddp"], "ratios": [0.3]},
            **{"steps": 40, "workers": 2},
        },
        choices={"only": METHODS},
    )
    losses = fit_all(options)
    header = ["loss, local steps; by ratio", *(f"{ratio:g}" for ratio in options.ratios)]
    harness.print_table(header, [row(method, losses, options) for method in options.only])
    if rows := verdicts(losses, options):
        harness.print_table(["ratio", "best hidden", "loss", "to diloco %", "to alone %"], rows)
    print(f"All losses are in {options.out}")
    if options.png:
        draw(losses, options)


if __name__ == "__main__":
    main()
