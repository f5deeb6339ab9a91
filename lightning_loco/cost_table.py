"""``lightning-loco simulate``: a table of what rounds cost, without training and PyTorch."""

from __future__ import annotations

import argparse
import math

from lightning_loco.arguments import number_of, whole_number
from lightning_loco.costs import ENCODINGS, METHODS, Costs, StepTimes, as_method, estimate
from lightning_loco.links import LINKS, NETWORKS, LinkTimes, as_links
from lightning_loco.topology import as_topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="number of workers")
    parser.add_argument(
        "--parameters",
        type=whole_number,
        required=True,
        metavar="P",
        help="of the model, e.g. 100e9",
    )
    parser.add_argument(
        "--step-s",
        type=number_of("seconds", "0.5"),
        required=True,
        metavar="SECONDS",
        help="mean time of a local step",
    )
    names = ", ".join((*LINKS, *NETWORKS))
    parser.add_argument(
        "--network",
        default="wan",
        metavar="NAME|FILE",
        help=f"links of the workers: {names}, or a file of them; default %(default)s",
    )
    parser.add_argument(
        "--method", choices=list(METHODS), default="diloco", help="default %(default)s"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=100,
        metavar="H",
        help="local steps between rounds; default 100",
    )
    parser.add_argument(
        "--topology",
        metavar="NAME|FILE",
        help="of gasloc and noloco; default ring for gasloc, random_matching for noloco",
    )
    parser.add_argument(
        "--codec", choices=list(ENCODINGS), default="none", help="of messages; default %(default)s"
    )
    parser.add_argument("--fragments", type=int, metavar="F", help="of async and streaming diloco")
    parser.add_argument("--delay", type=int, metavar="STEPS", help="of async and streaming diloco")
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        metavar="PART",
        help="largest part by which a worker is slower or faster than the mean; default 0",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="PART",
        help="largest part by which a single step is longer or shorter; default 0",
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds to compute; default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of speeds and jitter; default 0")


def run(args: argparse.Namespace) -> int:
    """Print the costs of a method and of DDP. Returns the exit status.

    ValueError or FileNotFoundError if an argument cannot work.
    """
    for name in ("workers", "parameters", "every", "rounds"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name} must be at least 1, got {value:,}.")
    if not 0 < args.step_s < math.inf:
        raise ValueError(f"--step-s must be positive and finite, got {args.step_s:g}.")
    links = as_links(args.network)
    assert links is not None
    links.check(args.workers)
    times = LinkTimes(links, args.workers)
    steps = StepTimes.of_spread(args.workers, args.step_s, args.spread, args.jitter, args.seed)
    topology = None
    if METHODS[args.method] == "neighbors":
        default = "ring" if args.method == "gasloc" else "random_matching"
        topology = as_topology(args.topology or default)
        topology.check_num_workers(args.workers)
    elif args.topology is not None:
        raise ValueError(f"{args.method} averages over all workers and takes no --topology.")
    method = as_method(
        args.method, args.every, topology, ENCODINGS[args.codec], args.fragments, args.delay
    )
    rows = {
        args.method: estimate(
            method, args.parameters, steps, times, args.rounds, method.num_fragments
        ),
        "ddp": estimate(as_method("ddp"), args.parameters, steps, times, args.rounds),
    }
    print(table(rows))
    return 0


def table(rows: dict[str, Costs]) -> str:
    """Return a line for each method, by name."""
    cells = [("", "s per local step", "utilisation", "lowest", "s per round", "GB per worker")]
    for name, costs in rows.items():
        cells.append(
            (
                name,
                f"{costs.time_s.mean() / costs.steps:,.3f}",
                f"{costs.utilisation.mean():.1%}",
                f"{costs.utilisation.min():.1%}",
                f"{costs.seconds_per_round:,.1f}",
                f"{costs.bytes_per_round / 1e9:,.3f} per round",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
