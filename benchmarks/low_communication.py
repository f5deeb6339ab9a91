"""The benchmark of low-communication training: the loss of each method at equal bytes and time.

Simulated workers (:class:`lightning_loco.Simulation`: the numbers of real processes) train the
demo's GPT, smaller (0.2M parameters). Each row is a file in low_communication/rows. Tables:

bytes   Each worker takes 600 local steps, and sends about as many bytes as DiLoCo with a round
        every ten: ``equal_bytes`` of a row sets how often it exchanges. Workers are equally fast
        and links take no time, but late results are late by as many local steps as the settings
        say.
longer  The same with 3,000 local steps, and DiLoCo with fewer rounds, for rows with ``longer``.
time    600 s on four workers, of which the last has half the speed of the others, with links of
        2 Mbit/s and 30 ms. A local step of the fast ones takes a second. Learning rates follow a
        schedule that ends with the time. ``equal_time`` of a row has its settings for this cluster.

  python benchmarks/low_communication.py                      all rows, in less than two hours
  python benchmarks/low_communication.py --only ddp diloco --tables longer
  python benchmarks/low_communication.py --only diloco --seeds 0 --results outputs/again
                                                        repeats one seed, in another folder

Results are kept in low_communication/results, a file for each row, with a hash (SHA-256) of what
decides them: the row, the task and the cluster. An interrupted run continues where it was, and a
row whose settings have changed is trained again. The tables and the picture of
docs/results/low_communication.md are written from these files.

How to read it: means over the seeds, with standard deviations; differences to DiLoCo with the same
seeds, with their two-sided p-value, which cannot be below 1/16 with 5 seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import harness
import torch
import yaml
from harness import mean_and_deviation, paired_p
from hydra.utils import instantiate
from omegaconf import OmegaConf
from simulated import BATCH, Task, TimedSteps, batches, new_model, train_all, train_alone, validate

from lightning_loco import LocoStrategy, Simulation
from lightning_loco.algorithms import LocalSGD
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.simulation.simulation import SimulatedSettings

FOLDER = Path(__file__).with_suffix("")
PAGE = harness.ROOT / "docs" / "results" / "low_communication.md"
ROW_LINK = "../../benchmarks/low_communication/rows"
PICTURE = harness.ROOT / "docs" / "images" / "low_communication.png"
TASK, QUICK = Task(steps=600, clip=1.0), Task(steps=30, width=16, layers=1, clip=1.0)
EQUAL: dict[str, Any] = {"speeds": [1.0, 1.0, 1.0, 1.0], "links": None, "jitter": 0.0}
UNEQUAL: dict[str, Any] = {
    "speeds": [1.0, 1.0, 1.0, 0.5],
    "links": {"mbit_per_s": 2, "latency_s": 0.03},
    "jitter": 0.1,
}
"""Workers, as arguments of the simulation; the fastest takes a step a second."""


class Table(NamedTuple):
    """What the rows of a table have in common: the task, and the arguments of the simulation."""

    task: Task
    cluster: dict[str, Any]


TABLES = {
    "bytes": Table(TASK, EQUAL),
    "longer": Table(TASK._replace(steps=3000), EQUAL),
    "time": Table(TASK, UNEQUAL),
}

BASE = "diloco"

DEFAULTS = {
    f"lightning_loco.{method.strategy_name}": dict(method.defaults)
    for method in METHOD_TABLE.values()
}
"""Those of each strategy, which decide the results of a row, too."""


class Row(NamedTuple):
    """A row of the tables, as its file describes it.

    Attributes:
        name: Of its files.
        title: In the tables.
        source: Address of the paper, or of what describes the method.
        method: What to instantiate; None for the mean gradient of all workers in every step.
        equal_bytes: Changes of the method for the table of equal bytes; None if it is not there.
        equal_time: The same for the table of equal time.
        longer: The same for the table of longer runs.
        workers: How many, of those of the cluster.
        optimizer: Of the local steps.
    """

    name: str
    title: str
    source: str
    method: dict[str, Any] | None
    equal_bytes: dict[str, Any] | None
    equal_time: dict[str, Any] | None
    longer: dict[str, Any] | None = None
    workers: int = 4
    optimizer: str = "adamw"

    def changes(self, table: str) -> dict[str, Any] | None:
        """Changes of the method for a table; None if the row is not there."""
        by_table = {"bytes": self.equal_bytes, "longer": self.longer, "time": self.equal_time}
        return by_table[table]

    def settings(self, table: str) -> dict[str, Any] | None:
        """What to instantiate for a table, with the defaults of its strategy."""
        if self.method is None:
            return None
        defaults = DEFAULTS.get(self.method["_target_"], {})
        changed = OmegaConf.merge(defaults, self.method, self.changes(table))
        return cast(dict[str, Any], OmegaConf.to_container(changed))

    def hash(self, table: str, task: Task) -> str:
        """The hash of what decides the results."""
        of_row = [self.settings(table), self.workers, self.optimizer]
        decides = [*of_row, task._asdict(), BATCH, TABLES[table].cluster]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def read_row(file: Path) -> Row:
    """Read the file of a row; TypeError if something is missing or unknown."""
    return Row(file.stem, **yaml.safe_load(file.read_text()))


ROWS = {file.stem: read_row(file) for file in sorted((FOLDER / "rows").glob("*.yaml"))}
Result = dict[str, Any]


def make_settings(method: dict[str, Any]) -> SimulatedSettings:
    """Instantiate a method."""
    made = instantiate(method, _convert_="all")
    return getattr(made, "settings", made)


class Training(NamedTuple):
    """A row of a table with a seed."""

    name: str
    table: str
    seed: int

    def train(self, options: argparse.Namespace) -> Result:
        """The validation loss, and what a worker has sent."""
        warnings.simplefilter("ignore")  # of settings that are compared although they are bad here
        torch.set_num_threads(1)
        row, task, n = ROWS[self.name], task_of(self.table, options), ROWS[self.name].workers
        data = ByteTextData(batch_size=BATCH, context=task.context)
        shares_of = len(TABLES[self.table].cluster["speeds"])
        data.check(shares_of)
        shares = [batches(data, worker, shares_of, self.seed) for worker in range(n)]
        torch.manual_seed(self.seed)
        models = [new_model(task, row.optimizer) for _ in range(n)]
        method = row.settings(self.table)
        if method is None:
            result = self._train_synchronously(models, shares, task)
        else:
            result = self._train(models, shares, task, make_settings(method))
        made_with = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
        return {"loss": round(validate(models[0], data), 5), **result, "made_with": made_with}

    def _cluster(self, workers: int) -> dict[str, Any]:
        """The arguments of a simulation."""
        cluster = TABLES[self.table].cluster
        return {**cluster, "speeds": cluster["speeds"][:workers], "seed": self.seed}

    def _train_synchronously(self, models: Sequence[Any], shares: Any, task: Task) -> Result:
        """Train the first model with the mean gradient, for as many steps as there is time for."""
        n, steps = len(models), task.steps
        parameters = sum(parameter.numel() for parameter in models[0].parameters())
        if self.table == "time":
            settings = LocoStrategy(LocalSGD(), sync_every=1).settings
            simulation = Simulation.from_settings(models, settings, **self._cluster(n))
            simulation.run(lambda worker: None, seconds=task.steps)
            steps = min(simulation.steps)
        model = new_model(task._replace(steps=steps), models[0].hparams["optimizer"])
        model.load_state_dict(models[0].state_dict())
        train_alone(model, shares, task._replace(steps=steps))
        models[0].load_state_dict(model.state_dict())
        sent = 8 * parameters * steps * (n - 1) / n  # of a ring all-reduce
        return {"sent_mb": round(sent / 1e6, 2), "steps": n * steps, "rounds": steps}

    def _train(
        self, models: Sequence[Any], shares: Any, task: Task, settings: SimulatedSettings
    ) -> Result:
        """Train all models, and give the first one the consensus."""
        n = len(models)
        simulation = Simulation.from_settings(models, settings, **self._cluster(n))
        steps, by_time = TimedSteps(models, task, task.steps), self.table == "time"

        def local_step(worker: int) -> None:
            made = simulation.time_s[worker] if by_time else simulation.steps[worker]
            steps.take(worker, next(shares[worker]), made)

        simulation.run(local_step, seconds=task.steps)
        found = simulation.consensus() if simulation.syncer is None else simulation.outer()
        costs = simulation.costs
        torch.nn.utils.vector_to_parameters(found, models[0].parameters())
        return {
            "sent_mb": round(statistics.fmean(one.bytes_sent for one in costs) / 1e6, 2),
            "steps": sum(one.steps for one in costs),
            "rounds": costs[0].rounds,
        }


def task_of(table: str, options: argparse.Namespace) -> Task:
    """What is trained."""
    return QUICK if options.quick else TABLES[table].task


class Results:
    """The results of all rows, in a file for each.

    A file holds by table the hash of the settings, and the results by seed.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.found: dict[str, dict[str, Any]] = {}
        for name in ROWS:
            file = folder / f"{name}.json"
            self.found[name] = json.loads(file.read_text()) if file.exists() else {}

    def of(self, name: str, table: str) -> dict[int, Result]:
        """The results of a row by seed, if they belong to its settings."""
        kept = self.found[name].get(table)
        if kept is None or kept["hash"] != self._hash(name, table):
            return {}
        return {int(seed): result for seed, result in sorted(kept["seeds"].items())}

    def _hash(self, name: str, table: str) -> str:
        return ROWS[name].hash(table, task_of(table, self.options))

    def add(self, training: Training, result: Result) -> None:
        """Keep a result."""
        name, table, seed = training
        seeds = dict(sorted({**self.of(name, table), seed: result}.items()))
        self.found[name][table] = {"hash": self._hash(name, table), "seeds": seeds}
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.found[name], indent=1, sort_keys=True)
        (self.folder / f"{name}.json").write_text(text + "\n")

    def losses(self, name: str, table: str) -> list[float]:
        """The loss of each seed."""
        return [result["loss"] for result in self.of(name, table).values()]

    def lines(self, table: str) -> list[list[str]]:
        """The header and the rows of a table, from the lowest loss on."""
        header = ["method", "source", "validation loss", "relative to DiLoCo", "p", "seeds", "sent"]
        lines, base = [], self.of(BASE, table)
        for name, row in ROWS.items():
            if not (found := self.of(name, table)):
                continue
            losses, seeds = self.losses(name, table), base.keys() & found.keys()
            gaps = [100 * (found[seed]["loss"] / base[seed]["loss"] - 1) for seed in seeds]
            compared = ["", ""]
            if name != BASE and gaps:
                p_value = f"{paired_p(gaps):.2g}" if len(gaps) > 1 else ""
                compared = [f"{mean_and_deviation(gaps, 1)} %", p_value]
            sent, steps = (
                statistics.fmean(one[key] for one in found.values()) for key in ("sent_mb", "steps")
            )
            cells = [f"[{row.title}]({ROW_LINK}/{name}.yaml)", f"[paper]({row.source})"]
            cells += [mean_and_deviation(losses, 3), *compared, str(len(losses)), f"{sent:,.1f} MB"]
            cells += [f"{steps:,.0f}"] if table == "time" else []
            lines.append((statistics.fmean(losses), cells))
        header += ["local steps of all"] if table == "time" else []
        return [header, *(cells for _, cells in sorted(lines))]


