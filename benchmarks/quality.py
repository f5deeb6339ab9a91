"""What low communication costs in validation loss: every algorithm on the demo, one by one.

Measured: the validation loss of the consensus model after equally many local steps on the same
data, for data-parallel training that talks in every step (ddp), the algorithms of this package, and
one worker alone (alone), which sees only its own share of the tokens. Each fit is a run of
``train.py`` with the settings of ``conf/``; its command line is its name in the JSON file.

A fit of 600 steps takes minutes. Finished ones are kept in the JSON file and repeated only when
``conf/`` has changed, so an interrupted run continues where it was. ``--fresh``
repeats those that are asked for, after a change of the code for instance.

  python benchmarks/quality.py --png quality.png             the whole table, and the loss curves
  python benchmarks/quality.py --only diloco gasloc_ring     some of its rows
  python benchmarks/quality.py --only diloco --set outer_momentum=0.5 outer_lr=0.7
  python benchmarks/quality.py --set model.lr=0.002          for all rows, the baseline too
  python benchmarks/quality.py --only ddp diloco --set model.optimizer=muon          MuLoCo

``--set NAME=VALUE`` without a dot means ``algorithm.NAME`` and goes to the rows that know it; with
a dot it is any setting of ``conf/``.

How to read it: ``to ddp`` is the loss above ddp's, in percent. A bound names the row that it
compares with, and holds for the demo with 4 workers, sync_every=10 and 600 steps; bounds of
compressed rows are means over three seeds. The picture has the losses along local steps, bytes and
the time that they would take across a ``--link``, where hidden rounds wait for nothing and all
others for their bytes; it shows the first seed. ``to alone`` should be clearly negative for all
workers that exchange. With several seeds losses and differences are means with standard deviations.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import harness
from curves import Curve, draw
from harness import ROOT, mean_and_deviation
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_loco.costs import LINKS
from lightning_loco.strategies import METHODS
from lightning_loco.strategies.arguments import argument_names


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        algorithm: Of ``conf/algorithm``.
        topology: Of ``conf/topology``, if it takes one.
        bound: Of the gap to the row ``base``, in percent.
        base: The row that it is compared with.
        also: Further settings.
    """

    algorithm: str
    topology: str | None = None
    bound: float | None = None
    base: str = "ddp"
    also: tuple[str, ...] = ()


WHOLE = ("algorithm.fragments=null",)
DELAYED = (*WHOLE, "algorithm.delay=2")
EACH_STEP = ("algorithm.sync_every=1",)
EACH_FETCH = ("algorithm.fetch_probability=1.0",)
SPARSE = ("compression=sparse",)
IN_MODEL = (
    "compression.error_feedback=model",
    *("algorithm.outer_lr=1.5", "algorithm.outer_momentum=0.5"),
)
ROWS = {
    "ddp": Row("ddp"),
    "diloco": Row("diloco", bound=3.0),
    "diloco_int8": Row("diloco", None, 0.5, "diloco", ("compression=int8",)),
    "diloco_e3m0": Row("diloco", None, 1.0, "diloco", ("compression=e3m0",)),
    "diloco_sparse": Row("diloco", bound=4.0, also=(*SPARSE, *IN_MODEL)),
    "diloco_sparse_fed_back": Row("diloco", also=SPARSE),
    "async_diloco": Row("async_diloco"),
    "async_diloco_late": Row("async_diloco", also=WHOLE),
    "async_diloco_delay_2": Row("async_diloco", also=DELAYED),
    "streaming_diloco": Row("streaming_diloco"),
    "eager_diloco": Row("eager_diloco"),
    "delayed_nesterov": Row("delayed_nesterov"),
    "gasloc_ring": Row("gasloc", "ring", 4.0),
    "gasloc_ring_int8": Row("gasloc", "ring", 0.5, "gasloc_ring", ("compression=int8",)),
    "gasloc_random_matching": Row("gasloc", "random_matching"),
    "local_sgd": Row("local_sgd", bound=10.0),
    "sparta": Row("sparta", bound=13.0, also=EACH_STEP),
    "sparta_5pct": Row("sparta", bound=11.0, also=(*EACH_STEP, "algorithm.fraction=0.05")),
    "async_model_average": Row("async_model_average", bound=10.0),
    "pairwise_gossip": Row("pairwise_gossip"),
    "pairwise_gossip_each_step": Row("pairwise_gossip", bound=10.0, also=EACH_FETCH),
    "muloco": Row("diloco", also=("model.optimizer=muon",)),
    "alone": Row("ddp"),
}
HIDDEN = {
    *("async_diloco", "streaming_diloco", "eager_diloco"),
    *("async_model_average", "pairwise_gossip"),
}
"""Algorithms that train on while messages are under way."""
TITLES = {
    "ddp": "DDP",
    "diloco": "DiLoCo",
    "streaming_diloco": "Streaming DiLoCo",
    "gasloc_ring": "GASLoC on a ring",
}
"""Rows in the legend of the picture; others have their own names there."""
Results = dict[str, dict[str, Any]]


def command_line(name: str, seed: int, options: argparse.Namespace) -> str:
    """What comes after ``python train.py`` for one fit."""
    algorithm, topology, also = ROWS[name].algorithm, ROWS[name].topology, ROWS[name].also
    words = ["experiment=smoke"] if options.quick else []
    words += [f"algorithm={algorithm}", *([f"topology={topology}"] if topology else []), *also]
    words += [
        f"trainer.devices={1 if name == 'alone' else options.workers}",
        f"trainer.max_steps={options.steps}",
        f"seed={seed}",
        "num_threads=1",
        "callbacks=none",
        "trainer.enable_progress_bar=false",
    ]
    known: set[str] = set()
    if algorithm in METHODS:
        known = argument_names(METHODS[algorithm])
    own_period = any(word.startswith("algorithm.sync_every=") for word in also)
    period = [] if own_period else [f"sync_every={options.sync_every}"]
    for setting in [*period, *options.set]:
        key = setting.partition("=")[0]
        if "." not in key and key not in known:
            continue
        if key.startswith("topology.") and topology is None:
            continue
        words.append(setting if "." in key else f"algorithm.{setting}")
    return shlex.join(words)


