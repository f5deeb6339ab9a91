"""The loss of recipes over several seeds, with standard deviations and p-values.

The demo's GPT, smaller (0.2M parameters by default), is trained by simulated workers
(:class:`lightning_loco.Simulation`: the numbers of real processes) for as many local steps with
every method, on the same batches. Groups:

compression  DiLoCo with a round every 10 local steps, and with fewer bytes.
sparseloco   SparseLoCo with its authors' settings beside DiLoCo, a round every 15, 50 and 250 local
             steps, for twice as many steps.
workers      NoLoCo beside DiLoCo on 4 and 16 workers, a round every 50 local steps.
optimizers   Muon as inner optimizer (MuLoCo), and rounds of one worker alone (SNOO).
lora         Fine-tuning of a model of Python source on the text of Python's help: the whole model,
             or LoRA adapters, of which alone messages are made then.
hostile      The demo's own GPT under DiLoCo, with three means of the pseudo-gradients. The last of
             four workers sends something else than its pseudo-gradient from the first round on:
             its negative, 100 times as much, or its sum with Gaussian noise of standard deviation 1
             for each parameter. The baseline is three honest workers, each on the same quarter of
             the text. The robust means should stay within 5 % of it.

  python benchmarks/quality_seeds.py                        all groups, five seeds
  python benchmarks/quality_seeds.py --groups hostile --seeds 0
  python benchmarks/quality_seeds.py --groups sparseloco --seeds 0 1

Finished trainings are kept in the file of ``--out``, so an interrupted run continues where it was;
``--fresh`` repeats them, after a change of the code for instance.

How to read it: means over the seeds, with standard deviations. ``p`` is the two-sided p-value of
the paired differences to the row ``beside``: with 5 seeds it cannot be below 1/16. Bytes are those
that a worker sends for its rounds, or for an all-reduce in every step.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import harness
import torch
from harness import mean_and_deviation, paired_p
from simulated import (
    BATCH,
    LocalSteps,
    OnStep,
    Task,
    batches,
    new_model,
    train_alone,
    train_missing,
    train_together,
    validate,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_loco import DiLoCo, NoLoCo, Simulation
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.compression import Compensated, ErrorFeedback, Sparse
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps

SMALL = Task(steps=750, clip=1.0)  # clipped as in conf/trainer
LONGER = SMALL._replace(steps=1500)
DEMO = Task(steps=600, width=128, layers=4, lr=1e-3, context=128, clip=1.0)
QUICK = Task(steps=60, width=16, layers=1, clip=1.0)
PRETRAINING_BYTES, PRETRAINING_STEPS = 4_000_000, 750
RANK, ADAPTER_LR = 8, 1e-2
ATTACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda pseudo_gradient: pseudo_gradient,
    "sign_flip": torch.neg,
    "scaled": lambda pseudo_gradient: 100 * pseudo_gradient,
    "noise": lambda pseudo_gradient: pseudo_gradient + torch.randn_like(pseudo_gradient),
}


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        rounds: How workers exchange; None for the mean gradient of all in every step.
        workers: How many.
        beside: The row that it is compared with.
        optimizer: Of the local steps.
        task: What is trained.
        tunes: What is fine-tuned, if a trained model is: the whole model or its adapters.
        attack: What the last worker sends instead of its pseudo-gradient.
        shares: Parts of the text; one for each worker if 0.
    """

    rounds: RoundSettings | None
    workers: int = 4
    beside: str = "ddp"
    optimizer: Literal["adamw", "muon"] = "adamw"
    task: Task = SMALL
    tunes: Literal["", "whole", "adapters"] = ""
    attack: str = ""
    shares: int = 0


def every(
    steps: int, algorithm: Any, topology: str | None = None, compression: Any = None
) -> RoundSettings:
    """Blocking rounds after a number of local steps."""
    return RoundSettings(algorithm, EverySteps(steps), topology, compression)


