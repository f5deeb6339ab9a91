"""What compression saves: bytes on the interface, time of a blocking round, and what it costs.

Workers train the demo's GPT with DiLoCo as in ``peers.py``, on the loopback of a network namespace
and across a link that is shaped to 100 Mbit/s (Linux, as root; skipped otherwise). Each codec is
compared with float32 in the same repetition.

  sent         bytes on the interface for each worker and round, with headers and acknowledgements
  of float32   the ratio, whose bound is on the left link's bytes and on the shaped link's time
  blocking     from the end of the last local step until the last worker is done with the round

The second table has the processor time of one thread for 50 million values, against sending them as
float32 at 1 Gbit/s, which takes 1.6 s.

How to read it: bytes hardly vary. Times are medians with quartiles; use an idle machine with as
many cores as workers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import against, make_parser, print_machine, print_table, spread
from libraries.links import Unavailable
from libraries.summary import MB, Runs
from libraries.table import ALONE, OURS
from peers import SIZES, measure, open_link

from lightning_loco.compression import CODECS

SENT = {"int8": 0.27, "e3m0": 0.145, "sparse": 0.02}
"""Most bytes of a round, of float32's; that of sparse for two workers."""
TIME = {"int8": 0.32, "e3m0": 0.19}
"""Longest round on the shaped link, of float32's."""
HEADER = ("link, workers", "codec", "sent MB", "of float32", "bound",
          "blocking ms", "of float32", "bound")  # fmt: skip
GBIT_BYTES_PER_S = 1e9 / 8


def statuses_of(link: str, workers: int, runs: Runs, is_shaped: bool) -> list[list[str]]:
    """One line for each codec."""
    rows = []
    for key, found in runs.items():
        if key == ALONE:
            continue
        codec = key.partition("_")[2]
        both = [(r, f) for r, f in zip(found, runs[OURS], strict=True) if r and f]
        if not both:
            rows.append([f"{link}, {workers}", codec or "float32", *["failed"] * 6])
            continue
        sent = [run.sent / MB for run, _ in both]
        blocking = [ms for run, _ in both for ms in run.blocking_ms]
        cells = [f"{statistics.median(sent):.3f}", "-", "-", spread(blocking, 1), "-", "-"]
        if codec:
            fewer = statistics.median(run.sent / whole.sent for run, whole in both)
            medians = [
                statistics.median(run.blocking_ms) / statistics.median(whole.blocking_ms)
                for run, whole in both
            ]
            cells[1], cells[4] = f"{fewer:.4f}", spread(medians)
            if workers == 2 or codec != "sparse":
                cells[2] = against(fewer, SENT[codec])
            if is_shaped and codec in TIME:
                cells[5] = against(statistics.median(medians), TIME[codec])
        rows.append([f"{link}, {workers}", codec or "float32", *cells])
    return rows


def codec_times(numel: int, repetitions: int) -> list[list[str]]:
    """Processor time of each codec, scaled to 50 million values."""
    values, read = torch.randn(numel), torch.empty(numel)
    rows = []
    for name, kind in CODECS.items():
        codec, spent = kind(), []
        wire = codec.encode(values)
        for _ in range(repetitions):
            began = time.process_time()
            codec.encode(values, wire)
            middle = time.process_time()
            codec.decode(wire, read)
            spent.append((middle - began, time.process_time() - middle))
        encode, decode = (
            50e6 / numel * statistics.median(times) for times in zip(*spent, strict=True)
        )
        part = (encode + decode) / (50e6 * 4 / GBIT_BYTES_PER_S)
        of_whole = len(wire) / (4 * numel)
        rows.append(
            [name, f"{of_whole:.4f}", f"{encode:.3f}", f"{decode:.3f}", against(part, 0.25)]
        )
    return rows


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SIZES, default="5M")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="counted in every run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--sync-every", type=int, default=2, help="local steps of a round")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--links", nargs="+", default=["loopback", "shaped"])
    parser.add_argument("--rate", default="100mbit", help="of the shaped link, as tc writes it")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for one run")
    options = parser.parse_args()
    if options.quick:
        options.model, options.workers, options.links = "tiny", [2], ["loopback"]
        options.rounds, options.repetitions = 2, 1
    options.seed, options.outer_lr, options.outer_momentum, options.dpwa = 0, 0.7, 0.6, None
    return options


def main() -> None:
    options = parse()
    print_machine()
    keys = [ALONE, OURS, "ours_int8", "ours_e3m0", "ours_sparse"]
    rows = []
    for workers in options.workers:
        for name in options.links:
            with tempfile.TemporaryDirectory(prefix="loco-bench-") as folder:
                try:
                    with open_link(name, Path(folder), workers, options.rate) as link:
                        runs, _ = measure(link, options.model, workers, Path(folder), keys, options)
                        rows += statuses_of(link.name, workers, runs, name == "shaped")
                except Unavailable as error:
                    print(f"{name}: skipped: {error}")
    print_table(HEADER, rows)
    header = (
        "codec",
        "bytes of float32",
        "encode 50M, s",
        "decode, s",
        "both / float32 at 1 Gbit/s",
    )
    print_table(header, codec_times(200_000 if options.quick else 10_000_000, options.repetitions))


if __name__ == "__main__":
    main()
