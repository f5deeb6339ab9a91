"""Command line arguments shared by all programs that run an elastic worker."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_loco.elastic import Elastic


def make_parser(timeout_s: float = 30) -> argparse.ArgumentParser:
    """Return a parser of the arguments for :func:`elastic_of` and of the log file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--index", type=int, required=True, help="of this process")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a worker")
    parser.add_argument("--port", type=int, help="at which they connect")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--compression")
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=timeout_s)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--check-every", type=int, default=10)
    return parser


def elastic_of(args: argparse.Namespace) -> Elastic:
    """Return the membership of a worker."""
    return Elastic(
        args.lighthouse,
        min_workers=args.min_workers,
        name=f"w{args.index // args.ranks}",
        host=args.host,
        timeout_s=args.timeout_s,
        check_every=args.check_every,
    )