def fit(command: str, folder: Path) -> dict[str, Any]:
    """Run ``train.py`` and read what it reports.

    Raises:
        SystemExit: If it fails, with the end of what it printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.txt"
    words = [sys.executable, str(ROOT / "train.py"), *shlex.split(command)]
    with log.open("w") as output:
        ended = subprocess.run(
            [*words, f"hydra.run.dir={folder}"], stdout=output, stderr=subprocess.STDOUT
        )
    if ended.returncode:
        raise SystemExit(f"{log.read_text()[-3000:]}\nfailed: python train.py {command}")
    report = json.loads((folder / "report.json").read_text())
    return {**report, "curve": read_curve(folder / "csv" / "metrics.csv", "val/loss")}


def read_curve(file: Path, column: str) -> list[tuple[int, float]]:
    """Return (step, value) pairs of a column of a metrics CSV, which is empty in some lines."""
    with file.open(newline="", encoding="utf-8") as lines:
        return [
            (int(row["step"]), float(row[column]))
            for row in csv.DictReader(lines)
            if row.get(column)
        ]


def settings_of(command: str) -> dict[str, Any]:
    """The configuration that a command line stands for, defaults included."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose("train", shlex.split(command)))


def fit_all(options: argparse.Namespace) -> Results:
    """Make the fits that are not in the file yet; it is written after each."""
    results: Results = {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.exists():
        results = json.loads(options.out.read_text())
    wanted = [command_line(name, s, options) for s in options.seeds for name in options.only]
    missing = [
        command
        for command in dict.fromkeys(wanted)
        if options.fresh or results.get(command, {}).get("settings") != settings_of(command)
    ]
    for number, command in enumerate(missing, start=1):
        print(f"{number}/{len(missing)}: python train.py {command}", flush=True)
        started = time.perf_counter()
        folder = options.out.parent / options.out.stem / f"{time.strftime('%m%d-%H%M%S')}-{number}"
        result = fit(command, folder.absolute())
        results[command] = {**result, "settings": settings_of(command)}
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        seconds = time.perf_counter() - started
        print(f"    validation loss {result['val_loss']:.4f} after {seconds:.0f} s", flush=True)
    return results


def losses_of(name: str, results: Results, options: argparse.Namespace) -> list[float]:
    """Validation losses of one row, one for each seed whose fit there is."""
    commands = [command_line(name, seed, options) for seed in options.seeds]
    return [results[c]["val_loss"] for c in commands if c in results]


def row(name: str, results: Results, options: argparse.Namespace) -> list[str]:
    """One line of the table."""
    losses = losses_of(name, results, options)
    result = results[command_line(name, options.seeds[0], options)]
    cells = [
        name,
        str(result["num_workers"]),
        f"{result['tokens']:,}",
        mean_and_deviation(losses, 4),
    ]
    gaps = {
        other: [100 * (a / b - 1) for a, b in zip(losses, base, strict=True)]
        for other in ("ddp", "alone", ROWS[name].base)
        if len(base := losses_of(other, results, options)) == len(losses) and name != other
    }
    cells += [
        mean_and_deviation(gaps[other], 1) if other in gaps else "-" for other in ("ddp", "alone")
    ]
    bound, base_row = ROWS[name].bound, ROWS[name].base
    if bound is None or options.quick or base_row not in gaps:
        cells.append("-")
    else:
        cells.append(f"{base_row}: {harness.at_most(statistics.fmean(gaps[base_row]), bound, 1)}")
    sent = result["bytes_sent"]
    return [*cells, f"{sent / 1e6:,.0f}", f"{result['train_s']:.0f}"]


def curves_of(results: Results, options: argparse.Namespace) -> list[Curve]:
    """The validation loss of every row, first seed."""
    found = {name: results[command_line(name, options.seeds[0], options)] for name in options.only}
    return [
        Curve(
            TITLES.get(name, name),
            fit["curve"],
            fit["bytes_sent"],
            ROWS[name].algorithm in HIDDEN,
        )
        for name, fit in found.items()
        if fit["curve"]
    ]


def main() -> None:
    options = harness.parse(
        __doc__,
        only=list(ROWS),
        set=[],
        workers=4,
        sync_every=10,
        steps=600,
        seeds=[0],
        fresh=False,  # repeat fits that are in the file
        out=harness.OUTPUTS / "quality.json",
        png=Path,
        link="wan",  # of the picture's time
        step_s=0.1,  # a local step, likewise
        quick={"steps": 20, "workers": 2, "sync_every": 5},
        choices={"only": ROWS, "link": LINKS},
    )
    for setting in options.set:
        if "=" not in setting:
            raise SystemExit(f"--set takes NAME=VALUE, got {setting!r}")
    results = fit_all(options)
    header = ["row", "workers", "tokens", "validation loss", "to ddp %", "to alone %"]
    header += ["bound, % above", "sent MB", "seconds"]
    harness.print_table(header, [row(name, results, options) for name in options.only])
    print(f"All results are in {options.out}")
    if options.png:
        draw(curves_of(results, options), LINKS[options.link], options.step_s, options.png)
        print(f"The curves are in {options.png}")


if __name__ == "__main__":
    main()
