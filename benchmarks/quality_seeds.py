"""The loss of the methods and recipes over several seeds, with standard deviations and p-values.

The demo's GPT, smaller (0.2M parameters by default), is trained by simulated workers
(:class:`lightning_loco.Simulation`: the numbers of real processes) for as many local steps with
every method, on the same batches. Groups:

methods      The methods with the settings of ``conf/``, a round every 10 local steps.
compression  DiLoCo with fewer bytes.
sparseloco   SparseLoCo with its authors' settings beside DiLoCo, a round every 15, 50 and 250 local
             steps, for twice as many steps.
workers      NoLoCo beside DiLoCo on 4 and 16 workers, a round every 50 local steps.
optimizers   Muon as inner optimizer (MuLoCo), and rounds of one worker alone (SNOO).
lora         Fine-tuning of a model of Python source on the text of Python's help: the whole model,
             or LoRA adapters, of which alone messages are made then.

  python benchmarks/quality_seeds.py                        all groups, five seeds
  python benchmarks/quality_seeds.py --groups sparseloco --seeds 0 1
  python benchmarks/quality_seeds.py --png seeds.png        draws the losses, too

Finished trainings are kept in the file of ``--out``, so an interrupted run continues where it was;
``--fresh`` repeats them, after a change of the code for instance.

How to read it: means over the seeds, with standard deviations. ``p`` is the two-sided p-value of
the paired differences to the row ``beside``: with 5 seeds it cannot be below 1/16. Bytes are those
that a worker sends for its rounds, or for an all-reduce in every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from common import make_parser, mean_and_deviation, paired_p, print_machine, print_table
from equal_time import (
    BATCH,
    CONTEXT,
    batches,
    new_model,
    train_alone,
    train_missing,
    train_together,
    validate,
)
from torch import Tensor, nn

from lightning_loco import (
    AsyncDiLoCoStrategy,
    DiLoCo,
    EagerDiLoCoStrategy,
    GASLoC,
    LocalSGD,
    NoLoCo,
)
from lightning_loco import StreamingDiLoCoStrategy as Streaming
from lightning_loco.algorithms.delayed_nesterov import DelayedNesterov
from lightning_loco.algorithms.sparta import SPARTA
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.compression import Compensated, ErrorFeedback, Sparse
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps

ROOT = Path(__file__).resolve().parent.parent
PRETRAINING_BYTES = 4_000_000
RANK, ADAPTER_LR = 8, 1e-2
CLIP = 1.0
"""Largest norm of a gradient, as in ``conf/trainer``."""


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        rounds: How workers exchange; None for the mean gradient of all in every step.
        workers: How many.
        beside: The row that it is compared with.
        optimizer: Of the local steps.
        longer: Factor of the local steps.
        tunes: What is fine-tuned, if a trained model is: the whole model or its adapters.
    """

    rounds: RoundSettings | None
    workers: int = 4
    beside: str = "ddp"
    optimizer: Literal["adamw", "muon"] = "adamw"
    longer: int = 1
    tunes: Literal["", "whole", "adapters"] = ""


def every(
    steps: int, algorithm: Any, topology: str | None = None, compression: Any = None
) -> RoundSettings:
    """Blocking rounds after a number of local steps."""
    return RoundSettings(algorithm, EverySteps(steps), topology, compression)


