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
  python benchmarks/hidden.py --width 128 --layers 4 --lr 1e-3 --seeds 0 1 2

How to read it: means over the seeds, with standard deviations if there are several; the best method
of each ratio is marked with a star. From a ratio of 0.3 on, one of
the hidden methods should be below ``diloco`` and below ``alone``.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from common import make_parser, mean_and_deviation, print_machine, print_table
from equal_time import HIDDEN, METHODS, Training, train_missing

ROOT = Path(__file__).resolve().parent.parent
PAYS_FROM = 0.3


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


def mean_loss(
    method: str, ratio: float, losses: dict[str, float], options: argparse.Namespace
) -> float:
    """The mean over the seeds."""
    return statistics.mean(losses_of(method, ratio, losses, options))


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
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.3, 0.8, 2.0])
    parser.add_argument("--steps", type=int, default=600, help="of a worker without rounds")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sync-every", type=int, default=10)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--text", type=Path, help="default: Python's standard library")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "outputs" / "hidden.json", help="file of all results"
    )
    parser.add_argument("--png", type=Path, help="draw the losses into this file")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.workers, options.width, options.layers = 40, 2, 16, 1
        options.only, options.ratios = ["alone", "diloco", "streaming_2", "ddp"], [0.3]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print_machine()
    losses = fit_all(options)
    header = ["loss, local steps; by ratio", *(f"{ratio:g}" for ratio in options.ratios)]
    print_table(header, [row(method, losses, options) for method in options.only])
    if rows := verdicts(losses, options):
        print_table(["ratio", "best hidden", "loss", "to diloco %", "to alone %"], rows)
    print(f"All losses are in {options.out}")
    if options.png:
        draw(losses, options)


if __name__ == "__main__":
    main()
