"""What unequal speeds and deaths cost: loss and goodput of each method after equal virtual time.

Four workers of speeds 1, 1, 2 and 6 train a GPT for ``--seconds``; a local step of the fastest
takes a second. All methods exchange the whole model about once a minute. With ``--kill-every`` a
worker is killed after each such time, another one each time, and is back 30 s later, with a new
optimizer.

The workers are simulated (:class:`lightning_loco.Simulation`: the same numbers as real processes),
and so are time and links of 2 Mbit/s and 30 ms. Learning rates follow a schedule that ends with
the time. Finished trainings are kept in the file of ``--out``.

  python benchmarks/decoupled.py                     both tables
  python benchmarks/decoupled.py --kill-every 0 --only diloco decoupled

How to read it: ``merged`` is the share of the workers' time in local steps whose progress has
entered a round or a merge; the other columns are what the rest was. ``pending`` may still enter
one, ``lost`` does not: it was overwritten by what has arrived, or died with its worker. With kills,
methods with rounds go on as elastic members: the others wait 5 s until they notice a death, and a
worker that is back joins in the next round. A job that is not elastic would restart as a whole. For
decoupled learners the loss is that of the syncer's parameters, for others that of the workers'
mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
from harness import mean_and_deviation, paired_p
from simulated import BATCH, Task, TimedSteps, batches, new_model, train_missing, validate

from lightning_loco import AsyncDiLoCoStrategy, Simulation
from lightning_loco._util.goodput import Counted
from lightning_loco.algorithms import CGAD, DecoupledDiLoCo, DelayedNesterov, DiLoCo, HeLoCo
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.costs import Link
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps
from lightning_loco.simulation import Failure, Goodput, SimulatedSettings
from lightning_loco.syncer import DecoupledSettings, MergeSettings

SPEEDS = (1, 1, 2, 6)
FASTEST_STEP_S, AWAY_S = 1.0, 30.0
EVERY = 10
"""Local steps of the slowest worker between rounds: a minute."""

LINK = Link(2, 0.03)


def by_speed(algorithm: Any) -> RoundSettings:
    """Rounds for which the fastest worker makes six times as many local steps as the slowest."""
    return RoundSettings(algorithm, EverySteps([EVERY * speed for speed in SPEEDS]))


def decoupled(*, keep_late: bool = True, **method: Any) -> DecoupledSettings:
    """Merges of each fragment after 25 local steps of a worker, on average: a minute."""
    every = round(EVERY * statistics.mean(SPEEDS))
    rounds = MergeSettings(sync_every=every, keep_late=keep_late)
    return DecoupledSettings(DecoupledDiLoCo(**method), rounds)


METHODS: dict[str, Callable[[], SimulatedSettings] | None] = {
    "fastest_alone": None,
    "diloco": lambda: RoundSettings(DiLoCo(), EverySteps(EVERY)),
    "diloco_by_speed": lambda: by_speed(DiLoCo()),
    "async_diloco": lambda: AsyncDiLoCoStrategy(EVERY).settings,
    "async_diloco_by_speed": lambda: AsyncDiLoCoStrategy([EVERY * one for one in SPEEDS]).settings,
    "delayed_nesterov_by_speed": lambda: by_speed(DelayedNesterov()),
    "decoupled": decoupled,
    "decoupled_no_momentum": lambda: decoupled(outer_lr=1.0, outer_momentum=0.0),
    "decoupled_momentum": lambda: decoupled(outer_lr=0.7, outer_momentum=0.5),
    "decoupled_mean": lambda: decoupled(aggregate="mean"),
    "decoupled_heloco": lambda: decoupled(correction=HeLoCo()),
    "decoupled_cgad": lambda: decoupled(correction=CGAD()),
    "decoupled_late_refused": lambda: decoupled(keep_late=False),
}
"""The settings of each method, by name; None for a worker that trains alone."""


class RoundSteps:
    """Counts the local steps whose progress has entered rounds, of one worker.

    Of those between a message and its result, the share ``mix`` is in the next message.
    """

    def __init__(self, mix: float) -> None:
        self._mix, self.merged = mix, 0.0
        self._engine: Any = None
        self._began: list[int] = []
        self._applied: list[int] = []

    def look(self, engine: Any) -> None:
        """Look at the engine before a local step: rounds may have begun or ended since the last."""
        now, fragments = engine.worker.steps, engine.fragments
        if engine is not self._engine:  # at the start, or after a return
            self._engine, self._began = engine, [one.began_at for one in fragments]
            self._applied = [now] * len(fragments)
        for number, one in enumerate(fragments):
            began, applied = self._began[number], self._applied[number]
            if applied < 0 and one.pending is None:
                applied = self._applied[number] = now
            if one.began_at == began:
                continue
            kept = self._mix * (applied - began) if 0 <= began <= applied else 0.0
            self.merged += (one.began_at - max(applied, began) + kept) / len(fragments)
            self._began[number] = one.began_at
            self._applied[number] = one.began_at if one.pending is None else -1

    def count(self, engine: Any) -> Counted:
        """Return the counted steps at the end of a run."""
        self.look(engine)
        steps = engine.worker.steps
        waiting = [steps - applied for applied in self._applied if applied >= 0]
        return Counted(self.merged, sum(waiting) / len(self._applied))


def kills(every_s: float, seconds: float, seed: int) -> list[Failure]:
    """One worker after the other, in an order that the seed decides."""
    if not every_s:
        return []
    order = np.random.default_rng(seed).permutation(len(SPEEDS))
    times = np.arange(every_s, seconds - AWAY_S, every_s)
    return [
        Failure(int(order[number % len(order)]), float(at_s), float(at_s) + AWAY_S)
        for number, at_s in enumerate(times)
    ]


class Training(NamedTuple):
    """One training of the table.

    Attributes:
        method: Its row.
        kill_every: Seconds between kills; 0 for none.
        seed: Of weights, batches and the order of kills.
    """

    method: str
    kill_every: float
    seed: int

    def key(self, options: argparse.Namespace) -> str:
        """Its key in the file of results."""
        make = METHODS[self.method]
        settings = None if make is None else make().describe()
        return json.dumps([*self, settings, options.seconds, *task_of(options)], default=str)

    def train(self, options: argparse.Namespace) -> dict[str, Any]:
        """The losses, the goodput and the local steps."""
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        make, task, seconds = METHODS[self.method], task_of(options), float(options.seconds)
        n = len(SPEEDS)
        data = ByteTextData(batch_size=BATCH, context=task.context)
        data.check(n)
        shares = [batches(data, worker, n, self.seed) for worker in range(n)]
        torch.manual_seed(self.seed)
        models = [new_model(task) for _ in range(n)]
        steps = TimedSteps(models, task, seconds)
        if make is None:
            for made in range(int(seconds / FASTEST_STEP_S)):
                steps.take(0, next(shares[-1]), made * FASTEST_STEP_S)
            return {"loss": validate(models[0], data)}
        settings = make()
        simulation = Simulation.from_settings(
            models,
            settings,
            speeds=[speed / max(SPEEDS) / FASTEST_STEP_S for speed in SPEEDS],
            links=LINK,
            failures=kills(self.kill_every, seconds, self.seed),
            jitter=0.1,
            seed=self.seed,
        )
        mix = float(getattr(getattr(simulation.settings, "merge_policy", None), "mix", 0.0))
        counts = [RoundSteps(mix) for _ in models]

        def local_step(worker: int) -> None:
            if simulation.syncer is None:
                counts[worker].look(simulation.participants[worker])
            steps.take(worker, next(shares[worker]), simulation.time_s[worker])

        simulation.run(local_step, seconds=seconds, on_return=steps.renew)
        return self._result(simulation, counts, data, new_model(task))

    def _result(
        self,
        simulation: Simulation,
        counts: Sequence[RoundSteps],
        data: ByteTextData,
        model: ByteGPT,
    ) -> dict[str, Any]:
        def loss_of(params: torch.Tensor) -> float:
            torch.nn.utils.vector_to_parameters(params, model.parameters())
            return validate(model, data)

        costs = simulation.costs
        mean = loss_of(simulation.consensus())
        found = {"loss": mean, "mean_loss": mean}
        if simulation.syncer is None:
            goodput = [
                Goodput.of(one.spent, count.count(engine))
                for one, count, engine in zip(costs, counts, simulation.participants, strict=True)
            ]
        else:
            goodput = simulation.goodput
            found["loss"] = loss_of(simulation.outer())
        summary = simulation.merge_summary
        return {
            **found,
            "goodput": np.mean(goodput, 0).tolist(),
            "merged": [one.merged for one in goodput],
            "steps": sum(one.steps for one in costs),
            "sent_mb": statistics.mean(one.bytes_sent for one in costs) / 1e6,
            "merges": None if summary is None else summary._asdict(),
        }


def task_of(options: argparse.Namespace) -> Task:
    """What is trained; ``steps`` is the length of the learning-rate schedule."""
    width = 16 if options.quick else 32
    return Task(1000, width, layers=2, context=32, clip=1.0)


def fit_all(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The result of every training by its key."""
    wanted = {
        training.key(options): training
        for kill_every in options.kill_every
        for seed in options.seeds
        for training in (Training(method, kill_every, seed) for method in options.only)
        if not (kill_every and METHODS[training.method] is None)
    }

    def describe(training: Training, result: dict[str, Any]) -> str:
        method, kill_every, seed = training
        loss = f"{result['loss']:.4f} ({result.get('mean_loss', result['loss']):.4f})"
        return f"{method}, kill every {kill_every:g} s, seed {seed}: {loss}"

    return train_missing(wanted, describe, options)