def with_tables(page: str, results: Results) -> str:
    """The page with the tables of these results."""
    return harness.with_tables(page, {table: results.lines(table) for table in TABLES})


def draw(results: Results, file: Path) -> None:
    """The losses of all rows at equal bytes and at equal time, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    for panel, table in zip(figure.subplots(1, 2), ("bytes", "time"), strict=True):
        losses = {name: results.losses(name, table) for name in ROWS}
        means = {name: statistics.fmean(found) for name, found in losses.items() if found}
        names = sorted(means, key=lambda name: means[name], reverse=True)
        for place, name in enumerate(names):
            color = "C3" if name in ("ddp", BASE, "alone") else "C0"
            panel.plot(losses[name], [place] * len(losses[name]), ".", color=color, alpha=0.4)
            panel.plot(means[name], place, "o", color=color)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.set_xlabel(f"validation loss at equal {table}")
        panel.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def fit(results: Results, options: argparse.Namespace) -> None:
    """Make the results that are missing, seed by seed."""
    wanted = [
        Training(name, table, seed)
        for seed in options.seeds
        for name in options.only
        for table in options.tables
        if ROWS[name].changes(table) is not None
    ]
    missing = {one: one for one in wanted if one.seed not in results.of(one.name, one.table)}

    def describe(training: Training, result: Result) -> str:
        name, table, seed = training
        return f"{name}, {table}, seed {seed}: {result['loss']:.4f}"

    for training, result in train_all(missing, describe, options):
        results.add(training, result)


def main() -> None:
    kept = FOLDER / "results"
    options = harness.parse(
        __doc__,
        only=list(ROWS),
        tables=list(TABLES),
        seeds=[0, 1, 2, 3, 4],
        jobs=os.cpu_count() or 1,
        results=kept,
        quick={
            **{"only": ["alone", "ddp", "diloco", "decoupled", "loscar"], "seeds": [0]},
            **{"results": harness.OUTPUTS / "low_communication_quick"},
        },
        choices={"only": ROWS, "tables": TABLES},
    )
    results = Results(options.results, options)
    fit(results, options)
    for table in options.tables:
        header, *rows = results.lines(table)
        shown = [[row[0][1:].partition("]")[0], *row[2:]] for row in rows]
        harness.print_table([table, *header[2:]], shown)
    print(f"All results are in {options.results}")
    if options.results == kept:
        PAGE.write_text(with_tables(PAGE.read_text(), results))
        draw(results, PICTURE)


if __name__ == "__main__":
    main()