DILOCO = DiLoCo(0.9, 0.6)
AUTHORS = ErrorFeedback(Sparse(k=128, mean_over="senders"), decay=0.95)
SPARSELOCO = {
    f"{name}_{steps}": Row(
        every(steps, algorithm, compression=compression), beside=beside, task=LONGER
    )
    for steps in (15, 50, 250)
    for name, algorithm, compression, beside in (
        ("diloco", DILOCO, None, "ddp_longer"),
        ("sparseloco", DiLoCo(1.0, 0.0), AUTHORS, f"diloco_{steps}"),
    )
}
GROUPS: dict[str, dict[str, Row]] = {
    "compression": {
        name: Row(every(10, algorithm, compression=compression), beside=beside)
        for name, algorithm, compression, beside in (
            ("diloco", DILOCO, None, "ddp"),
            ("diloco_0.7_0.5", DiLoCo(0.7, 0.5), None, "ddp"),
            ("int8", DILOCO, "int8", "diloco"),
            ("e3m0", DILOCO, "e3m0", "diloco"),
            ("sparse_fed_back", DILOCO, "sparse", "diloco_0.7_0.5"),
            ("sparse_compensated", DiLoCo(1.5, 0.5), Compensated(Sparse()), "diloco_0.7_0.5"),
            ("sparse_senders", DiLoCo(1.0, 0.0), AUTHORS, "diloco_0.7_0.5"),
        )
    },
    "sparseloco": {"ddp_longer": Row(None, beside="ddp_longer", task=LONGER), **SPARSELOCO},
    "workers": {
        f"{name}_of_{n}": Row(every(50, algorithm, topology), n, f"diloco_of_{n}")
        for n in (4, 16)
        for name, algorithm, topology in (
            ("diloco", DILOCO, None),
            ("noloco", NoLoCo(), "random_matching"),
        )
    },
    "optimizers": {
        "ddp": Row(None),
        "alone": Row(None, workers=1),
        "ddp_muon": Row(None, optimizer="muon"),
        "muloco": Row(every(10, DILOCO), beside="ddp_muon", optimizer="muon"),
        "snoo": Row(every(30, DiLoCo(0.7, 0.5)), 1, "alone"),
    },
    "lora": {
        "whole_ddp": Row(None, beside="whole_ddp", tunes="whole"),
        "lora_ddp": Row(None, beside="whole_ddp", tunes="adapters"),
        "lora_diloco_10": Row(every(10, DILOCO), beside="lora_ddp", tunes="adapters"),
        "lora_diloco_50": Row(every(50, DILOCO), beside="lora_ddp", tunes="adapters"),
        "lora_alone": Row(None, 1, "lora_ddp", tunes="adapters"),
    },
    "hostile": {
        "three_honest": Row(
            every(10, DILOCO), 3, "three_honest", task=DEMO, attack="none", shares=4
        ),
        **{
            f"{attack}_{mean}": Row(
                every(10, DiLoCo(0.9, 0.6, aggregate=mean)),
                beside="three_honest",
                task=DEMO,
                attack=attack,
            )
            for attack in ATTACKS
            for mean in ("mean", "trimmed_mean", "geometric_median")
        },
    },
}
ROWS = {name: row for group in GROUPS.values() for name, row in group.items()}
Result = dict[str, float]