def print_results(
    results: dict[str, dict[str, Any]], kill_every: float, options: argparse.Namespace
) -> None:
    """A row for each method."""
    found = {
        method: [results[Training(method, kill_every, seed).key(options)] for seed in options.seeds]
        for method in options.only
        if not (kill_every and METHODS[method] is None)
    }
    base = [one["loss"] for one in found.get("diloco", [])]
    rows = []
    for method, of_seeds in found.items():
        losses = [one["loss"] for one in of_seeds]
        gaps = [100 * (loss / other - 1) for loss, other in zip(losses, base, strict=bool(base))]
        cells = [method, mean_and_deviation(losses, 3)]
        is_base = not base or method == "diloco"
        cells += ["", ""] if is_base else [mean_and_deviation(gaps, 1), f"{paired_p(gaps):.2f}"]
        if "goodput" in of_seeds[0]:
            mean = np.mean([one["goodput"] for one in of_seeds], 0)
            cells += [f"{round(100 * share, 1) + 0.0:.1f}" for share in mean]
            cells.append(f"{statistics.mean(one['steps'] for one in of_seeds):.0f}")
            cells.append(f"{statistics.mean(one['sent_mb'] for one in of_seeds):.1f}")
        rows.append(cells + [""] * (12 - len(cells)))
    header = [f"killed every {kill_every:g} s" if kill_every else "no kills", "loss"]
    header += ["to diloco %", "p", *(f"{name} %" for name in Goodput._fields), "steps", "sent MB"]
    harness.print_table(header, rows)


def main() -> None:
    options = harness.parse(
        __doc__,
        only=list(METHODS),
        kill_every=[0.0, 200.0],
        seconds=900,
        seeds=[0, 1, 2, 3, 4],
        jobs=1,
        out=harness.OUTPUTS / "decoupled.json",
        quick={
            **{"only": ["fastest_alone", "diloco", "async_diloco", "decoupled"]},
            **{"seconds": 150, "kill_every": [0.0, 40.0], "seeds": [0]},
        },
        choices={"only": METHODS},
    )
    warnings.simplefilter("ignore")  # of settings that are compared although they are not advised
    results = fit_all(options)
    for kill_every in options.kill_every:
        print_results(results, kill_every, options)
    print(f"All results are in {options.out}")


if __name__ == "__main__":
    main()
