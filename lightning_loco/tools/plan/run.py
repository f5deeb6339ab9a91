"""The command: from the command line to the printed plan."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_loco.tools.plan.failures import Failures

BYTES_PER_GRADIENT = {
    "32-true": 4,
    "16-mixed": 4,
    "bf16-mixed": 4,
    "16-true": 2,
    "bf16-true": 2,
}
"""Bytes of a value that DDP sends, by Lightning's ``precision``."""

TOKENS_PER_PARAMETER = 20
"""Default of the tokens of a run."""


def whole_number(text: str) -> int:
    """Convert a number such as 124e6 to an integer.

    Raises:
        argparse.ArgumentTypeError: If it is none.

    Example:
        >>> whole_number("124e6")
        124000000
    """
    with contextlib.suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise argparse.ArgumentTypeError(f"must be a whole number, such as 124e6, got {text!r}")


def number_of(unit: str, example: str) -> Callable[[str], float]:
    """Return a type for numbers without a unit in their text.

    Args:
        unit: What is counted, for the error.
        example: A number as text, for the error.

    Example:
        >>> number_of("seconds", "0.5")("2e-3")
        0.002
    """

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            return float(text)
        raise argparse.ArgumentTypeError(
            f"must be a number of {unit}, such as {example}, got {text!r}"
        )

    return convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--parameters",
        type=whole_number,
        metavar="P",
        required=True,
        help="of the model, such as 124e6",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="a worker is a GPU, or a machine whose GPUs average their gradients in every step; "
        "default: the machines of --measured",
    )
    speed = parser.add_mutually_exclusive_group(required=True)
    speed.add_argument(
        "--step-s",
        type=number_of("seconds", "0.5"),
        metavar="SECONDS",
        help="of a local step of a worker, alone",
    )
    speed.add_argument(
        "--tokens-per-s",
        type=number_of("tokens per second", "30e3"),
        metavar="T",
        help="the same as tokens of a worker per second",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=whole_number,
        metavar="T",
        required=True,
        help="tokens of a local step of a worker: sequences times length, with accumulation",
    )
    parser.add_argument(
        "--tokens",
        type=whole_number,
        metavar="T",
        help=f"tokens of the whole run; default {TOKENS_PER_PARAMETER} per parameter",
    )
    links = parser.add_mutually_exclusive_group(required=True)
    links.add_argument(
        "--link",
        metavar="NAME|FILE",
        help="links as in train.py link=...: a name such as lan, wan, dsl, or a file of links",
    )
    links.add_argument(
        "--mbit",
        type=number_of("megabits per second", "1000"),
        help="megabits per second of each worker's link",
    )
    links.add_argument(
        "--measured", metavar="FILE", help="links that lightning-loco doctor --json FILE measured"
    )
    parser.add_argument(
        "--latency-ms",
        type=number_of("milliseconds", "20"),
        metavar="MS",
        help="one-way latency, with --mbit; default 0",
    )
    parser.add_argument(
        "--precision",
        choices=BYTES_PER_GRADIENT,
        default="32-true",
        help="of the Trainer: bytes of gradients; rounds send float32; default %(default)s",
    )
    parser.add_argument(
        "--utilisation",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of the time that workers shall compute; default %(default)g",
    )
    failures = parser.add_argument_group(
        "failures", "a second table: goodput, time and cost of restarts, elastic members, learners"
    )
    for name, unit, example, text in (
        ("mtbf-h", "hours", "500", "mean time between failures of a worker; shows the table"),
        ("restart-s", "seconds", "300", "from a failure to a process in its place; default 300"),
        ("checkpoint-every-s", "seconds", "600", "training between checkpoints; default 600"),
        ("checkpoint-s", "seconds", "10", "of one; default: 12 bytes per parameter at 1 GB/s"),
        ("price", "dollars", "2.5", "of a worker for an hour, in any currency"),
    ):
        kind = number_of(unit, example)
        failures.add_argument(f"--{name}", type=kind, metavar=unit.upper(), help=text)
    parser.add_argument("--json", metavar="FILE", help="write the plan to FILE as well")
    parser.add_argument(
        "--write",
        choices=("torchrun", "slurm", "kubernetes", "skypilot", "ray"),
        metavar="LAUNCHER",
        help="write the files that start the recommended run: %(choices)s",
    )
    parser.add_argument(
        "--to", metavar="FOLDER", help="where --write writes; default: the current folder"
    )
    parser.add_argument(
        "--ranks-per-worker",
        type=int,
        metavar="K",
        help="GPUs of the machine that is a worker, with --write; default 1",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns the exit status.

    Raises:
        ValueError: If a value is out of range or does not fit the others, or a file cannot be read
            or written.
    """
    # Here, not at the top: the other commands need neither NumPy nor networkx.
    from lightning_loco.tools.plan.failures import outcomes
    from lightning_loco.tools.plan.fleet import write_files
    from lightning_loco.tools.plan.planner import PlannedRun, make_plan
    from lightning_loco.tools.plan.text import as_json, failures_report, report

    for needed, names in (
        ("write", ("to", "ranks_per_worker")),
        ("mtbf_h", ("restart_s", "checkpoint_every_s", "checkpoint_s", "price")),
    ):
        for name in names:
            if getattr(args, name) is not None and getattr(args, needed) is None:
                option, other = (f"--{one.replace('_', '-')}" for one in (name, needed))
                raise ValueError(f"{option} belongs to {other}. Drop it, or give {other}.")
    try:
        links = _links(args)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    assert links is not None
    num_workers = links.num_workers if args.workers is None else args.workers
    if num_workers is None:
        raise ValueError("--workers is missing: the number of workers.")
    for name in ("tokens_per_step", "tokens_per_s"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value:g}.")
    step_s = args.step_s if args.tokens_per_s is None else args.tokens_per_step / args.tokens_per_s
    tokens = TOKENS_PER_PARAMETER * args.parameters if args.tokens is None else args.tokens
    job = PlannedRun(
        args.parameters,
        num_workers,
        links,
        step_s,
        args.tokens_per_step,
        tokens,
        BYTES_PER_GRADIENT[args.precision],
        args.utilisation,
    )
    failures = _failures(args)
    try:
        plan = make_plan(job)
        found = None if failures is None else outcomes(plan, failures)
    except OverflowError:
        raise ValueError(
            "The seconds or bytes of this run are too many for a float. Give other --parameters, "
            "another speed or other links."
        ) from None
    print(report(plan))
    if failures is not None and found is not None:
        print(f"\n{failures_report(job, failures, found)}")
    if args.json:
        try:
            text = json.dumps(as_json(plan, found), indent=2)
            Path(args.json).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--json cannot write {args.json}: {error.strerror}.") from None
    if args.write:
        ranks = 1 if args.ranks_per_worker is None else args.ranks_per_worker
        print(f"\n{write_files(plan, args.write, Path(args.to or '.'), ranks)}")
    return 0


def _failures(args: argparse.Namespace) -> Failures | None:
    """Return the failures that were given."""
    from lightning_loco.tools.plan.failures import Failures

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    if args.mtbf_h is None:
        return None
    return Failures(
        args.mtbf_h,
        given(args.restart_s, 300.0),
        given(args.checkpoint_every_s, 600.0),
        given(args.checkpoint_s, 12e-9 * args.parameters),  # float32 and the two moments of Adam
        args.price,
    )


def _links(args: argparse.Namespace) -> Any:
    """Return the links that were given."""
    from lightning_loco.costs import as_links

    if args.latency_ms is not None and args.mbit is None:
        raise ValueError("--latency-ms belongs to --mbit. Drop it, or give --mbit.")
    if args.latency_ms is not None and not args.latency_ms >= 0:
        raise ValueError(f"--latency-ms must be at least 0, got {args.latency_ms:g}.")
    if args.mbit is not None:
        return as_links({"mbit_per_s": args.mbit, "latency_s": (args.latency_ms or 0) / 1000})
    if args.measured is None:
        return as_links(args.link)
    try:
        content = json.loads(Path(args.measured).read_text(encoding="utf-8"))
        links = content["links"]
        if links is not None:
            return as_links(list(links["workers"].values()))
    except OSError as error:
        raise ValueError(f"--measured cannot read {args.measured}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"--measured {args.measured} was not written by lightning-loco doctor --json."
        ) from None
    raise ValueError(
        f"--measured {args.measured} has no links: the doctor checked a single machine, or a "
        "connection failed. Run it on all machines, with --json on machine 0."
    )