class Adapter(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the low-rank part."""
        added: Tensor = self.base(hidden) + hidden @ self.down.T @ self.up.T
        return added


def add_adapters(model: ByteGPT) -> None:
    """Freeze the model, and give each linear layer of its blocks an adapter."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapter(layer))


class Training(NamedTuple):
    """One training of the table: a row with a seed."""

    name: str
    seed: int

    def key(self, options: argparse.Namespace) -> str:
        """Its key in the file of results; rows that are equal are trained once."""
        return key_of(ROWS[self.name], task_of(self.name, options), self.seed)

    def train(self, options: argparse.Namespace) -> Result:
        """The validation loss of the consensus, and the bytes that a worker sends."""
        return train_row(ROWS[self.name], task_of(self.name, options), self.seed)


def key_of(row: Row, task: Task, seed: int) -> str:
    """The key of a training in a file of results."""
    rounds = None if row.rounds is None else row.rounds.describe()
    made = [row.workers, row.optimizer, row.tunes, row.attack, row.shares, BATCH]
    if row.tunes:
        made += [PRETRAINING_BYTES, PRETRAINING_STEPS, RANK, ADAPTER_LR]
    return json.dumps([rounds, *made, seed, *task], default=str)


def train_row(row: Row, task: Task, seed: int, on_step: OnStep = lambda simulation: None) -> Result:
    """The validation loss of the consensus, and the bytes that a worker sends.

    ``on_step`` is called with the simulation before each local step of worker 0.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start = new_model(task, row.optimizer).state_dict()
    data = ByteTextData(batch_size=BATCH, context=task.context)
    if row.tunes:
        longer = task._replace(steps=min(PRETRAINING_STEPS, 10 * task.steps))
        start, random_state = pretrained(longer, seed)
        torch.set_rng_state(random_state)  # whether it was trained now or for an earlier row
        help_text = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
        data = ByteTextData(path=help_text, batch_size=BATCH, context=task.context)
    n = row.shares or row.workers
    data.check(n)
    shares = [batches(data, worker, n, seed) for worker in range(n)]
    models = []
    for _ in range(row.workers if row.rounds else 1):
        models.append(new_model(task, row.optimizer))
        models[-1].load_state_dict(start)
        if row.tunes == "adapters":
            add_adapters(models[-1])
            models[-1].hparams["lr"] = ADAPTER_LR
    trained = [p for p in models[0].parameters() if p.requires_grad]
    sent = 8 * sum(p.numel() for p in trained) * task.steps * (row.workers - 1) / row.workers
    if row.rounds is None:
        train_alone(models[0], shares, task)
    else:
        together = partial(train_attacked, row.attack) if row.attack else train_together
        simulation = together(models, shares, row.rounds, task, on_step)
        vector_to_parameters(simulation.consensus(), trained)
        sent = simulation.costs[0].bytes_sent
    return {"loss": validate(models[0], data), "bytes": sent}


def task_of(name: str, options: argparse.Namespace) -> Task:
    """What is trained for a row."""
    return QUICK if options.quick else ROWS[name].task


@functools.cache
def pretrained(task: Task, seed: int) -> tuple[dict[str, Any], Tensor]:
    """A model that has been trained on Python source, and the state of random numbers then."""
    source = ByteTextData(batch_size=BATCH, context=task.context, max_bytes=PRETRAINING_BYTES)
    source.check(1)
    model = new_model(task)
    train_alone(model, [batches(source, 0, 1, seed)], task)
    return model.state_dict(), torch.get_rng_state()


def train_attacked(
    attack: str,
    models: list[ByteGPT],
    shares: list[Iterator[Tensor]],
    settings: RoundSettings,
    task: Task,
    on_step: OnStep,
) -> Simulation:
    """All workers by turns; before a round the fourth moves to where it sends what it wants to."""
    simulation = Simulation.from_settings(models, settings)
    take, every = LocalSteps(models, task.clip), settings.schedule.sync_every_of(0)
    steps, outer = [0] * len(models), torch.empty(0)

    def local_step(worker: int) -> None:
        nonlocal outer
        model = models[worker]
        if worker == 0:
            on_step(simulation)
        if worker == 3 and steps[worker] % every == 0:
            outer = parameters_to_vector(model.parameters()).detach().clone()
        take(worker, [next(shares[worker])])
        steps[worker] += 1
        if worker == 3 and steps[worker] % every == 0 and attack != "none":
            # A round follows, which sends outer - local.
            local = parameters_to_vector(model.parameters()).detach()
            vector_to_parameters(outer - ATTACKS[attack](outer - local), model.parameters())

    simulation.run(local_step, num_rounds=task.steps // every)
    return simulation


def fit_all(options: argparse.Namespace) -> dict[str, Result]:
    """The result of every training by its key; rows that are equal are trained once."""
    wanted: dict[str, Training] = {}
    for seed in options.seeds:
        for name in names_of(options):
            training = Training(name, seed)
            wanted.setdefault(training.key(options), training)

    def describe(training: Training, result: Result) -> str:
        return f"{training.name}, seed {training.seed}: {result['loss']:.4f}"

    return train_missing(wanted, describe, options, options.fresh)


def names_of(options: argparse.Namespace) -> Iterator[str]:
    """The rows of the chosen groups, with those that they are compared with."""
    chosen = [name for group in options.groups for name in GROUPS[group]]
    yield from dict.fromkeys([*chosen, *(ROWS[name].beside for name in chosen)])


def values(
    name: str, column: str, results: dict[str, Result], options: argparse.Namespace
) -> list[float]:
    """A number of a row for each seed."""
    return [results[Training(name, seed).key(options)][column] for seed in options.seeds]


def show(group: str, results: dict[str, Result], options: argparse.Namespace) -> None:
    """Print the table of a group."""
    rows = []
    for name, row in GROUPS[group].items():
        losses = values(name, "loss", results, options)
        cells = [name, mean_and_deviation(losses, 3)]
        if row.beside == name:
            cells += ["-", "-", "-"]
        else:
            bases = values(row.beside, "loss", results, options)
            pairs = list(zip(losses, bases, strict=True))
            gap = mean_and_deviation([100 * (loss / base - 1) for loss, base in pairs], 1)
            cells += [row.beside, gap, f"{paired_p([loss - base for loss, base in pairs]):.3f}"]
        sent = statistics.fmean(values(name, "bytes", results, options))
        rows.append([*cells, f"{sent / 1e6:,.1f}"])
    header = [group, "validation loss", "beside", "above it, %", "p", "sent MB"]
    harness.print_table(header, rows)


def main() -> None:
    options = harness.parse(
        __doc__,
        groups=list(GROUPS),
        seeds=[0, 1, 2, 3, 4],
        jobs=os.cpu_count() or 1,
        fresh=False,  # repeat what is in the file
        out=harness.OUTPUTS / "quality_seeds.json",
        quick={"groups": ["optimizers", "lora"], "seeds": [0]},
        choices={"groups": GROUPS},
    )
    results = fit_all(options)
    for group in options.groups:
        show(group, results, options)
    print(f"All results are in {options.out}")


if __name__ == "__main__":
    main()
