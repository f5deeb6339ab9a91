"""What every program of an elastic worker is told."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_loco.elastic import Elastic


def make_parser(timeout_s: float = 30) -> argparse.ArgumentParser:
    """A parser of what :func:`elastic_of` needs, and of where to write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--compression")
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=timeout_s)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--check-every", type=int, default=10)
    return parser


def elastic_of(asked: argparse.Namespace) -> Elastic:
    """The membership of a worker."""
    return Elastic(
        asked.lighthouse,
        min_workers=asked.min_workers,
        name=f"w{asked.index}",
        host=asked.host,
        timeout_s=asked.timeout_s,
        check_every=asked.check_every,
    )