DILOCO, GOSSIP = DiLoCo(0.9, 0.6), GASLoC()
AUTHORS = ErrorFeedback(Sparse(k=128, mean_over="senders"), decay=0.95)
STREAMING = Streaming(10, 2, 2, mix=0.25, outer_lr=0.6, outer_momentum=0.8)
SPARSELOCO = {
    f"{name}_{steps}": Row(
        every(steps, algorithm, compression=compression), beside=beside, longer=2
    )
    for steps in (15, 50, 250)
    for name, algorithm, compression, beside in (
        ("diloco", DILOCO, None, "ddp_longer"),
        ("sparseloco", DiLoCo(1.0, 0.0), AUTHORS, f"diloco_{steps}"),
    )
}
GROUPS: dict[str, dict[str, Row]] = {
    "methods": {
        "ddp": Row(None),
        "diloco": Row(every(10, DILOCO)),
        "diloco_0.7_0.5": Row(every(10, DiLoCo(0.7, 0.5))),
        "diloco_1.0_0.3": Row(every(10, DiLoCo(1.0, 0.3))),
        "delayed_nesterov": Row(every(10, DelayedNesterov(1.4, 0.5))),
        "async_diloco": Row(AsyncDiLoCoStrategy(10).settings),
        "eager_diloco": Row(EagerDiLoCoStrategy(10).settings),
        "streaming_diloco": Row(STREAMING.settings),
        "gasloc_ring": Row(every(10, GOSSIP, "ring")),
        "gasloc_random_matching": Row(every(10, GOSSIP, "random_matching")),
        "noloco": Row(every(10, NoLoCo(), "random_matching")),
        "local_sgd": Row(every(10, LocalSGD())),
        "sparta": Row(every(1, SPARTA())),
        "alone": Row(None, workers=1),
    },
    "compression": {
        name: Row(every(10, algorithm, compression=compression), beside=beside)
        for name, algorithm, compression, beside in (
            ("int8", DILOCO, "int8", "diloco"),
            ("e3m0", DILOCO, "e3m0", "diloco"),
            ("sparse_fed_back", DILOCO, "sparse", "diloco_0.7_0.5"),
            ("sparse_compensated", DiLoCo(1.5, 0.5), Compensated(Sparse()), "diloco_0.7_0.5"),
            ("sparse_senders", DiLoCo(1.0, 0.0), AUTHORS, "diloco_0.7_0.5"),
        )
    },
    "sparseloco": {"ddp_longer": Row(None, beside="ddp_longer", longer=2), **SPARSELOCO},
    "workers": {
        f"{name}_of_{n}": Row(every(50, algorithm, topology), n, f"diloco_of_{n}")
        for n in (4, 16)
        for name, algorithm, topology in (
            ("diloco", DILOCO, None),
            ("noloco", NoLoCo(), "random_matching"),
        )
    },
    "optimizers": {
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
        row = ROWS[self.name]
        rounds = None if row.rounds is None else row.rounds.describe()
        model = [options.width, options.layers, options.lr, self.steps(options)]
        made = [row.workers, row.optimizer, row.tunes, BATCH, CONTEXT, CLIP]
        if row.tunes:
            made += [PRETRAINING_BYTES, RANK, ADAPTER_LR]
        return json.dumps([rounds, *made, self.seed, *model], default=str)

    def steps(self, options: argparse.Namespace) -> int:
        """Local steps."""
        steps: int = options.steps * ROWS[self.name].longer
        return steps

    def train(self, options: argparse.Namespace) -> Result:
        """The validation loss of the consensus, and the bytes that a worker sends."""
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        row, steps = ROWS[self.name], self.steps(options)
        torch.manual_seed(self.seed)
        start = new_model(options, steps, row.optimizer).state_dict()
        data = ByteTextData(batch_size=BATCH, context=CONTEXT)
        if row.tunes:
            source = ByteTextData(batch_size=BATCH, context=CONTEXT, max_bytes=PRETRAINING_BYTES)
            source.check(1)
            model = new_model(options, steps)
            train_alone(model, [batches(source, 0, 1, self.seed)], steps, CLIP)
            start = model.state_dict()
            help_text = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
            data = ByteTextData(path=help_text, batch_size=BATCH, context=CONTEXT)
        data.check(row.workers)
        shares = [batches(data, worker, row.workers, self.seed) for worker in range(row.workers)]
        count = 1 if row.rounds is None else row.workers
        models = [self._model(start, steps, options) for _ in range(count)]
        numel = sum(p.numel() for p in models[0].parameters() if p.requires_grad)
        sent = 8 * numel * steps * (row.workers - 1) / row.workers
        if row.rounds is None:
            train_alone(models[0], shares, steps, CLIP)
        else:
            simulation = train_together(models, shares, row.rounds, steps, CLIP)
            trained = [p for p in models[0].parameters() if p.requires_grad]
            nn.utils.vector_to_parameters(simulation.consensus(), trained)
            sent = simulation.costs[0].bytes_sent
        return {"loss": validate(models[0], data), "bytes": sent}

    def _model(self, start: dict[str, Any], steps: int, options: argparse.Namespace) -> ByteGPT:
        row = ROWS[self.name]
        model = new_model(options, steps, row.optimizer)
        model.load_state_dict(start)
        if row.tunes == "adapters":
            add_adapters(model)
            model.hparams["lr"] = ADAPTER_LR
        return model


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
    print_table(header, rows)


def draw(results: dict[str, Result], options: argparse.Namespace) -> None:
    """The loss of each row against the bytes that it sends, a panel for each group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(options.groups), 3.8), layout="constrained")
    panels = figure.subplots(1, len(options.groups), squeeze=False)[0]
    for panel, group in zip(panels, options.groups, strict=True):
        for name in GROUPS[group]:
            losses = values(name, "loss", results, options)
            sent = statistics.fmean(values(name, "bytes", results, options)) / 1e6
            deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
            panel.errorbar(
                sent, statistics.fmean(losses), deviation, fmt="o", capsize=3, label=name
            )
        panel.set_xscale("symlog", linthresh=0.1)
        panel.set(title=group, xlabel="MB sent per worker")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("validation loss (nats per byte)")
    figure.savefig(options.png, dpi=110)
    print(f"The picture is in {options.png}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=750, help="local steps of a worker")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fresh", action="store_true", help="repeat what is in the file")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "outputs" / "quality_seeds.json", help="all results"
    )
    parser.add_argument("--png", type=Path, help="draw the losses into this file")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.width, options.layers, options.seeds = 50, 16, 1, [0]
        options.groups = [group for group in options.groups if group in ("optimizers", "lora")]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print_machine()
    results = fit_all(options)
    for group in options.groups:
        show(group, results, options)
    print(f"All results are in {options.out}")
    if options.png:
        draw(results, options)


if __name__ == "__main__":
    main()
